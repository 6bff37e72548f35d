"""Concurrent episodes: faults stay contained, retries, cancellation, threads."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
from bdb import BdbQuit
from pathlib import Path
from typing import Any

import played_envs
import pytest
from played_envs import task_of
from rollout_world import Recording, Scripted, World

import ludus
from ludus.core.errors import ConfigError, EpisodeError, TrainingError
from ludus.core.types import Group, Message, Spec, Status, Task, Trajectory
from ludus.train import ALGORITHMS
from ludus.train.batches.samples import to_samples

HERE = Path(__file__).parents[1] / "support"

FAULTS = {
    "raise": (Status.ERROR_ENV, "step raised RuntimeError: the disk is full of eels"),
    "timeout of its own": (Status.ERROR_ENV, "step raised TimeoutError: the database is slow"),
    "own error": (Status.ERROR_ENV, "not today"),
    "tool": (Status.ERROR_TOOL, "the compiler broke"),
    "stop iteration": (Status.ERROR_ENV, "StopIteration"),
    "exit": (Status.ERROR_ENV, "the environment called for exit: SystemExit(3)"),
    "cancel": (Status.ERROR_ENV, "the environment called for exit: CancelledError()"),
    "text": (Status.ERROR_ENV, "step returned a str; it has to return a StepResult"),
    "a task": (Status.ERROR_ENV, "step returned a Task; it has to return a StepResult"),
    "nan": (Status.ERROR_ENV, "step returned a reward that is no finite number or None: nan"),
    "infinite": (Status.ERROR_ENV, "no finite number or None: -inf"),
    "huge": (Status.ERROR_ENV, "step returned a reward that is no finite number"),
    "unspeakable": (Status.ERROR_ENV, "step raised Unspeakable"),
    "endless text": (Status.ERROR_ENV, "step returned messages of 10,000,001 characters"),
    "reward text": (Status.ERROR_ENV, "no finite number or None: 'high'"),
    "no list": (Status.ERROR_ENV, "step returned None for messages; it has to be a list"),
    "texts": (Status.ERROR_ENV, "step returned a str among its messages, not a Message"),
    "number": (Status.ERROR_ENV, "step returned a Message among its messages"),
}
HANGS = {"busy": "Faulty", "sleep": "Faulty", "await": "Faulty", "await there": "Awaiting"}


def tokens(groups: list[Group]) -> list[Any]:
    """Tokens, rewards and statuses; no log-probabilities, no times."""
    return [
        (
            t.id,
            t.task_id,
            t.status,
            t.reward,
            t.error,
            [(s.parent, s.token_ids) for s in t.segments],
        )
        for group in groups
        for t in group.trajectories
    ]


async def collect(world: World, tasks: list[Task], size: int = 2, **how: Any) -> list[Group]:
    how.setdefault("sampler", world.sampler())
    groups = await world.collector(**how).collect(tasks, 3, size)
    if isinstance(how["sampler"], Recording):
        assert how["sampler"].open_sessions == []
    return groups


# Order, ids, seeds


async def test_groups_come_in_the_order_of_their_tasks(world: World):
    seen: list[str] = []
    tasks = [task_of(i) for i in (7, 3, 5)]
    groups = await collect(world, tasks, 2, on_episode=lambda t: seen.append(t.id))
    assert [g.task for g in groups] == tasks
    assert [g.id for g in groups] == [f"rl-000003/g000{i}" for i in range(3)]
    ids = [t.id for g in groups for t in g.trajectories]
    assert ids == [f"rl-000003/g000{i}/e00{j}" for i in range(3) for j in range(2)]
    assert sorted(seen) == ids
    assert {t.group_id for t in groups[1].trajectories} == {groups[1].id}


async def test_no_tasks_give_no_groups(world: World):
    assert await collect(world, []) == []


async def test_members_differ_and_runs_repeat(world: World):
    once, again = [await collect(world, [task_of(i) for i in range(3)], 4) for _ in range(2)]
    assert tokens(once) == tokens(again)
    texts = {tuple(t.token_ids()) for t in once[0].trajectories}
    assert len(texts) > 1, "members of a group have seeds of their own"
    other = await collect(world, [task_of(i) for i in range(3)], 4, seed=1)
    assert tokens(once) != tokens(other)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_concurrency_changes_no_token(world: World, temperature: float):
    tasks = [task_of(i) for i in range(8)]
    alone, three, many = [
        await collect(world, tasks, 2, concurrency=n, temperature=temperature) for n in (1, 3, 64)
    ]
    assert tokens(alone) == tokens(three) == tokens(many)


async def test_delays_change_neither_tokens_nor_logprobs(world: World):
    """The composition of batches does not depend on the speed of environments."""
    delays = [[0.0], [0.004, 0.0], [0.0, 0.006], [0.002]]
    slow = [task_of(i, delays=delays[i % 4]) for i in range(8)]
    fast = [task_of(i) for i in range(8)]
    a, b = [await collect(world, tasks, 2, env="Faulty", concurrency=5) for tasks in (slow, fast)]
    assert tokens(a) == tokens(b)
    assert logprobs(a) == logprobs(b)


def logprobs(groups: list[Group]) -> list[Any]:
    return [[s.logprobs for s in t.segments] for g in groups for t in g.trajectories]


async def test_each_episode_gets_a_task_of_its_own(world: World):
    tasks = [task_of(i) for i in range(2)]
    (a, b) = await collect(world, tasks, 3, env="Spoils", concurrency=1)
    assert {t.status for t in a.trajectories + b.trajectories} <= {
        Status.COMPLETED, Status.TRUNCATED_TURNS, Status.TRUNCATED_LENGTH
    }  # fmt: skip
    assert tasks == [task_of(i) for i in range(2)]


async def test_a_tasks_own_environment_keeps_the_configured_arguments(world: World):
    collector = world.collector(max_turns=9)
    collector.env = Spec(name="played_envs:Say", args={"length": 1})
    longer = task_of(1).model_copy(update={"env": Spec(name="played_envs:Say", args={"length": 2})})
    same = task_of(1).model_copy(update={"env": Spec(name="played_envs:Say")})
    groups = await collector.collect([task_of(1), same, longer], 0, 6)
    hits = [
        max(t.num_turns for t in g.trajectories if t.status is Status.COMPLETED) for g in groups
    ]
    assert hits[0] == hits[1] < hits[2]


# Faults


@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize("env", ["Faulty", "Awaiting"])
async def test_a_broken_episode_keeps_its_kind_and_touches_no_other(
    world: World, env: str, where: str
):
    faults = {k: v for k, v in FAULTS.items() if where == "step" or k in RESET_FAULTS}
    broken = [task_of(i, fault=fault, where=where) for i, fault in enumerate(faults)]
    sound = [task_of(100 + i) for i in range(4)]
    groups = await collect(world, [*broken, *sound], 2, env=env, max_retries=0)
    for (status, error), group in zip(faults.values(), groups, strict=False):
        for trajectory in group.trajectories:
            assert trajectory.status is status, (trajectory.error, error)
            if where == "step":
                assert error in (trajectory.error or "")
            assert trajectory.reward is None
    alone = await collect(world, [*broken, *sound], 2, env="Say", max_retries=0)
    assert tokens(groups[len(faults) :]) == tokens(alone[len(faults) :])
    assigned = ALGORITHMS.build("grpo").assign(groups)
    samples = to_samples(assigned)
    assert {s.group_id for s in samples} <= {g.id for g in groups[len(faults) :]}
    for group in groups[: len(faults)]:
        for trajectory in group.trajectories:
            reason = assigned.excluded[trajectory.id]
            assert reason == f"{trajectory.status.value}: {trajectory.error}"


RESET_FAULTS = {"raise", "timeout of its own", "own error", "tool", "exit", "cancel", "text"}


@pytest.mark.parametrize(
    ("env", "scores", "error"),
    [
        ("Scores", "raise", "scores raised ZeroDivisionError"),
        ("Scores", None, "scores returned None; it has to return a dict of names to numbers"),
        ("Scores", {"speed": "high"}, "scores returned 'high' for 'speed'"),
        ("EndlessTurns", {}, "max_turns is '3'; it has to be a whole number of at least 1"),
        ("Sums", {}, "the step rewards sum to inf"),
    ],
)
async def test_faults_beside_reset_and_step_stay_in_their_episode(
    world: World, env: str, scores: Any, error: str
):
    wrong = Spec(name=f"played_envs:{env}")
    task = task_of(0, scores=scores).model_copy(update={"env": wrong})
    sampler = Scripted(world.renderer(), "red")
    collector = world.collector(sampler=sampler, max_retries=0)
    broken, sound = await collector.collect([task, task_of(1)], 0, 1)
    assert broken.trajectories[0].status is Status.ERROR_ENV
    assert error in (broken.trajectories[0].error or "")
    assert broken.trajectories[0].reward is None
    assert sound.trajectories[0].status.trainable


async def test_an_opening_without_messages(world: World):
    task = task_of(0, fault="silence", where="reset")
    (group,) = await collect(world, [task], 1, env="Faulty", max_retries=0)
    assert group.trajectories[0].status is Status.ERROR_ENV
    assert "reset returned no messages" in (group.trajectories[0].error or "")


async def test_an_environment_that_cannot_be_made(world: World):
    tasks = [task_of(0).model_copy(update={"env": Spec(name="played_envs:Unmakeable")}), task_of(1)]
    groups = await collect(world, tasks, 1, max_retries=0)
    assert groups[0].trajectories[0].status is Status.ERROR_ENV
    assert "reset raised RuntimeError: no licence" in (groups[0].trajectories[0].error or "")
    assert groups[1].trajectories[0].status.trainable


async def test_retries_whose_reasons_all_differ_are_not_told_each(
    world: World, caplog: pytest.LogCaptureFixture
):
    unknown = [Spec(name=f"babyai{number}") for number in range(60)]
    tasks = [task_of(i).model_copy(update={"env": spec}) for i, spec in enumerate(unknown)]
    await collect(world, tasks, 1, max_retries=1)
    told = [record for record in caplog.records if "retrying episode" in record.getMessage()]
    assert len(told) == 10 + 3 + 1, "ten reasons, then three of the others, then their tenth"


async def test_a_task_that_names_an_unknown_environment(world: World):
    tasks = [task_of(0).model_copy(update={"env": Spec(name="babyia")}), task_of(1)]
    groups = await collect(world, tasks, 1, max_retries=0)
    assert groups[0].trajectories[0].status is Status.ERROR_ENV
    assert "did you mean babyai?" in (groups[0].trajectories[0].error or "")
    assert groups[1].trajectories[0].status.trainable
    with pytest.raises(ConfigError, match="played_envs has no 'Sya'"):
        await collect(world, [task_of(0)], env="Sya")


@pytest.mark.parametrize("hang", HANGS)
async def test_a_hanging_episode_is_abandoned(world: World, hang: str):
    fault = hang.removesuffix(" there")
    tasks = [task_of(0, fault=fault), task_of(1), task_of(2, fault=fault, where="reset")]
    groups = await collect(
        world, tasks, 1, env=HANGS[hang], max_retries=0, step_deadline_s=1.0, concurrency=2
    )
    for group, what in ((groups[0], "step"), (groups[2], "reset")):
        for trajectory in group.trajectories:
            assert (trajectory.status, trajectory.reward) == (Status.ERROR_TIMEOUT, None)
            error = f"the environment's {what} took longer than rollout.step_deadline_s = 1 s"
            assert trajectory.error == error
    assert all(t.status.trainable for t in groups[1].trajectories)


async def test_the_episode_has_a_deadline_too(world: World):
    """Each step meets its deadline, the episode does not."""
    task = task_of(0, delays=[0.2])
    (group,) = await collect(
        world, [task], 1, env="Faulty", max_retries=0, episode_deadline_s=0.3, max_turns=50
    )
    (trajectory,) = group.trajectories
    assert (trajectory.status, trajectory.reward) == (Status.ERROR_TIMEOUT, None)
    assert trajectory.error == ("the episode took longer than rollout.episode_deadline_s = 0.3 s")


@pytest.mark.parametrize("env", ["Faulty", "Awaiting"])
async def test_an_abandoned_environment_is_closed_when_it_returns(world: World, env: str):
    task = task_of(0, fault="sleep" if env == "Faulty" else "await")
    await collect(world, [task], 1, env=env, max_retries=0, step_deadline_s=0.2)
    if env == "Faulty":
        assert played_envs.CLOSED == [], "nobody closes an environment that is in a step"
        played_envs.RELEASE.set()
        for _ in range(500):
            if played_envs.CLOSED:
                break
            await asyncio.sleep(0.01)
    assert [task.id] == played_envs.CLOSED


# Retries


@pytest.mark.parametrize("fault", ["raise", "sleep"])
async def test_a_retry_gives_the_tokens_of_an_episode_without_failure(world: World, fault: str):
    fails = [task_of(i, fault=fault, failures=2, turn=i % 2) for i in range(3)]
    never = [task_of(i) for i in range(3)]
    how: dict[str, Any] = {
        "env": "Faulty",
        "step_deadline_s": 0.3,
        "size": 1,
        "max_tokens_per_turn": 16,
    }
    a = await collect(world, fails, max_retries=2, **how)
    b = await collect(world, never, max_retries=2, **how)
    retried = [t for g in a for t in g.trajectories if t.metrics["retries"]]
    assert retried
    assert {t.metrics["retries"] for t in retried} == {2.0}
    assert tokens(a) == tokens(b)


async def test_after_the_last_retry_an_episode_is_excluded_and_not_scored(world: World):
    groups = await collect(
        world, [task_of(0, fault="raise", turn=0), task_of(1)], 2, env="Faulty", max_retries=2
    )
    for trajectory in groups[0].trajectories:
        assert played_envs.ATTEMPTS["say/0"] == 6
        assert trajectory.metrics["retries"] == 2.0
        assert (trajectory.status, trajectory.reward) == (Status.ERROR_ENV, None)
        assert "success" not in trajectory.metrics
        assert trajectory.num_turns == 1, "only the last attempt is on record"
    assigned = ALGORITHMS.build("grpo").assign(groups)
    assert assigned.excluded[groups[0].trajectories[0].id].startswith(
        "error_env: the environment's step raised RuntimeError: the disk is full of eels ["
        "played_envs.py, line "
    )


# The run's own errors, and its end


class Breaking(Recording):
    """A sampler that raises TrainingError at its n-th turn."""

    countdown = 5

    async def sample(self, *args: Any, **kwargs: Any) -> Any:
        self.countdown -= 1
        if self.countdown == 0:
            raise TrainingError("the weights are not finite")
        return await super().sample(*args, **kwargs)


@pytest.mark.parametrize("fault", ["none", "sleep", "await"])
async def test_an_error_of_the_run_stops_everything(world: World, fault: str):
    sampler = Breaking(world.model, context_length=256, deterministic=False)
    tasks = [task_of(0, fault=fault), *(task_of(i) for i in range(1, 8))]
    collector = world.collector(env="Faulty", sampler=sampler, concurrency=4)
    with pytest.raises(TrainingError, match="the weights are not finite"):
        await asyncio.wait_for(collector.collect(tasks, 0, 2), 60)
    assert sampler.open_sessions == []


async def test_an_error_in_the_model_stops_everything(world: World):
    sampler = world.sampler()
    sampler.decoder.forward = None  # type: ignore[assignment,method-assign]
    with pytest.raises(TypeError):
        await asyncio.wait_for(
            world.collector(sampler=sampler).collect([task_of(i) for i in range(4)], 0, 2), 60
        )
    assert sampler.open_sessions == []


async def test_a_timeout_of_the_sampler_is_not_the_episodes(world: World):
    sampler = world.sampler()

    async def sample(*args: Any, **kwargs: Any) -> Any:
        raise TimeoutError("the server does not answer")

    sampler.sample = sample  # type: ignore[method-assign]
    with pytest.raises(TimeoutError, match="the server does not answer"):
        await world.collector(sampler=sampler).collect([task_of(0)], 0, 1)


@pytest.mark.parametrize("fault", ["none", "busy", "sleep", "await"])
@pytest.mark.parametrize("env", ["Faulty", "Awaiting"])
async def test_cancelling_leaves_nothing_open(world: World, env: str, fault: str):
    if env == "Awaiting" and fault in ("busy", "sleep"):
        pytest.skip("it says that it never blocks")
    sampler = world.sampler(deterministic=False)
    # Far more episodes than can be over before the cancellation comes.
    tasks = [task_of(i, fault=fault, turn=i % 2) for i in range(200)]
    collector = world.collector(env=env, sampler=sampler, concurrency=4, max_turns=50)
    for waits in (0, 1, 5, 30):
        running = asyncio.create_task(collector.collect(tasks, 0, 4))
        for _ in range(waits):
            await asyncio.sleep(0.001)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(running, 60)
        assert sampler.open_sessions == []


async def test_a_cancelled_episode_is_aborted(world: World):
    judged: list[Trajectory] = []

    async def judge(task: Task, trajectory: Trajectory) -> Any:
        judged.append(trajectory)
        await asyncio.Event().wait()

    running = asyncio.create_task(world.collector(judge=judge).collect([task_of(0)], 0, 2))
    while not judged:
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert {(t.status, t.reward, t.error) for t in judged} == {
        (Status.ABORTED, None, "the run was stopped")
    }


async def test_on_episode_may_stop_the_run(world: World):
    def stop(trajectory: Trajectory) -> None:
        raise TrainingError("enough")

    sampler = world.sampler()
    with pytest.raises(TrainingError, match="enough"):
        await world.collector(sampler=sampler, on_episode=stop).collect([task_of(0)], 0, 4)
    assert sampler.open_sessions == []


@pytest.mark.slow
def test_threads_that_hang_do_not_keep_the_interpreter():
    """In a separate process, whose environments hang in every way."""
    script = f"""
        import asyncio, sys
        sys.path[:0] = [{str(HERE)!r}, {str(Path(ludus.__file__).parents[1])!r}]
        from played_envs import task_of
        from rollout_world import Scripted, make_world
        from rollout_world import World
        import rollout_world
        rollout_world.teach = lambda *_: None  # nobody samples here
        world = make_world()
        faults = ["busy", "sleep", "await"]
        async def main():
            sampler = Scripted(world.renderer(), "red")
            collector = world.collector(
                env="Faulty", sampler=sampler, step_deadline_s=0.3, max_retries=1
            )
            groups = await collector.collect([task_of(0, fault=f) for f in faults], 0, 1)
            print(*(t.status.value for g in groups for t in g.trajectories))
            collector.config = collector.config.model_copy(update={{"step_deadline_s": 1e6}})
            task = asyncio.create_task(
                collector.collect([task_of(0, fault=f) for f in faults], 0, 1)
            )
            await asyncio.sleep(0.3)
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                print("cancelled", sampler.sessions)
        asyncio.run(main())
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    timeout = "error_timeout"
    assert done.stdout.split("\n")[:2] == [f"{timeout} {timeout} {timeout}", "cancelled set()"]


