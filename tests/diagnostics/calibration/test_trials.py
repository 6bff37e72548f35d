"""The trials of `ludus init`."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ludus.config.schema import RunConfig
from ludus.config.training import SFTUntilConfig
from ludus.core.errors import ConfigError, DataError
from ludus.core.types import Group, Message, Spec, Status, Task
from ludus.data.conversations import Conversation
from ludus.data.splits import Splits
from ludus.diagnostics.calibration.first import base
from ludus.diagnostics.calibration.subject import Subject
from ludus.diagnostics.calibration.tokens import trained
from ludus.diagnostics.calibration.trials import rl as trial_rl
from ludus.diagnostics.calibration.trials import try_out as trying
from ludus.diagnostics.calibration.trials.dtypes import at_dtype, time_dtypes
from ludus.diagnostics.calibration.trials.rl import affordable, growth
from ludus.diagnostics.calibration.trials.sft import measurable, to_its_end, unseen_loss
from ludus.diagnostics.calibration.trials.steps import close
from ludus.diagnostics.calibration.trials.trial import Trial
from ludus.diagnostics.calibration.trials.try_out import try_out
from ludus.evaluate.results import Estimate
from ludus.pipeline import sft_end
from ludus.pipeline.build import Run, build
from ludus.pipeline.parts.tokenizer import make_renderers
from ludus.store.folders import RunFolder
from ludus.tasks.readers import TaskList
from ludus.train.learner import OutOfMemory


def recipe(context: int) -> RunConfig:
    subject = Subject("env", "babyai", "babyai", Spec(name="babyai"), ["GoToObj"])
    config = base(subject, 0, None, "sft.jsonl", shows=True)
    model = config.model.model_copy(update={"context_length": context})
    return config.model_copy(update={"model": model})


def test_unseen_episodes_that_all_exceed_the_context_favour_no_rate() -> None:
    config = recipe(context=16)
    messages = [
        Message(role="user", content="go " * 20),
        Message(role="assistant", content="turn left"),
    ]
    conversation = Conversation(Task(id="t"), messages, None, None)
    renderers: Any = make_renderers(config, trained(config, [conversation], ()))
    backend = SimpleNamespace(trainer=None)
    made = cast(Run, SimpleNamespace(config=config, renderers=renderers, backend=backend))
    loss = unseen_loss(made, [conversation])
    assert loss == math.inf
    assert Trial(losses={2e-3: loss, 1e-3: loss}).rate == 1e-3


@pytest.mark.parametrize(
    ("seconds", "dtype"),
    [
        ({"float32": 0.3, "bfloat16": 0.2}, "bfloat16"),
        ({"float32": 0.3, "bfloat16": 0.29}, "float32"),
        ({"float32": 0.3, "bfloat16": 3.0}, "float32"),
        ({}, "float32"),
    ],
)
def test_products_are_in_bfloat16_where_a_step_is_clearly_faster(
    seconds: dict[str, float], dtype: str
) -> None:
    assert Trial(step_s=seconds).dtype == dtype


async def test_steps_of_both_types_are_timed(tmp_path: Path) -> None:
    config = recipe(64)
    conversations = [
        Conversation(
            Task(id=str(n)), [Message(role="user", content="go " * (n % 5 + 1))], None, None
        )
        for n in range(40)
    ]
    for each in conversations:
        each.messages.append(Message(role="assistant", content="turn left"))
    tokenizer = trained(config, conversations, ())
    splits = Splits(TaskList([Task(id="t")]), [])
    made: list[Run] = []

    def make(of_dtype: RunConfig) -> Run:
        folder = RunFolder(tmp_path / of_dtype.learner.dtype)
        made.append(build(of_dtype, folder, splits, tokenizer, conversations))
        return made[-1]

    found = await time_dtypes(config, make, math.inf)
    assert [run.config.learner.dtype for run in made] == list(found) == ["float32", "bfloat16"]
    assert all(seconds > 0 for seconds in found.values())
    assert Trial(step_s=found).told_dtypes.startswith(f": {found['bfloat16']:.2f} s a step of SFT")
    assert await time_dtypes(config, make, 0.0) == {}, "no time for a step"
    half = at_dtype(config, "bfloat16")
    assert await time_dtypes(half, make, math.inf) == {}, "chosen already"


async def test_memory_that_does_not_suffice_is_told_without_keys_of_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OutOfMemory("optimizer step 3; its batch is saved in a folder; lower the batch")

    monkeypatch.setattr(trying, "build", fails)
    with pytest.raises(ConfigError, match=r"memory does not suffice .* 64 tokens: choose shorter"):
        await try_out(recipe(64), tmp_path, cast(Any, None), None, [], 1.0, print)


def test_episodes_cut_by_a_turn_without_an_end_count_as_those_of_later_steps() -> None:
    def played(turns: int, status: Status, error: str | None = None) -> Any:
        return SimpleNamespace(num_turns=turns, status=status, error=error)

    ended = [played(4, Status.COMPLETED), played(11, Status.TRUNCATED_TURNS)]
    full = played(9, Status.TRUNCATED_LENGTH, "the context is full")
    endless = [played(2, Status.TRUNCATED_LENGTH, "a turn"), played(0, Status.TRUNCATED_LENGTH)]
    failed = played(30, Status.ERROR_ENV)

    def of(*trajectories: Any) -> float:
        return growth([cast(Group, SimpleNamespace(trajectories=trajectories))], 8.4)

    assert of(*ended, full, failed) == 1.0
    assert of(*endless) == 8.4 * 2 / 3
    assert of(*ended, *endless) == (15 + 16.8) / 18
    assert of() == 1.0


@pytest.mark.parametrize(("max_turns", "num_tasks"), [(1, 32), (100, 32), (250, 16), (500, 8)])
def test_a_measurement_of_long_episodes_plays_fewer(max_turns: int, num_tasks: int) -> None:
    config = recipe(64)
    rollout = config.rollout.model_copy(update={"max_turns": max_turns})
    until = measurable(SFTUntilConfig(), config.model_copy(update={"rollout": rollout}))
    assert (until.num_tasks, until.samples_per_task) == (num_tasks, 4)


@pytest.mark.parametrize(("eval_s", "groups"), [(1.0, 32), (40.0, 8), (128.0, 4)])
def test_groups_of_slow_episodes_are_few(eval_s: float, groups: int) -> None:
    """`eval_s` of 128 episodes; a group has 8."""
    config = recipe(64)
    assert affordable(Trial(eval_s=eval_s), config, 32) == groups


async def test_a_step_of_rl_is_timed_with_all_of_its_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that never succeeds has no group with different rewards, and RL will have some."""
    config = recipe(128)
    env = Spec(name="babyai")
    tasks = TaskList([Task(id=f"t{n}", data={"seed": n}, tier="GoToObj") for n in range(8)])
    changes = {"groups_per_step": 4, "group_size": 2, "minibatches": 2}
    assert config.rl is not None
    rollout = config.rollout.model_copy(update={"max_turns": 2, "max_tokens_per_turn": 2})
    rl = config.rl.model_copy(update=changes)
    config = config.model_copy(update={"rl": rl, "rollout": rollout, "env": env})
    texts = [
        Message(role="user", content="go to the red ball"),
        Message(role="assistant", content="left"),
    ]
    tokenizer = trained(config, [Conversation(Task(id="t"), texts, None, None)], ())
    run = build(config, RunFolder(tmp_path), Splits(tasks, []), tokenizer, [])
    timed: list[dict[str, float]] = []

    class Kept(trial_rl.Metrics):
        def record(self, stage: str, step: int, groups: Any, metrics: dict[str, float]) -> None:
            super().record(stage, step, groups, metrics)
            timed.append(metrics)

    monkeypatch.setattr(trial_rl, "Metrics", Kept)
    before = {k: v.clone() for k, v in run.backend.present_model().state_dict().items()}
    try:
        seconds = await trial_rl.seconds_of_a_group(run, Trial(), math.inf, 4)
    finally:
        await close(run)
    assert seconds > 0
    assert len(timed) == 1 + trial_rl.RL_STEPS
    for step in timed:
        assert step["rollout/groups_with_signal"] == 0
        assert step["train/groups_with_advantage"] == 1
        assert step["train/optimizer_steps"] == 2
    after = run.backend.present_model().state_dict()
    assert all((after[k] - v).abs().max() < 1e-6 for k, v in before.items()), "as it was"


