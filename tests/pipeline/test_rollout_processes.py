"""Several processes play the groups of a step (`rollout.processes`)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from variants import variants

import ludus
from ludus.config.load import load_config
from ludus.core.errors import ConfigError, LudusError
from ludus.core.types import Group, Status
from ludus.data.splits import read_splits
from ludus.envs.base import Env
from ludus.models.decoders import native
from ludus.pipeline import rollout_processes
from ludus.pipeline.build import Run, build
from ludus.pipeline.parts.tokenizer import make_tokenizer
from ludus.rollout.hosts import processes as rollout
from ludus.store.folders import RunFolder

needs_native = pytest.mark.skipif(bool(native.absence()), reason=f"no kernels: {native.absence()}")

ENVS = f"{Path(ludus.__file__).parents[1]}/tests/support/process_envs.py"
RECIPE = f"""
model:
  architecture:
    name: qwen3
    args: {{hidden_size: 32, num_layers: 2, num_heads: 2, num_kv_heads: 1, head_dim: 16}}
  tokenizer: {{name: words}}
  context_length: 128
env: {{name: "{ENVS}:Count"}}
tasks:
  train: {{name: env, args: {{num_tasks: 12}}}}
rollout: {{max_tokens_per_turn: 4, max_retries: 0, concurrency: 6}}
rl: {{steps: 1, groups_per_step: 6, group_size: 2}}
"""


COIN = """
model:
  architecture:
    name: qwen3
    args: {hidden_size: 32, num_layers: 2, num_heads: 2, num_kv_heads: 1, head_dim: 16}
  tokenizer: {name: words}
  context_length: 1024
env: {name: textworldexpress}
tasks:
  train: {name: env, args: {tiers: [coin], num_tasks: 12}}
