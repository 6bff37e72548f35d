"""The store's contract, on SQLite and on PostgreSQL alike."""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_examples import branched, make_groups

from ludus.core.errors import ConfigError, StoreError
from ludus.core.types import Group, Message, Segment, Status, Task, ToolCall, Trajectory
from ludus.core.versions import runs_of, several
from ludus.store import RunExists, RunStatus, RunStore
from ludus.store.codec import (
    decode_json,
    encode_json,
    escape_text,
    pack_tree,
    unescape_text,
    unpack_tree,
)

Open = Callable[..., RunStore]


def test_what_is_read_equals_what_was_recorded(store: RunStore, open_store: Open) -> None:
    groups = make_groups(0)
    metrics = {"rl/reward": 0.1 + 0.2, "rl/kl": float("-inf")}
    store.record_step("run-1", "rl", 0, groups, metrics, seconds=2.5, policy_version=7)
    for reader in (store, open_store(), open_store(read_only=True)):
        assert reader.groups("run-1", "rl", 0) == groups
        for group in groups:
            for trajectory in group.trajectories:
                assert reader.trajectory("run-1", trajectory.id) == trajectory
        [step] = reader.steps("run-1")
        assert (step.stage, step.step, step.seconds, step.policy_version) == ("rl", 0, 2.5, 7)
        assert step.metrics == metrics
        rows = list(reader.trajectories("run-1"))
        assert [row.id for row in rows] == [t.id for g in groups for t in g.trajectories]
        for row, trajectory in zip(rows, (t for g in groups for t in g.trajectories), strict=True):
            assert row.num_tokens == trajectory.num_tokens
            assert row.num_sampled_tokens == trajectory.num_sampled_tokens
            assert row.num_turns == trajectory.num_turns
            assert (row.tier, row.status) == (f"tier-{row.group_id[-1]}", trajectory.status)


def test_runs(store: RunStore) -> None:
    config = {
        "z": 1,
        "a": {"lr": 1e300, "nan": math.inf, "$float": ["$x", {"$$": None}]},
        "ü": "\0",
    }
    store.create_run("run-2", "other", config, {"torch": "2"})
    run = store.run("run-2")
    assert (run.name, run.status, run.finished, run.error) == ("other", "running", None, None)
    assert run.config == config
    assert list(run.config) == list(config), "the order of keys survives"
    store.record_step("run-2", "sft", 9, [], {})
    store.record_step("run-2", "rl", 1, [], {})
    store.finish_run("run-2", "failed", error="NaN loss")
    first, second = store.runs()
    assert (first.id, first.stages, first.last_step) == ("run-1", {}, None)
    assert (second.status, second.error) == (RunStatus.FAILED, "NaN loss")
    assert second.finished is not None
    assert second.finished >= second.created
    assert list(second.stages.items()) == [("sft", 9), ("rl", 1)]
    store.reopen_run("run-2")
    again = store.run("run-2")
    assert (again.status, again.finished, again.error) == (RunStatus.RUNNING, None, None)
    assert store.run_ids() == {"run-1", "run-2"}
    with pytest.raises(RunExists, match="'run-2' exists already"):
        store.create_run("run-2", "x", {}, {})


def test_unknown_names_suggest_the_nearest(store: RunStore) -> None:
    store.record_step("run-1", "rl", 0, make_groups(0), {})
    for call in (
        lambda: store.run("run-11"),
        lambda: store.steps("run-11"),
        lambda: store.trajectories("run-11"),
        lambda: store.dropped("run-11"),
        lambda: store.summary("run-11"),
        lambda: store.rewind("run-11", {}),
        lambda: store.finish_run("run-11", "completed"),
        lambda: store.record_step("run-11", "rl", 0, [], {}),
    ):
        with pytest.raises(StoreError, match=r"no run 'run-11' \(did you mean run-1\?\)"):
            call()
    with pytest.raises(StoreError, match=r"no trajectory 's0-g1-9' \(did you mean s0-g1-\d\?\)"):
        store.trajectory("run-1", "s0-g1-9")
    with pytest.raises(StoreError, match="no trajectory 'zz'"):
        store.trajectory("run-1", "zz")