async def test_held_out_tasks_that_cannot_be_scored_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def measured(run: Any, until: SFTUntilConfig, step: int, tasks: Any = None) -> Any:
        if tasks is not None:
            raise DataError("nothing to evaluate: 8 tasks")
        estimate = Estimate(value=0.5, low=0.4, high=0.6, num_tasks=128)
        return [], SimpleNamespace(success=estimate, num_episodes=128)

    monkeypatch.setattr(sft_end, "measure", measured)
    run: Any = SimpleNamespace(config=recipe(64), splits=SimpleNamespace(heldout=[Task(id="h")]))
    trial = Trial()
    await to_its_end(run, cast(Any, SimpleNamespace(steps=40)), 40, trial, math.inf, print)
    assert (trial.heldout, trial.unplayed) == (None, "nothing to evaluate: 8 tasks")


@pytest.mark.parametrize(("success", "heldout"), [(0.25, 0.0), (0.0, None)])
async def test_held_out_tasks_are_measured_where_training_tasks_succeed(
    monkeypatch: pytest.MonkeyPatch, success: float, heldout: float | None
) -> None:
    own, others = [Task(id="training")], [Task(id="held-out")]
    asked: list[Any] = []

    async def measured(run: Any, until: SFTUntilConfig, step: int, tasks: Any = None) -> Any:
        asked.append(tasks or own)
        value = success if tasks is None else 0.0
        estimate = Estimate(value=value, low=0.0, high=1.0, num_tasks=128)
        return [], SimpleNamespace(success=estimate, num_episodes=128)

    monkeypatch.setattr(sft_end, "measure", measured)
    run: Any = SimpleNamespace(config=recipe(64), splits=SimpleNamespace(heldout=others))
    trial = Trial()
    await to_its_end(run, cast(Any, SimpleNamespace(steps=40)), 40, trial, math.inf, print)
    assert trial.curve == [(40, success)]
    assert (trial.heldout and trial.heldout.value) == heldout
    assert asked == [own, others][: 1 + (heldout is not None)]
