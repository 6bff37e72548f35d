"""Wrong input to any command ends in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import BABYAI, Ludus

from ludus.core.errors import ConfigError
from ludus.models.chat.template import load_template


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["train", ":"], 2, "no module named ''"),
        (["train", ".recipe:tiny"], 2, "no module named '.recipe'"),
        (["train", BABYAI, "env={name: ':'}"], 2, "no module named ''"),
        (
            [
                "train",
                BABYAI,
                "env=loop_helpers:Bandit",
                "tasks={train: {name: env, args: {num_tasks: 4}}}",
                "tasks.heldout=null",
            ],
            2,
            "Bandit does not make tasks from seeds; give the class a method `task`",
        ),
        (["train", BABYAI, "store=sqlite:///folder"], 2, "folder is a folder: name a file"),
        (["train", BABYAI, "demonstrations=null", "sft.data=empty.jsonl"], 1, "no conversation"),
        (["train", "--resume", "x-1", "--runs-dir", "odd"], 2, "odd holds no runs"),
        (["train", "--resume", "", "--runs-dir", "odd"], 2, "there is no run ''"),
        (
            ["train", BABYAI, "threads=100000000"],
            2,
            "threads must be a whole number >= 0 and <= 1024",
        ),
        (["train", BABYAI, "sft.optimizer.lr=1e38"], 2, "sft.optimizer.lr must be a number > 0"),
        (["train", BABYAI, "sft.optimizer.betas=[0.9, 2]"], 2, "sft.optimizer.betas.1"),
        (["debug", BABYAI, "--tasks", "-3"], 2, "--tasks"),
        (["check-env", "babyai", "--tasks", "0"], 2, "--tasks"),
        (["check-env", ":"], 2, "no module named ''"),
        (["check-env", "babyai", "level=[GoToObj"], 2, "level=[GoToObj: not valid YAML"),
        (["check-env", "babyai", "=3"], 2, "key=value"),
        (["runs", "--runs-dir", "odd"], 2, "odd holds no runs yet"),
        (["runs", "--store", "sqlite:///folder"], 2, "folder is a folder: name a file"),
        (["train", BABYAI, "rl.steps=abc"], 2, "ludus: override rl.steps=abc: rl.steps must be"),
        (["train", BABYAI, "rl.group_size=1"], 2, "ludus: override rl.group_size=1: `rl.group_"),
        (["train", BABYAI, "rl.horizon=[[1, 2]]"], 2, "ludus: override rl.horizon=[[1, 2]]: rl: "),
        (["train", BABYAI, "env.args.x=3"], 2, "ludus: override env.args.x=3: env.args.x is not"),
        (["train", BABYAI, "metrics=[nope]"], 2, "metrics.0.name: 'nope' is not a known metrics s"),
        (["train", BABYAI, "env.args.level=Nope"], 2, "env.args.level: 'Nope' is not a BabyAI le"),
        (["train", BABYAI, "env=no.py:X"], 2, "env.name: env 'no.py:X': there is no file no.py"),
        (["debug", BABYAI, "env.args.x=3"], 2, "ludus: override env.args.x=3: env.args.x is not"),
        (["rollout", "textcraft"], 2, "ludus: --model is required"),
        (
            ["rollout", "textcraft", "--model", "x", "--base-url", "http://x/v1", "--format", "y"],
            2,
            "--format must be one of plain, react, tools, got 'y'",
        ),
        (
            ["check-env", "babyai", "levle=3"],
            2,
            "args.levle is not an argument (did you mean args.l",
        ),
        (["serve", "model", "nope"], 2, "nope is not a folder, and there is no run 'nope'"),
        (["config", "nope"], 2, "nope is not a key, a section or a plug-in: `ludus config` lists"),
        (["config", "babyay"], 2, "(did you mean babyai?)"),
        (["train", BABYAI, "model.architecture.args.hidden_size=4000000000"], 2, "GiB in float32"),
    ],
    ids=lambda value: " ".join(value).replace(BABYAI, "tiny") if isinstance(value, list) else "",
)
def test_no_mistake_ends_in_a_traceback(
    ludus: Ludus, argv: list[str], code: int, said: str
) -> None:
    (ludus.cwd / "folder").mkdir()
    (ludus.cwd / "empty.jsonl").touch()
    (ludus.cwd / "odd" / "x-1" / "config.yaml").mkdir(parents=True)
    (ludus.cwd / "odd" / "ludus.db").mkdir()
    ludus(*argv).refused(code, said)


@pytest.mark.parametrize("verb", ["runs", "train", "check-env", "plan", "checkpoint"])
def test_a_wrong_log_setting_is_refused_by_every_verb(ludus: Ludus, verb: str) -> None:
    arguments = {"train": [BABYAI], "plan": [BABYAI], "check-env": ["babyai"]}
    argv = arguments.get(verb, ["list", "x"] if verb == "checkpoint" else [])
    loud = ludus(verb, *argv, env={"LOG_LEVEL": "loud"})
    assert loud.refused(2).err == (
        "ludus: LOG_LEVEL must be one of debug, info, warning, error, critical, got 'loud'\n"
    )
    ludus(verb, *argv, env={"LOG_FORMAT": "xml"}).refused(2, "one of human, json, got 'xml'")


@pytest.mark.parametrize("verb", ["show", "export", "report", "evaluate", "checkpoint", "serve"])
def test_an_unknown_run_is_a_wrong_call(reference: Ludus, verb: str) -> None:
    argv = {"export": ["tinny-1", "x.jsonl"], "checkpoint": ["list", "tinny-1"]}
    argv["serve"] = ["model", "tinny-1"]
    done = reference(verb, *argv.get(verb, ["tinny-1"]))
    done.refused(2, "tinny-1", "did you mean tiny-1?")
    reference("show", "tiny-1", "nope").refused(2, "has no trajectory 'nope'")


def test_a_wrong_plug_in_is_all_that_the_user_sees(ludus: Ludus) -> None:
    done = ludus("train", BABYAI, "env.args.x=3", "metrics=[nope]")
    assert len(done.refused(2).all.splitlines()) == 3, "the exit code and a line for each fault"


def test_the_reference_shows_a_users_class(ludus: Ludus) -> None:
    (ludus.cwd / "own.py").write_text(
        "class Own:\n    def __init__(self, size: int = 3) -> None:\n        ...\n"
    )
    shown = ludus("config", "own.py:Own").ok().out
    assert "size" in shown
    assert "a whole number" in shown
    assert "level" in ludus("config", "babyai").ok().out
    ludus("config", "own.py:Nope").refused(2, "has no 'Nope'")


def test_where_an_export_cannot_go(reference: Ludus, tmp_path: Path) -> None:
    reference("export", "tiny-1", "").refused(2, "is not a file name")
    reference("export", "tiny-1", tmp_path).refused(2, "is a folder: name a file in it")
    written = ["export", "tiny-1", tmp_path / "x.jsonl", "--min-score", "nan"]
    reference(*written).refused(2, "min_score must be a number, got nan")


def test_checkpoints_are_listed_in_words(reference: Ludus) -> None:
    lines = reference("checkpoint", "list", "tiny-1").ok().out.splitlines()
    assert any(line.startswith("rl-000005: rl step 5") for line in lines), lines
    assert not any("CheckpointInfo" in line for line in lines)


def test_arguments_of_check_env_are_read_as_overrides_are(ludus: Ludus) -> None:
    """`no` is false in YAML 1.1."""
    ludus("check-env", "babyai", "level=no").refused(2, "'no' is not a BabyAI level")


def test_a_template_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "x.jinja").write_bytes(b"\xb3\xff")
    with pytest.raises(ConfigError, match=r"x\.jinja cannot be read: 'utf-8' codec"):
        load_template(str(tmp_path / "x.jinja"))