# Threads


async def test_blocking_environments_live_in_one_thread_each(world: World):
    await collect(world, [task_of(i) for i in range(4)], 2, env="Faulty", concurrency=3)
    assert {"ludus-env"} == played_envs.THREADS
    played_envs.THREADS.clear()
    await collect(world, [task_of(i) for i in range(4)], 2, env="Awaiting", concurrency=3)
    assert {threading.main_thread().name} == played_envs.THREADS


async def test_idle_threads_are_reused(world: World):
    def count() -> int:
        return sum(thread.name == "ludus-env" for thread in threading.enumerate())

    tasks = [task_of(i) for i in range(4)]
    await collect(world, tasks, 2, concurrency=4)
    before = count()
    for _ in range(3):
        await collect(world, tasks, 2, concurrency=4)
    assert count() == before


async def test_inline_plays_in_the_calling_thread(world: World):
    tasks = [task_of(i) for i in range(3)]
    inline = await collect(world, tasks, 2, env="Faulty", inline=True, concurrency=1)
    assert {threading.main_thread().name} == played_envs.THREADS
    assert tokens(inline) == tokens(await collect(world, tasks, 2, env="Faulty", concurrency=1))


async def test_quitting_the_debugger_ends_the_run(world: World):
    sampler = world.sampler()
    collector = world.collector(env="Faulty", sampler=sampler, inline=True, concurrency=1)
    with pytest.raises(BdbQuit):
        await collector.collect([task_of(0, fault="quit"), task_of(1)], 0, 2)
    assert sampler.open_sessions == []
    assert played_envs.CLOSED == ["say/0"]