rollout: {max_tokens_per_turn: 100, max_turns: 3, max_retries: 0, concurrency: 6}
rl: {steps: 1, groups_per_step: 6, group_size: 2}
"""


@pytest.fixture
def make(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Run]]:
    recipe, opened = tmp_path / "recipe.yaml", ExitStack()
    recipe.write_text(getattr(request, "param", RECIPE))
    folder, config = RunFolder(tmp_path), load_config(recipe)
    tokenizer = make_tokenizer(config, read_splits(config).train, ())  # outside of an event loop
    tokenizer.save_pretrained(folder.tokenizer)

    def make_run(*overrides: str) -> Run:
        config = load_config(recipe, list(overrides))
        run = build(config, folder, read_splits(config), tokenizer, processes=True)
        opened.callback(run.backend.close)
        if run.collector.processes is not None:
            opened.callback(run.collector.processes.close)
        return run

    with opened:
        yield make_run


async def play(run: Run, step: int = 0) -> list[Group]:
    return await run.collector.collect(run.splits.train[:6], step, 2)


def told(groups: list[Group]) -> list[Any]:
    """All that a step trains on, and how the episodes ended."""
    return [
        (
            *(t.id, t.status, t.error, t.reward),
            *((s.token_ids, s.logprobs, s.message, s.reward, s.runs) for s in t.segments),
        )
        for group in groups
        for t in group.trajectories
    ]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@needs_native
@pytest.mark.parametrize("number", variants([2, 3], [3]))
async def test_the_bits_do_not_depend_on_the_number_of_processes(
    make: Callable[..., Run], number: int
) -> None:
    one, many = (make(f"rollout.processes={n}") for n in (1, number))
    assert one.collector.processes is None
    assert many.collector.processes is not None
    seen: list[str] = []
    many.collector.on_episode = lambda t: seen.append(t.id)
    for step in range(2):
        groups = await play(one, step)
        again = await play(many, step)
        assert [g.id for g in again] == [g.id for g in groups]
        assert told(again) == told(groups)
    assert sorted(seen[:12]) == sorted(t.id for g in await play(one) for t in g.trajectories)
    pids = [process.pid for process in many.collector.processes.processes]
    assert len(pids) == number - 1
    await many.collector.close()
    assert not any(map(alive, pids))


@needs_native
@pytest.mark.parametrize("make", [COIN], indirect=True)
async def test_processes_have_engines_of_their_own(make: Callable[..., Run]) -> None:
    pytest.importorskip("textworld_express", reason="needs the extra textworldexpress")
    from ludus.envs.java.machine import find_java

    try:
        find_java("textworldexpress")
    except ConfigError as missing:
        pytest.skip(str(missing))
    one, two = make("rollout.processes=1"), make("rollout.processes=2")
    assert two.collector.processes is not None
    for step in range(2):
        groups = await play(one, step)
        episodes = [t for g in groups for t in g.trajectories]
        assert all(t.status.trainable for t in episodes)
        assert any(len(t.segments) > 3 for t in episodes), "no step was played"
        assert told(await play(two, step)) == told(groups)
    await two.collector.close()


SUMS = (
    COIN.replace("textworldexpress", "reasoning")
    .replace("[coin]", "[chain_sum, spell_backward]")
    .replace("max_tokens_per_turn: 100, max_turns: 3", "max_tokens_per_turn: 8")
)


@needs_native
@pytest.mark.parametrize("make", [SUMS], indirect=True)
async def test_processes_generate_the_same_tasks_of_reasoning(make: Callable[..., Run]) -> None:
    one, two = make("rollout.processes=1"), make("rollout.processes=2")
    assert two.collector.processes is not None
    groups = await play(one)
    episodes = [t for g in groups for t in g.trajectories]
    assert all(t.status.trainable for t in episodes)
    assert len({str(t.segments[0].message) for t in episodes}) > 4
    assert told(await play(two)) == told(groups)
    await two.collector.close()


@needs_native
async def test_new_weights_reach_all_processes(make: Callable[..., Run]) -> None:
    one, two = make("rollout.processes=1"), make("rollout.processes=2")
    before = told(await play(two))
    for run in (one, two):
        for parameter in run.backend.present_model().parameters():  # type: ignore[attr-defined]
            parameter.data.mul_(1.25)
        assert await run.backend.publish_weights() == 1
    after = told(await play(two))
    assert after != before
    assert after == told(await play(one))


FAILURES = [
    ("raise", Status.ERROR_ENV, "the environment's reset raised RuntimeError: seed 3 is odd"),
    ("sleep", Status.ERROR_TIMEOUT, "reset took longer than rollout.step_deadline_s = 0.2 s"),
]


@needs_native
@pytest.mark.parametrize(
    ("fails", "status", "error"), variants(FAILURES, FAILURES[:1]), ids=["raise", "sleep"]
)
async def test_failures_of_environments_are_those_of_one_process(
    make: Callable[..., Run], fails: str, status: Status, error: str
) -> None:
    settings = (f"env.args.fails={fails}", "rollout.step_deadline_s=0.2")
    one, two = (make(f"rollout.processes={n}", *settings) for n in (1, 2))
    groups = await play(two)
    failed = groups[3].trajectories[0]
    assert failed.status is status
    assert error in (failed.error or "")
    assert told(groups) == told(await play(one))


@needs_native
async def test_groups_of_a_process_that_dies_are_played_here(make: Callable[..., Run]) -> None:
    crash = ("env.args.fails=crash", f"env.args.owner={os.getpid()}")
    two, one = make("rollout.processes=2", *crash), make("rollout.processes=1", *crash)
    assert two.collector.processes is not None
    [process] = two.collector.processes.processes
    assert told(await play(two)) == told(await play(one))
    assert two.collector.processes.processes == []
    assert not alive(process.pid)
    assert told(await play(two, 1)) == told(await play(one, 1))


@needs_native
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
async def test_a_process_that_dies_is_noticed_while_its_own_children_live(
    make: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    crash = ("env.args.fails=orphan", f"env.args.owner={os.getpid()}")
    two, one = make("rollout.processes=2", *crash), make("rollout.processes=1", *crash)
    assert told(await asyncio.wait_for(play(two), 60)) == told(await play(one))
    [line] = [x for x in caplog.records if x.getMessage().startswith("a rollout process died")]
    assert vars(line)["fields"]["reason"] == "it ended with code 3"


@needs_native
async def test_a_process_that_never_starts_is_not_waited_for(
    make: Callable[..., Run],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = make("rollout.processes=1")
    (tmp_path / "never_ready.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.chdir(tmp_path)  # where the other process finds it
    monkeypatch.setattr(rollout_processes, "MODULE", "never_ready")
    monkeypatch.setattr(rollout, "READY_S", 1.0)
    monkeypatch.setattr(rollout, "LATE_S", 0.5)
    two = make("rollout.processes=2")
    assert told(await play(two)) == told(await play(one))
    told_lines = [
        (x.getMessage(), vars(x)["fields"])
        for x in caplog.records
        if "rollout process" in x.getMessage()
    ]
    assert [line for line, _ in told_lines] == [
        "waiting for a rollout process",
        "a rollout process died: its episodes are played here",
    ]
    assert told_lines[1][1]["reason"] == "it was not ready after 1 s"


@needs_native
async def test_log_lines_of_all_processes_are_the_runs(
    make: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    two = make(
        "rollout.processes=2", "rollout.max_retries=1", "env.args.fails=elsewhere",
        f"env.args.owner={os.getpid()}",
    )  # fmt: skip
    assert two.collector.processes is not None
    [process] = two.collector.processes.processes
    with caplog.at_level("INFO"):
        groups = await play(two)
    failed = [t for g in groups for t in g.trajectories if t.status is Status.ERROR_ENV]
    assert failed
    lines = [line for line in caplog.records if line.getMessage() == "retrying episode"]
    fields: list[dict[str, Any]] = [vars(line)["fields"] for line in lines]
    assert {f["rollout_process"] for f in fields} == {process.pid}
    assert fields[0]["error"] == failed[0].error
    assert {f["trajectory"] for f in fields} <= {t.id for t in failed}


@needs_native
async def test_an_error_in_another_process_says_so(
    make: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWNER", str(os.getpid()))
    (tmp_path / "mine.py").write_text(
        "import os\n"
        "if os.environ['OWNER'] != str(os.getpid()):\n"
        "    raise ImportError('no such library')\n"
        "from process_envs import Count as Mine\n"
    )
    two = make("rollout.processes=2", f"env.name={tmp_path}/mine.py:Mine")
    with pytest.raises(LudusError, match=r"no such library .*\(in a process that plays beside"):
        await play(two)


@needs_native
async def test_a_process_that_cannot_start_is_no_fault_of_the_run(
    make: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make("rollout.processes=1")
    monkeypatch.setattr(rollout_processes, "MODULE", "ludus.no_such_module")
    two = make("rollout.processes=2")
    assert told(await play(two)) == told(await play(one))


@needs_native
async def test_a_cancelled_step_leaves_no_process(make: Callable[..., Run]) -> None:
    two = make("rollout.processes=2", "env.args.fails=sleep")
    assert two.collector.processes is not None
    [process] = two.collector.processes.processes
    playing = asyncio.create_task(play(two))
    await asyncio.sleep(0.3)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert not alive(process.pid)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        (f'env.name="{ENVS}:Alone"', "does not declare `several_processes`"),
        (f'env.name="{ENVS}:Undecided"', "does not declare `several_processes`"),
        ("rollout.deterministic=false", "rollout.deterministic is false"),
        ("sampler.args.path=generic", "tokens of this sampler depend on their batch"),
        ("judge=answer", "a `judge` may hold state"),
    ],
)
def test_a_run_that_cannot_be_divided_says_so(
    make: Callable[..., Run], override: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.processes: 2 is not possible: .*") as caught:
        make("rollout.processes=2", override)
    assert reason in str(caught.value)


def test_a_class_of_ones_own_that_could_share_is_told(
    make: Callable[..., Run],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(rollout_processes, "cores", lambda config: 2)
    alone = [f'env.name="{ENVS}:Alone"', "rl.steps=2000", "rollout.max_turns=3"]
    with caplog.at_level("INFO"):
        assert make(*alone).collector.processes is None
    [line] = [r for r in caplog.records if "one process" in r.getMessage()]
    fields: Any = line
    assert "set that to True if its episodes share nothing" in fields.fields["reason"]
    assert not fields.file_only


def test_short_runs_play_in_one_process(make: Callable[..., Run]) -> None:
    assert make().collector.processes is None


def test_a_limit_of_turns_that_depends_on_arguments_counts_as_the_usual_one(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    config = load_config(recipe, [f'env.name="{ENVS}:Undecided"'])
    assert rollout_processes.most_turns(config) == 12 * Env.max_turns


SFT = ["demonstrations.num_episodes=8", "sft.until.every=9", "sft.steps=400"]


@pytest.mark.parametrize(
    ("changes", "number"),
    [
        (["rollout.max_turns=14"], 2),
        (["rollout.max_turns=3"], 1),
        (["rollout.max_turns=3", *SFT], 1),
        (["rollout.max_turns=3", *SFT, "rl.steps_per_unused_sft_step=0.1"], 2),
    ],
    ids=["long episodes", "short", "SFT", "unused steps of SFT"],
)
def test_processes_play_where_rl_has_many_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: list[str], number: int
) -> None:
    monkeypatch.setattr(rollout_processes, "cores", lambda config: 2)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    of_rl = ["rl.steps=20", "rl.groups_per_step=16", "rl.group_size=8"]  # 2,560 episodes
    config = load_config(recipe, [*of_rl, *changes])
    assert rollout_processes.expected_processes(config) == number


def test_an_error_that_cannot_be_pickled_keeps_its_text() -> None:
    from ludus.pipeline.rollout_process import portable

    class Odd(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    assert str(portable(Odd(1, 2))) == "Odd: 1 and 2"
    assert isinstance(portable(ConfigError("x")), ConfigError)


def test_a_queue_gives_each_number_once() -> None:
    queue = rollout.Queue()
    queue.put(range(rollout.MOST_QUEUED))
    other = rollout.Queue(queue.fd)  # as a child has it
    taken = [(queue, other)[n % 2].take() for n in range(rollout.MOST_QUEUED)]
    assert taken == [*range(rollout.MOST_QUEUED)]
    assert queue.take() is None
    assert other.take() is None
    queue.put([7])
    assert other.take() == 7
    queue.close()


@needs_native
async def test_both_processes_play_their_own_groups_and_the_rest(
    make: Callable[..., Run],
) -> None:
    two = make("rollout.processes=2")
    processes = two.collector.processes
    assert processes is not None
    shares: list[rollout.Share] = []
    played: list[rollout.Played] = []
    [process] = processes.processes
    play_there = process.play

    async def play_and_tell(share: rollout.Share) -> rollout.Played:
        shares.append(share)
        played.append(await play_there(share))
        return played[-1]

    process.play = play_and_tell  # type: ignore[method-assign]
    groups = await play(two)
    assert all(t.num_turns for group in groups for t in group.trajectories)
    assert shares[0].first == range(2, 4)
    assert {2, 3} <= {*played[0].trajectories} <= {2, 3, 4, 5}


def test_the_process_gets_only_groups_that_bring_nothing_of_their_own() -> None:
    from ludus.core.types import Spec, Task

    plain = Group("g", Task(id="t"), [])
    judged = Group("g", Task(id="t", judge=Spec(name="answer")), [])
    assert rollout._can_leave(plain)
    assert not rollout._can_leave(judged)