def test_a_step_recorded_again_is_replaced(store: RunStore) -> None:
    store.record_step("run-1", "rl", 0, make_groups(0, 3), {"m": 1.0})
    store.record_step("run-1", "eval", 0, make_groups(7), {"m": 2.0})
    again = make_groups(1)
    store.record_step("run-1", "rl", 0, again, {"m": 3.0})
    assert store.groups("run-1", "rl", 0) == again
    assert store.groups("run-1", "eval", 0) == make_groups(7)
    assert [(s.stage, s.metrics["m"]) for s in store.steps("run-1")] == [("eval", 2.0), ("rl", 3.0)]
    assert len(list(store.records("run-1"))) == 12
    assert {d.trajectory_id for d in store.dropped("run-1", "rl")} == {"s1-g0-2", "s1-g1-2"}


def test_rewind(store: RunStore) -> None:
    def held() -> list[tuple[str, int]]:
        return [(s.stage, s.step) for s in store.steps("run-1")]

    store.create_run("run-2", "other", {}, {})
    store.record_step("run-2", "rl", 5, make_groups(5), {})
    for stage in ("sft", "rl"):
        for step in range(3):
            store.record_step("run-1", stage, step, make_groups(step), {})
    store.rewind("run-1", {"sft": 2, "rl": 1, "never": 4})
    assert held() == [("sft", 0), ("sft", 1), ("sft", 2), ("rl", 0), ("rl", 1)]
    store.rewind("run-1", {"sft": 0})
    assert held() == [("sft", 0)]
    assert [row.stage for row in store.trajectories("run-1")] == ["sft"] * 6
    assert len(store.dropped("run-1")) == 2
    store.rewind("run-1", {})
    assert held() == []
    assert list(store.trajectories("run-1")) == []
    assert len(list(store.records("run-2"))) == 6, "another run is not touched"


def test_selection(store: RunStore) -> None:
    for step in range(3):
        store.record_step("run-1", "rl", step, make_groups(step), {})
    store.record_step("run-1", "eval", 1, make_groups(9), {})
    nan = Trajectory("nan", "g", "t", reward=math.nan)
    plus = Trajectory("plus", "g", "t", reward=math.inf)
    store.record_step("run-1", "odd", 0, [Group("g", Task(id="t"), [nan, plus])], {})

    def ids(*args: object, **options: object) -> list[str]:
        return [row.id for row in store.trajectories("run-1", *args, **options)]  # type: ignore[arg-type]

    assert len(ids()) == 26
    assert len(ids("rl")) == 18
    assert ids("rl", 1) == [f"s1-g{g}-{n}" for g in range(2) for n in range(3)]
    assert len(ids(step=1)) == 12
    assert ids("rl", 2, status=Status.ERROR_ENV) == ["s2-g0-2", "s2-g1-2"]
    assert ids("rl", 2, min_reward=0.5) == ["s2-g0-1", "s2-g1-1"]
    assert ids("rl", limit=4) == ids("rl")[:4]
    assert ids("rl", limit=4, newest_first=True) == ids("rl")[::-1][:4]
    assert ids(limit=0) == ids("none") == []
    assert ids("odd", min_reward=-math.inf) == ["plus"], "NaN reaches no score"
    assert [r.trajectory.id for r in store.records("run-1", "rl", 2, min_reward=0.5)] == [
        "s2-g0-1",
        "s2-g1-1",
    ]
    back = store.trajectory("run-1", "nan").reward
    assert back is not None
    assert math.isnan(back)
    odd = store.summary("run-1")[-1]
    assert (odd.stage, odd.num_trajectories, odd.mean_reward) == ("odd", 2, math.inf)
    rl = store.summary("run-1")[0]
    assert (rl.stage, rl.num_steps, rl.last_step, rl.mean_reward) == ("rl", 3, 2, 0.25)
    assert rl.statuses == {Status.COMPLETED: 12, Status.ERROR_ENV: 6}