async def test_errors_are_reported_with_their_cause(world: World):
    found: list[EpisodeError] = []
    collector = world.collector(env="Faulty", max_retries=1)
    collector.on_error = found.append
    await collector.collect([task_of(0, fault="raise"), task_of(1)], 0, 1)
    assert [type(error.__cause__) for error in found] == [RuntimeError, RuntimeError]


def test_another_stage_has_its_own_settings(world: World):
    collector = world.collector()
    other = collector.with_config("evaluate/before", temperature=0.0)
    assert (other.stage, other.config.temperature) == ("evaluate/before", 0.0)
    assert (collector.stage, collector.config.temperature) == ("rl", 1.0)
    (group,) = asyncio.run(other.collect([task_of(0)], 2, 1))
    assert group.id == "evaluate/before-000002/g0000"


async def test_a_single_turn_task_needs_no_environment(world: World):
    from ludus.judges import JUDGES

    judge = JUDGES.build("answer", "judge")
    tasks = [
        Task(id=f"q{c}", prompt=[Message(role="user", content=f"say {c} .")], answer=c)
        for c in played_envs.COLOURS
    ]
    groups = await collect(world, tasks, 8, env=None, judge=judge)
    for group in groups:
        for t in group.trajectories:
            assert t.num_turns == 1
            said = world.tokenizer.decode(t.segments[-1].token_ids).removesuffix("<|end|>")
            assert (t.reward, t.metrics["success"]) == (float(said == group.task.answer),) * 2


async def test_a_fault_of_all_episodes_is_not_told_for_each(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    collector = world.collector("Unmakeable", max_retries=1, concurrency=4)
    await collector.collect([task_of(0)], 0, 12)
    told = [record for record in caplog.records if "retrying" in record.getMessage()]
    assert len(told) == 4, "the first three, and the tenth"
