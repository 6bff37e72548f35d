"""The recipe of a domain of one's own on docs/coevolution.md, and the mistakes beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludus.coevolve.checks import check_all
from ludus.coevolve.flow import storage_of
from ludus.coevolve.roles import Roles
from ludus.coevolve.test_mode import LIMITS, tiny
from ludus.config.coevolve import CoevolveConfig
from ludus.config.load import load_as
from ludus.core.errors import ConfigError
from ludus.core.types import Spec
from ludus.data.splits import read_splits

PAGE = Path(__file__).parents[2] / "docs" / "coevolution.md"


def _block(kind: str, opening: str) -> str:
    blocks = PAGE.read_text(encoding="utf-8").split(f"```{kind}\n")[1:]
    return next(b.split("```")[0] for b in blocks if b.startswith(opening))


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's files, in the folder of the command."""
    monkeypatch.chdir(tmp_path)
    Path("start.jsonl").write_text(_block("json", '{"messages"'), encoding="utf-8")
    Path("heldout.jsonl").write_text(_block("json", '{"question": "5'), encoding="utf-8")


def _recipe(*overrides: str) -> CoevolveConfig:
    Path("mine.yaml").write_text(_block("yaml", "name: conversions"), encoding="utf-8")
    return load_as(CoevolveConfig, Path("mine.yaml"), overrides)


def _roles(config: CoevolveConfig) -> Roles:
    return Roles(config, storage_of(config))


def test_start_needs_neither_tasks_nor_a_judge() -> None:
    roles = _roles(_recipe())
    check_all(roles)
    start = roles.start()
    assert start.judge == Spec(name="math")
    assert start.tasks.train.name == "prompts"
    assert len(read_splits(start).train) == 64  # refused before: nothing scores its tasks


def test_start_has_the_judge_of_the_executor_or_its_own() -> None:
    assert _roles(_recipe("executor.judge=answer")).start().judge == Spec(name="answer")
    both = _recipe("executor.judge=answer", "start.judge=math")
    assert _roles(both).start().judge == Spec(name="math")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("start.sft.data=none.jsonl", "start.sft.data: none.jsonl does not exist"),
        (
            "executor.tasks.heldout.args.path=none.jsonl",
            "executor.tasks.heldout.args.path: none.jsonl does not exist",
        ),
        (
            "curriculum.tasks.train.args.prompt=hi",
            "curriculum.tasks.train.args.prompt is not an argument of prompts "
            "(did you mean curriculum.tasks.train.args.prompts?)",
        ),
    ],
)
def test_a_mistake_is_refused_once_with_its_place(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_all(_roles(_recipe(override)))
    assert str(refused.value) == message


def test_start_data_may_go_once_its_model_is_there() -> None:
    config = _recipe("start.sft.data=none.jsonl")
    storage_of(config).model("start").mkdir(parents=True)
    check_all(_roles(config))


def test_sft_belongs_to_start() -> None:
    with pytest.raises(
        ConfigError, match=r"shared\.sft: only the first run has it: move it to `start`"
    ):
        _roles(_recipe("shared.sft.steps=3"))


@pytest.mark.parametrize(("overrides", "most"), [((), 8), (("shared.evaluate.num_tasks=3",), 3)])
def test_test_mode_plays_few_heldout_tasks(overrides: tuple[str, ...], most: int) -> None:
    assert LIMITS["evaluate"]["num_tasks"] == 8
    config = tiny(_recipe(*overrides))
    assert _roles(config).solving(0, "evaluate").evaluate.num_tasks == most
