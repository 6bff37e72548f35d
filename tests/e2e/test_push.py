"""`ludus checkpoint push` to a local stand-in of the hub."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from harness import BABYAI, Done, Ludus
from hub_server import HubServer
from transformers import AutoModelForCausalLM, AutoTokenizer

TOKEN = "hf_" + "x" * 20
ONLINE = (
    "from huggingface_hub import constants\n"
    "constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET = False, True\n"
)


def push(
    ludus: Ludus, url: str, *argv: object, token: str = TOKEN, setup: str = ONLINE, **more: Any
) -> Done:
    env = {"HF_ENDPOINT": url, "HF_TOKEN": token, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    done = ludus("checkpoint", "push", *argv, setup=setup, env=env, **more)
    assert token not in done.all, "the token is never printed"
    return done


def test_push_and_update(reference: Ludus, tmp_path: Path) -> None:
    named = ("tiny-1", "me/tiny", "--license", "apache-2.0")
    with HubServer(TOKEN) as hub:
        done = push(reference, hub.url, *named, "--checkpoint", "best", "--private").ok()
        assert done.out.strip().splitlines()[-1] == f"{hub.url}/me/tiny/commit/1"
        assert hub.repos["me/tiny"]["visibility"] == "private"
        files = hub.files["me/tiny", "main"]
        assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= files.keys()
        for name, data in files.items():
            (tmp_path / name).write_bytes(data)
        assert AutoModelForCausalLM.from_pretrained(tmp_path).num_parameters() > 0
        assert AutoTokenizer.from_pretrained(tmp_path)

        push(reference, hub.url, *named).refused(2, "me/tiny exists already", "--update")
        files["adapter_config.json"], files["notes.md"] = b"{}", b"mine"
        push(reference, hub.url, *named, "--update").ok()
        assert "adapter_config.json" not in files, "of an earlier version"
        assert files["notes.md"] == b"mine"
        assert b"rl-000005" in files["README.md"]
        push(reference, hub.url, *named, "--update", "--revision", "greedy").ok()
        assert "model.safetensors" in hub.files["me/tiny", "greedy"]


def test_dry_run_prints_files_and_card_and_uploads_nothing(reference: Ludus) -> None:
    named = ("tiny-1", "me/tiny", "--license", "mit", "--dry-run")
    with HubServer(TOKEN) as hub:
        told = push(reference, hub.url, *named).ok().out
        assert hub.requests == []
    assert "bytes  model.safetensors" in told
    assert "nothing was uploaded" in told
    card = told[told.index("---\n") :]
    for words in (
        "license: mit", "# me/tiny", 'from_pretrained("me/tiny")', "checkpoint `rl-000005`",
        "RL: grpo, 5 steps of 4 tasks with 4 episodes each", "level: GoToLocalS5N2",
        "| after RL | 8 |", "95 % intervals", "num_layers: 1", "transformers ",
    ):  # fmt: skip
        assert words in card, words
    assert "runs_dir" not in card
    assert "platform" not in card


def test_what_the_hub_refuses(reference: Ludus) -> None:
    named = ("tiny-1", "me/tiny", "--license", "mit")
    with HubServer(TOKEN) as hub:
        push(reference, hub.url, *named, token="hf_wrong").refused(
            1, "does not allow writing to me/tiny (401)", "HF_TOKEN", "hf auth login"
        )
        url = hub.url
    push(reference, url, *named).refused(1, f"me/tiny cannot be uploaded to {url}", "refused")


def test_a_hub_that_never_answers_is_given_up(reference: Ludus) -> None:
    """The hub's own client waits without a limit."""
    hurried = ONLINE + "from ludus.pipeline.evaluation import publish\npublish.ANSWER_S = 0.5\n"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        done = push(reference, url, "tiny-1", "me/x", "--license", "mit", setup=hurried)
    done.refused(1, f"me/x cannot be uploaded to {url}", "no answer for 0.5 s")


class Hostile(HubServer):
    """Answers in its own way where the path has `where`."""

    where = "create"

    def __init__(self, status: int, content: Any) -> None:
        super().__init__(TOKEN)
        self.given = status, content

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        return self.given if self.where in path else super().answer(method, path, body)


NO_HUB = "does not answer as a Hugging Face hub", "HF_ENDPOINT"


@pytest.mark.parametrize(
    ("status", "content", "said"),
    [
        (200, None, NO_HUB),
        (200, ["x"], NO_HUB),
        (302, "", NO_HUB),
        (429, {"error": "slow down"}, ("answered 429", "slow down")),
    ],
)
def test_what_is_no_hub(reference: Ludus, status: int, content: Any, said: tuple[str, ...]) -> None:
    with Hostile(status, content) as hub:
        push(reference, hub.url, "tiny-1", "me/x", "--license", "mit").refused(1, *said)


class Cut(HubServer):
    """Closes the connection in the middle of an upload."""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        if path.startswith("/upload/"):
            raise ConnectionAbortedError
        return super().answer(method, path, body)


def test_an_upload_that_is_cut_can_be_repeated(reference: Ludus) -> None:
    named = ("tiny-1", "me/x", "--license", "mit")
    hurried = ONLINE + "import time\ntime.sleep = lambda seconds: None\n"
    with Cut(TOKEN) as hub:
        done = push(reference, hub.url, *named, setup=hurried)
        done.refused(1, "me/x cannot be uploaded", "nothing was committed", "--update")
        assert hub.files["me/x", "main"] == {}, "one commit, or none"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["me/tiny"], "--license is required: e.g. apache-2.0"),
        (["me/tiny", "--license", "a: b"], "--license 'a: b'"),
        (["a/b/c", "--license", "mit"], "'a/b/c' cannot name a repository"),
    ],
)
def test_wrong_names(reference: Ludus, argv: list[str], said: str) -> None:
    push(reference, "http://127.0.0.1:9", "tiny-1", *argv).refused(2, said)


def test_a_card_has_no_secrets(ludus: Ludus) -> None:
    secret = "metrics=[{name: tensorboard}]"
    quick = ["sft.steps=1", "rl=null", "demonstrations.num_episodes=4", "tasks.heldout=null"]
    ludus("train", BABYAI, *quick, secret, "report=false").ok()
    config = ludus.run() / "config.yaml"
    text = config.read_text().replace("judge: null", "judge: {name: x, args: {api_key: sk-1}}")
    config.write_text(text)
    told = push(ludus, "http://127.0.0.1:9", "tiny-1", "me/x", "--license", "mit", "--dry-run")
    assert "sk-1" not in told.ok().out
    assert "(removed)" in told.out
    assert "not evaluated on held-out tasks" in told.out
