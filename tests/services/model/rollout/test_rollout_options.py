"""`ludus serve model A --challenger B` and `ludus replay LOG`: options, errors, the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from model_world import make_folder
from rollout_service import QUICK
from service_world import command, until

from ludus.config.schema import ModelConfig
from ludus.core.errors import ConfigError, LudusError
from ludus.core.types import Spec
from ludus.services.model.policy import ModelOverrides, Policy
from ludus.services.model.rollout.controller import MIN_UNITS, WINDOW
from ludus.services.model.rollout.events import Ended, RolloutSettings, Variant
from ludus.services.model.rollout.log import RolloutLog
from ludus.services.model.serving import Challenge, challenge_of, default_log, serve_model
from ludus.services.server.connections import ConnectionLimits


def test_options_become_settings() -> None:
    options = {"shares": "1,2.5,50", "step_time": 7.0, "feedback_time": 60.0, "alpha": None}
    given = challenge_of("b", {**options, "rollout_log": "log.jsonl"})
    assert given is not None
    assert given.log == "log.jsonl"
    assert given.settings.shares == (0.01, 0.025, 0.5)
    assert (given.settings.step_s, given.settings.feedback_s) == (7.0, 60.0)
    assert given.settings.alpha == 0.05
    assert challenge_of("b", {}) == Challenge("b", RolloutSettings())
    assert challenge_of(None, dict.fromkeys(options)) is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shares": "5;10"}, "--shares 5;10: percentages such as 5,10,25,50"),
        ({"shares": ""}, "--shares : percentages such as"),
        ({"shares": "5,100"}, "--shares 5,100: from 1 to 100 shares, each from 0.01 to 99.99 (%)"),
        ({"shares": "0"}, "--shares 0: from 1 to 100 shares"),
        ({"shares": "nan"}, "--shares nan: from 1 to 100 shares"),
        ({"shares": "1e-320"}, ": from 1 to 100 shares, each from 0.01 to 99.99"),
        ({"shares": "0.009,5"}, "--shares 0.009,5: from 1 to 100 shares, each from 0.01"),
        ({"shares": "5,99.999"}, "--shares 5,99.999: from 1 to 100 shares, each from 0.01"),
        ({"alpha": 1e-310}, "--alpha 1e-310: from 1e-09 to 0.5"),
        ({"rollout_log": ""}, "--rollout-log is empty: give the path of a file"),
        ({"shares": "10,5"}, "--shares 10,5: each share must be larger"),
        ({"alpha": 0.0}, "--alpha 0.0: input should be greater than 0"),
        ({"alpha": float("nan")}, "--alpha nan: input should be"),
        ({"margin": -0.1}, "--margin -0.1: input should be greater than or equal to 0"),
        ({"min_samples": 0}, "--min-samples 0: input should be greater than or equal to 1"),
        ({"max_samples": 10}, "--max-samples 10: 4 shares of --min-samples 50 need"),
        ({"max_latency_ratio": 0.5}, "--max-latency-ratio 0.5: input should be"),
        ({"max_error_increase": 1.0}, "--max-error-increase 1.0: input should be less than 1"),
        ({"step_time": -1.0}, "--step-time -1.0: input should be"),
        ({"feedback_time": 0.0}, "--feedback-time 0.0: input should be"),
        ({"answer_time": 0.0}, "--answer-time 0.0: input should be"),
    ],
)
def test_wrong_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        challenge_of("b", options)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_least_and_largest_options_are_taken() -> None:
    given = challenge_of("b", {"shares": "0.01,99.99", "alpha": 1e-9})
    assert given is not None
    assert given.settings.shares == pytest.approx((0.0001, 0.9999))
    assert challenge_of("b", {"alpha": 0.5}) is not None


def test_option_without_a_challenger_is_refused() -> None:
    with pytest.raises(ConfigError, match="--min-samples has an effect with --challenger only"):
        challenge_of(None, {"min_samples": 10})


def policy(origin: str, folder: Path | None = None) -> Policy:
    name = folder.name if folder else origin.partition("/")[0]
    return Policy(name, origin, None, None, ModelConfig(path="model"), 0, folder)


def test_each_pair_of_models_has_a_log_of_its_own() -> None:
    one, two, three = (policy(f"support-3/rl-000{number}00") for number in (1, 2, 3))
    assert default_log(one, two) == "rollout-support-3-rl-000100-support-3-rl-000200.jsonl"
    here, there = (policy("model", Path(place) / "model") for place in ("/here", "/there"))
    pairs = [(one, two), (one, three), (two, three), (two, one), (one, here), (one, there)]
    assert len({default_log(*pair) for pair in pairs}) == len(pairs)


def refusal(champion: Path, challenger: Path, log: Path) -> str:
    with pytest.raises(LudusError) as caught:
        serve_model(
            str(champion),
            host="127.0.0.1",
            port=0,
            name=None,
            runs_dir="nowhere",
            overrides=ModelOverrides(),
            sampler=Spec(name="in_process"),
            max_turns=8,
            max_turns_per_token=0,
            connections=ConnectionLimits(),
            say=print,
            challenge=Challenge(str(challenger), QUICK, str(log)),
        )
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_models_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    one, two = make_folder(tmp_path / "one", 1), make_folder(tmp_path / "two", 2)
    assert "there is no run" in refusal(one, tmp_path / "absent", tmp_path / "log")
    config = json.loads((two / "config.json").read_text())
    (two / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
    said = refusal(one, two, tmp_path / "log")
    assert "its context length is 1024, the champion's 2048: give --context-length 1024" in said
    (two / "config.json").write_text(json.dumps(config))
    for template in (*two.glob("chat_template*"), two / "tokenizer_config.json"):
        if template.suffix == ".json":
            kept = json.loads(template.read_text())
            kept.pop("chat_template", None)
            template.write_text(json.dumps(kept))
        else:
            template.unlink()
    assert "has no chat template, the other model has one" in refusal(one, two, tmp_path / "log")
    assert not (tmp_path / "log").exists()


@pytest.mark.slow
def test_command_serves_and_its_log_is_replayed(tmp_path: Path, ludus: Any) -> None:
    one, two = make_folder(tmp_path / "one", 1), make_folder(tmp_path / "two", 2)
    log = tmp_path / "log.jsonl"
    words = [str(one), "--challenger", str(two), "--rollout-log", str(log), "--name", "tiny"]
    for start in range(2):
        with command(*words, "--shares", "50", verb="model") as served:
            asked = {"model": "tiny", "prompt": "go", "max_tokens": 2}
            for number in range(6):
                answer = httpx.post(f"{served.url}/v1/completions", json=asked, timeout=60).json()
                if number < 3:
                    scored = {"id": answer["id"], "score": 0.5}
                    assert httpx.post(f"{served.url}/feedback", json=scored).is_success
            until(lambda served=served: httpx.get(f"{served.url}/rollout").is_success)
            variants = httpx.get(f"{served.url}/rollout").json()["variants"].values()
            assert sum(variant["requests"] for variant in variants) == 6 * (start + 1)
    told = ludus("replay", str(log)).ok().out
    assert "start" in told
    assert "Replayed: 18 events and 1 decision, as recorded." in told


def test_replay_tells_decisions_and_faults(tmp_path: Path, ludus: Any) -> None:
    path = tmp_path / "log.jsonl"
    rollout = RolloutLog.open(path, "run-a/rl-000100", "run-b/rl-000200", QUICK, 1.75e9)
    for number in range(WINDOW * MIN_UNITS):
        for variant in Variant:
            end = "failed" if variant is Variant.CHALLENGER else "ok"
            id = f"{variant}-{number}"
            event = Ended(t=1.75e9, id=id, variant=variant, unit=id, end=end, seconds=1.0)
            if not rollout.controller.ended:
                rollout.apply(event)
    rollout.close()
    told = ludus("replay", str(path)).ok().out
    assert "run-b/rl-000200" in told
    assert "2025-06-15 15:06:40  roll_back      0 %  errors: " in told
    path.write_text(path.read_text().replace('"roll_back"', '"promote"'))
    failed = ludus("replay", str(path))
    assert failed.code == 1
    assert "promote to 0 % at 1750000000.000 is recorded, the events give roll_back" in failed.err
    absent = ludus("replay", str(tmp_path / "absent"))
    assert (absent.code, "No such file or directory" in absent.err) == (2, True)
