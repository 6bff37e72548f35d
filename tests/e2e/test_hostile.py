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
            ],
            2,
            "Bandit does not make tasks from seeds; give the class a method `task`",
        ),
        (["train", BABYAI, "store=sqlite:///folder"], 2, "folder is a folder: name a file"),
        (["train", BABYAI, "demonstrations=null", "sft.data=empty.jsonl"], 1, "no conversation"),
        (["train", "--resume", "x-1", "--runs-dir", "odd"], 2, "odd holds no runs"),
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


def test_where_an_export_cannot_go(reference: Ludus, tmp_path: Path) -> None:
    reference("export", "tiny-1", "").refused(2, "is not a file name")
    reference("export", "tiny-1", tmp_path).refused(1, "Is a directory")
    written = ["export", "tiny-1", tmp_path / "x.jsonl", "--min-score", "nan"]
    reference(*written).refused(2, "min_score must be a number, got nan")


def test_checkpoints_are_listed_in_words(reference: Ludus) -> None:
    lines = reference("checkpoint", "list", "tiny-1").ok().out.splitlines()
    assert any(line.startswith("rl-000005: rl step 5") for line in lines), lines
    assert not any("CheckpointInfo" in line for line in lines)


def test_arguments_of_check_env_are_read_as_overrides_are(ludus: Ludus) -> None:
    told = ludus("check-env", "babyai", "level=no")  # which YAML 1.1 reads as false
    assert "'no' is not a BabyAI level" in told.out


def test_a_template_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "x.jinja").write_bytes(b"\xb3\xff")
    with pytest.raises(ConfigError, match=r"x\.jinja cannot be read: 'utf-8' codec"):
        load_template(str(tmp_path / "x.jinja"))