def test_pages_are_invisible(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(3):
        store.record_step("run-1", "rl", step, make_groups(step), {})
    whole = list(store.trajectories("run-1"))
    for size in (1, 4, 6, 18):
        monkeypatch.setattr("ludus.store.store._PAGE_ROWS", size)
        assert list(store.trajectories("run-1")) == whole
        assert list(store.trajectories("run-1", newest_first=True)) == whole[::-1]
        assert list(store.trajectories("run-1", limit=7)) == whole[:7]


def test_every_drop_has_its_reason(store: RunStore) -> None:
    store.record_step(
        "run-1", "rl", 0, make_groups(0), {}, dropped=[("gone", "stale by 3 versions")]
    )
    assert [(d.stage, d.step, d.trajectory_id, d.reason) for d in store.dropped("run-1")] == [
        ("rl", 0, "s0-g0-2", "error_env"),
        ("rl", 0, "s0-g1-2", "error_env"),
        ("rl", 0, "gone", "stale by 3 versions"),
    ]


def test_the_same_trajectory_in_two_steps(store: RunStore) -> None:
    early, late = branched("t", "g", 0.0), branched("t", "g", 1.0)
    for step, trajectory in enumerate((early, late)):
        store.record_step("run-1", "sft", step, [Group("g", Task(id="x"), [trajectory])], {})
    assert store.trajectory("run-1", "t") == late
    assert store.trajectory("run-1", "t", "sft", 0) == early


def test_what_cannot_be_stored_raises_and_changes_nothing(store: RunStore) -> None:
    store.record_step("run-1", "rl", 0, make_groups(0), {"m": 1.0})
    wide = branched("wide", "g")
    wide.segments[0].token_ids[0] = 2**31
    task = Task(id="t", answer=object())
    for groups, reason in (
        ([Group("g", Task(id="t"), [wide])], "'wide' cannot be stored: token ids are 32-bit"),
        ([Group("g", task, [])], "task 't' cannot be stored as JSON"),
    ):
        with pytest.raises(StoreError, match=reason):
            store.record_step("run-1", "rl", 0, groups, {})
    assert store.groups("run-1", "rl", 0) == make_groups(0)
    with pytest.raises(StoreError, match="the config of run 'run-3' cannot be stored as JSON"):
        store.create_run("run-3", "x", {"path": Path()}, {})
    with pytest.raises(ValueError, match="'done' is not a valid RunStatus"):
        store.finish_run("run-1", "done")


def test_read_while_written(store: RunStore, open_store: Open) -> None:
    """A viewer sees the state before an open write transaction, and is not held up by it."""
    store.record_step("run-1", "rl", 0, make_groups(0), {})
    viewer = open_store(read_only=True, timeout_s=0.2)
    held, release = threading.Event(), threading.Event()
    prepared = store._database.transact

    def slow(connection: object) -> None:
        from sqlalchemy import text

        connection.execute(text("DELETE FROM steps"))  # type: ignore[attr-defined]
        held.set()
        assert release.wait(20)

    writer = threading.Thread(target=prepared, args=(slow,), kwargs={"write": True})
    writer.start()
    try:
        assert held.wait(20)
        assert viewer.groups("run-1", "rl", 0) == make_groups(0)
        assert len(list(viewer.trajectories("run-1"))) == 6
    finally:
        release.set()
        writer.join()
    assert list(viewer.trajectories("run-1")) == []


def test_threads_record_side_by_side(store: RunStore) -> None:
    failures: list[BaseException] = []

    def work(stage: str) -> None:
        try:
            for step in range(4):
                store.record_step("run-1", stage, step, make_groups(step), {})
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(f"stage-{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for n in range(4):
        for step in range(4):
            assert store.groups("run-1", f"stage-{n}", step) == make_groups(step)


def test_a_reader_changes_nothing(store: RunStore, open_store: Open) -> None:
    viewer = open_store(read_only=True)
    with pytest.raises(StoreError, match="opened read-only"):
        viewer.rewind("run-1", {})
    from sqlalchemy import text

    with pytest.raises(StoreError):  # the database refuses too, not just our check
        viewer._database.transact(lambda connection: connection.execute(text("DELETE FROM runs")))
    assert [run.id for run in store.runs()] == ["run-1"]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("nonsense", "sqlite:///FOLDER/FILE.db"),
        ("postgresql://host:port/db", "HOST:PORT/DATABASE"),
        ("mysql://host/db", "mysql is not supported"),
        ("sqlite://", "must outlive the run"),
    ],
)
def test_a_wrong_url_is_refused(wrong: str, right: str) -> None:
    with pytest.raises(ConfigError, match=right):
        RunStore.open(wrong)


def test_the_default_is_a_file_in_the_runs_folder(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no run store"):
        RunStore.open(None, tmp_path / "odd ?#%", read_only=True)
    with RunStore.open(None, tmp_path / "odd ?#%") as store:
        store.create_run("r", "r", {}, {})
    assert (tmp_path / "odd ?#%" / "ludus.db").is_file()
    with RunStore.open(None, tmp_path / "odd ?#%", read_only=True) as store:
        assert [run.id for run in store.runs()] == ["r"]


# Properties

floats = st.floats(allow_nan=False)
ids = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5)
texts = st.text(max_size=8)
words = st.text(st.characters(), max_size=8)
jsons = st.recursive(
    st.none() | st.booleans() | st.integers() | floats | words | st.just("$float"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(words | st.sampled_from(["$float", "$$"]), inner, max_size=3)
    ),
    max_leaves=8,
)
messages = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=texts,
    thinking=st.none() | texts,
    tool_calls=st.lists(
        st.builds(ToolCall, name=texts, arguments=st.dictionaries(texts, jsons, max_size=2)),
        max_size=2,
    ),
)


