"""Mistakes in a command are refused before any episode, in one line that names the argument."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from benchmark_samples import sample
from chat_server import ChatServer, text
from starlette.responses import JSONResponse

from ludus.cli import main

OWN = """
from ludus.envs.base import Env

class NoTask(Env):
    async def reset(self, task): ...
    async def step(self, action): ...

class Refuses(NoTask):
    def __init__(self, size: int = 3):
        raise ValueError("the size must be even")

class NoEnv:
    pass

class Strict:
    def __init__(self, size: int = 3):
        raise ValueError("the size must be even")
"""

URL = "http://127.0.0.1:1/v1"
MODEL = ["--model", "m", "--base-url", URL]


def refused(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *argv: str,
    exit_code: int = 2,
) -> str:
    """Returns what the command prints to stderr."""
    monkeypatch.setattr(sys, "argv", ["ludus", *argv])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == exit_code
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["rollout", "babyai", "level=Nope", *MODEL], "env.args.level: 'Nope' is not a BabyAI"),
        (["check-env", "babyai", "level=Nope"], "env.args.level: 'Nope' is not a BabyAI"),
        (
            ["generate-data", "d", "babyai", "level=Nope", *MODEL, "--source", "model"],
            "env.args.level: 'Nope' is not a BabyAI",
        ),
        (["rollout", "own.py:Refuses", *MODEL], "env: 'own.py:Refuses' cannot be built: ValueEr"),
        (["check-env", "own.py:Refuses"], "env: 'own.py:Refuses' cannot be built: ValueError: the"),
        (["serve", "env", "own.py:Refuses"], "env: 'own.py:Refuses' cannot be built: ValueError"),
        (["generate-data", "d", "own.py:Refuses"], "env: 'own.py:Refuses' cannot be built: Value"),
        (
            ["debug", "textcraft-tiny", "judge=own.py:Strict"],
            "judge: 'own.py:Strict' cannot be built: ValueError: the size must be even [own.py, li",
        ),
        (["rollout", "remote", "url=here", *MODEL], "env.args.url: 'here' does not start with"),
        (
            ["rollout", "remote", "url=[http://a:1, here]", *MODEL],
            "env.args.url[1]: 'here' does not start with",
        ),
        (["check-env", "own.py:NoEnv"], "'own.py:NoEnv' is not an environment: derive the class"),
        (["rollout", "own.py:NoEnv", *MODEL], "own.py:NoEnv does not make tasks from seeds"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_environment_is_refused_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    err = refused(capsys, monkeypatch, *argv)
    assert told in err
    assert err.startswith("ludus: ")
    assert len(err.splitlines()) == 1


RECIPE = """
model: {architecture: qwen3, tokenizer: {name: words}}
env: textcraft
tasks: {train: {name: env, args: {num_tasks: 1}}}
rl: {}
"""


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("", "--tools: recipe.yaml has no `tools`: give a recipe that has them"),
        ("tools: [calculatr]", "tools.0.name: 'calculatr' is not a known tool (did you mean"),
        (
            "tools: [calculator]\nlimits: {calc: {rate_per_s: 1}}",
            "'calc' is no function of `tools`",
        ),
        (
            "tools: [calculator]\nrollout: {format: code, markers: {tool: calculator}}",
            "--format: code is not possible with an endpoint, whose API cannot continue a turn",
        ),
    ],
    ids=["none", "unknown", "limit", "code"],
)
def test_tools_that_an_endpoint_cannot_have_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: str,
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(RECIPE + more)
    verbs = [["rollout", "textcraft", *MODEL]]
    verbs += [] if "code" in more else [["serve", "env", "textcraft", "--port", "0"]]
    for verb in verbs:
        err = refused(capsys, monkeypatch, *verb, "--tools", "recipe.yaml")
        assert told in err
        assert len(err.splitlines()) == 1


def test_no_episode_is_begun_with_a_wrong_argument(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with ChatServer(lambda body: text("Action: go forward")) as server:
        words = ("--model", "m", "--base-url", server.url, "--ids", "0-2")
        err = refused(capsys, monkeypatch, "rollout", "babyai", "level=Nope", *words)
        assert server.bodies == []
    assert "1/3" not in err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--samples", "0"], "--samples must be a whole number >= 1, got 0"),
        (["--num-tasks", "0"], "--num-tasks must be a whole number >= 1"),
        (["--temperature", "-1"], "--temperature must be a number >= 0, got -1.0"),
        (["--temperature", "nan"], "--temperature must be a finite number >= 0, got nan"),
        (["--samples", "3"], "--samples: 3 episodes of each task are equal at --temperature 0"),
    ],
    ids=" ".join,
)
def test_options_of_evaluate_are_named_as_they_are_typed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    told: str,
) -> None:
    words = ("evaluate", f"m@{URL}", "--recipe", "textcraft-tiny", *options)
    err = refused(capsys, monkeypatch, *words)
    assert told in err
    assert "evaluate." not in err


def test_check_env_says_what_an_environment_without_tasks_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    monkeypatch.setattr(sys, "argv", ["ludus", "check-env", "own.py:NoTask"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    said = capsys.readouterr().out
    assert "NoTask has no classmethod `task(tier, seed)`, which returns a Task" in said
    assert "check_env(NoTask, tasks=[...])" in said


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full: a disk that is full")
def test_a_full_disk_is_told_in_a_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "ludus", "recipes"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "ludus: standard output: No space left on device\n",
    )


def test_errors_of_a_server_do_not_steer_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = "\x1b]8;;http://evil\x07L\x9b31m\u202e"
    with ChatServer(lambda body: JSONResponse({"error": {"message": evil}}, 400)) as server:
        data = f"gsm8k={sample('gsm8k')}"
        words = ["benchmark", f"m@{server.url}", "--on", "gsm8k", "--data", data]
        err = refused(capsys, monkeypatch, *words, exit_code=1)
    assert r"\x1b]8;;http://evil\x07L\x9b31m\u202e" in err
    assert err.rstrip("\n").isprintable()


def test_a_check_stops_at_its_time_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["ludus", "check-env", "faulty_envs:Hangs", "--tasks", "1", "--timeout", "0.2"]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert "step takes longer than 0.2 s" in capsys.readouterr().out
