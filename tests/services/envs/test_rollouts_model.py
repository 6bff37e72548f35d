"""`POST /rollouts` against `ludus serve model`, over HTTP."""

from __future__ import annotations

from pathlib import Path

import httpx
from model_world import make_folder, served
from service_world import service
from transformers import AutoTokenizer


def test_episodes_of_a_served_model_have_its_token_ids(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", seed=0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with served(folder) as model, service("textcraft") as address:
        asked = {
            "env": "textcraft",
            "model": "tiny",
            "base_url": f"{model}/v1",
            "ids": [0, 1],
            "max_round": 2,
            "max_tokens": 12,
            "format": "plain",
        }
        told = httpx.post(f"{address}/rollouts", json=asked, timeout=60).json()
        again = httpx.post(f"{address}/rollouts", json=asked, timeout=60).json()
        long = httpx.post(f"{address}/rollouts", json={**asked, "max_tokens": 9999}, timeout=60)
    for entry, same in zip(told["results"], again["results"], strict=True):
        assert entry["error"] is None, entry
        assert entry["policy_versions"] == [0] * entry["num_turns"]
        assert entry["status"] in ("truncated_length", "truncated_turns")
        assert entry["conversation"] == same["conversation"]  # seeds derive from the ids
        said = [m["content"] for m in entry["conversation"] if m["role"] == "assistant"]
        sampled = []
        for row in entry["rows"]:
            chosen = [i for i, m in zip(row["token_ids"], row["mask"], strict=True) if m]
            sampled += chosen
            assert all(
                (p < 0) == bool(m) for p, m in zip(row["logprobs"], row["mask"], strict=True)
            )
        assert tokenizer.decode(sampled, skip_special_tokens=True) == "".join(said)
    assert {e["status"] for e in long.json()["results"]} == {"error_env"}
    assert "does not fit the model" in long.json()["results"][0]["error"]