@st.composite
def versions_of(draw: st.DrawFn, num_tokens: int) -> dict[str, Any]:
    """The version fields of a segment: none, one version, or a version for each token."""
    version = draw(st.none() | st.integers(0, 2**40))
    if version is None or num_tokens < 2:
        return {"policy_version": version}
    runs = runs_of(draw(st.lists(st.integers(0, 3), min_size=num_tokens, max_size=num_tokens)))
    return {"policy_version": min(v for v, _ in runs), "version_runs": several(runs)}


@st.composite
def trees(draw: st.DrawFn) -> list[Segment]:
    segments = []
    for index in range(draw(st.integers(0, 5))):
        tokens = draw(ids)
        logprobs = st.lists(floats, min_size=len(tokens), max_size=len(tokens))
        segments.append(
            Segment(
                parent=draw(st.integers(-1, index - 1)),
                token_ids=tokens,
                logprobs=draw(st.none() | logprobs),
                message=draw(st.none() | messages),
                **draw(versions_of(len(tokens))),
                reward=draw(st.none() | floats),
                metrics=draw(st.dictionaries(words, floats, max_size=2)),
            )
        )
    return segments


trajectories = st.builds(
    Trajectory,
    id=words,
    group_id=words,
    task_id=words,
    segments=trees(),
    role=words,
    policy=words,
    status=st.sampled_from(list(Status)),
    reward=st.none() | floats,
    scores=st.dictionaries(words, floats, max_size=2),
    error=st.none() | words,
    dropped=st.none() | words,
    metrics=st.dictionaries(words, floats, max_size=2),
)


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    played=st.lists(trajectories, max_size=3), metrics=st.dictionaries(words, floats, max_size=2)
)
def test_any_trajectory_survives(
    store: RunStore, played: list[Trajectory], metrics: dict[str, float]
) -> None:
    groups = [Group("g", Task(id="t"), played)]
    store.record_step("run-1", "rl", 0, groups, metrics)
    assert store.groups("run-1", "rl", 0) == groups
    [step] = store.steps("run-1")
    assert step.metrics == metrics
    for trajectory in {t.id: t for t in played}.values():  # the latest of each id
        assert store.trajectory("run-1", trajectory.id) == trajectory


def test_runs_of_versions_that_contradict_the_tokens_are_damage() -> None:
    turn = Segment(-1, [4, 2, 2], [-0.5] * 3, policy_version=3, version_runs=[(3, 1), (4, 2)])
    tree = pack_tree([turn], "t")
    assert unpack_tree(tree, "t") == [turn]
    heads = zlib.decompress(tree.segments)
    assert b"[[3,1],[4,2]]" in heads
    for wrong in (b"[[3,1],[4,1]]", b"[]", b"[3,4]", b"[[3,1,4,2]]"):
        broken = zlib.compress(heads.replace(b"[[3,1],[4,2]]", wrong))
        with pytest.raises(StoreError, match="t is damaged"):
            unpack_tree(replace(tree, segments=broken), "t")


@given(jsons)
def test_any_json_survives(value: object) -> None:
    assert decode_json(encode_json(value)) == value


@given(words)
def test_any_text_survives(text: str) -> None:
    escaped = escape_text(text)
    assert unescape_text(escaped) == text
    assert "\0" not in escaped.encode("utf-8").decode()


def test_nan_survives_bit_for_bit(store: RunStore) -> None:
    assert encode_json([math.nan, -math.inf]) == '[{"$float":"nan"},{"$float":"-inf"}]'
    odd = [math.nan, math.inf, -math.inf, -0.0, 5e-324]
    segment = Segment(-1, [0] * 5, odd, reward=math.nan, metrics={"m": math.nan})
    group = Group("g", Task(id="t"), [Trajectory("t", "g", "t", [segment], scores={"s": math.nan})])
    store.record_step("run-1", "rl", 0, [group], {"loss": math.nan})
    back = store.trajectory("run-1", "t")
    [read] = back.segments
    assert repr(read.logprobs) == repr(odd)
    assert repr((read.reward, read.metrics, back.scores)) == "(nan, {'m': nan}, {'s': nan})"
    assert repr(store.steps("run-1")[0].metrics) == "{'loss': nan}"
