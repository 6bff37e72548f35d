"""Inspect logs: read back with inspect_ai."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from store_examples import make_groups

from ludus.core.errors import ConfigError, MissingDependency
from ludus.store import RunStore
from ludus.store.export import export

ANY_WARNING = pytest.mark.filterwarnings("ignore")  # of inspect-ai and its dependencies


@pytest.fixture
def recorded(store: RunStore) -> RunStore:
    groups = make_groups(0)
    for group in groups:
        for t in group.trajectories:
            t.segments = [
                replace(s, advantages=[0.5] * len(s.token_ids)) if s.logprobs else s
                for s in t.segments
            ]
    store.record_step("run-1", "rl", 0, groups, {})
    store.record_step("run-1", "rl", 1, make_groups(0), {})  # the same ids in another step
    return store


def decode(ids: list[int]) -> str:
    return "".join(f"<{id}>" for id in ids) + "\ud800"


@ANY_WARNING
def test_inspect_reads_the_log(recorded: RunStore, tmp_path: Path) -> None:
    log_module: Any = pytest.importorskip("inspect_ai.log", reason="inspect-ai is not installed")
    path = tmp_path / "out" / "run.eval"
    written = export(recorded, "run-1", path, what="inspect", decode=decode)
    assert written.num_rows == 12
    log = log_module.read_eval_log(str(path))
    assert (log.status, log.eval.task, log.eval.run_id) == ("started", "demo", "run-1")
    assert log.results.total_samples == 12
    assert log.results.completed_samples == 8
    assert log.results.scores[0].metrics["mean"].value == 0.25
    assert len({(s.id, s.epoch) for s in log.samples}) == 12
    sample = next(s for s in log.samples if s.metadata["trajectory"] == "s0-g0-1")
    assert (sample.id, sample.epoch) == ("rl-0/s0-g0", 2)
    assert sample.scores["reward"].value == 0.5
    assert sample.scores["reward"].explanation == 'it opened C:\\door "\x00?"'
    events = [event.event for event in sample.events]
    assert events.count("model") == 4
    assert events.count("tool") == 1
    branches = [e.data for e in sample.events if e.event == "info" and e.source == "branch"]
    assert [branch["continues_after"] for branch in branches] == [1, 0]
    first = next(event for event in sample.events if event.event == "model")
    assert [message.role for message in first.input] == ["user"]
    probabilities = first.output.choices[0].logprobs.content
    assert [(p.token, p.logprob) for p in probabilities] == [("<8>?", -0.1), ("<9>?", -0.7)]
    call = first.output.choices[0].message.tool_calls[0]
    assert (call.function, call.arguments) == (
        "look",
        {"at": "door", "deep": [1, None, {"a": 2.5}]},
    )
    assert first.output.choices[0].message.content[0].reasoning == "hm"
    credit = next(e.data for e in sample.events if e.event == "info" and e.source == "credit")
    assert credit == {"reward": 0.25, "advantage": 0.5, "policy_version": 3}
    failed = next(s for s in log.samples if s.metadata["trajectory"] == "s0-g0-2")
    assert failed.error.message == 'the environment raised C:\\new "\x00?"'
    assert failed.metadata["dropped"] == "error_env"
    best = export(recorded, "run-1", path, what="inspect", min_score=0.4, step=1)
    assert best.num_rows == 2
    assert [
        s.output.choices[0].message.content for s in log_module.read_eval_log(str(path)).samples
    ]


@pytest.mark.parametrize(
    ("name", "what", "said"),
    [
        ("x.jsonl", "inspect", r"name it \*\.eval for inspect"),
        ("x.eval", "trajectories", r"name it \*\.jsonl or \*\.parquet for trajectories"),
        ("x.json", "inspect", r"is to be an Inspect log: name it \*\.eval"),
        ("x.eval", "inspct", "did you mean inspect"),
    ],
)
def test_wrong_names_are_refused(
    store: RunStore, tmp_path: Path, name: str, what: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        export(store, "run-1", tmp_path / name, what=what)


def test_without_the_package(
    store: RunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "inspect_ai", None)
    with pytest.raises(MissingDependency, match=r"ludus-rl\[inspect\]"):
        export(store, "run-1", tmp_path / "x.eval", what="inspect")
    assert list(tmp_path.glob("*.eval")) == []
