"""`--break` and `--debugger`: what is refused, printed, reported and restored."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ludus.config.load import load_config
from ludus.core.debugging import breakpoints as core
from ludus.core.debugging import debugger
from ludus.core.debugging.breakpoints import HERE, breakpoint_at
from ludus.core.debugging.breaks import FOLDER, TAGS, let_go, report, waits
from ludus.core.debugging.debugger import DEBUGGER, announce
from ludus.core.errors import ConfigError, MissingDependency
from ludus.pipeline import breakpoints
from ludus.pipeline.breakpoints import PATIENT_S, check_tags, patient, switched_on


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "_seen", set())
    for name in (TAGS, FOLDER, HERE, DEBUGGER):
        monkeypatch.delenv(name, raising=False)


def test_tags_that_were_not_reached_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[str] = []
    monkeypatch.setattr(debugger, "stop", lambda tag, frame: stopped.append(tag))
    said: list[str] = []
    with switched_on(["reached", "stepp", "none"], said.append):
        assert os.environ[TAGS] == "reached,stepp,none"
        assert os.environ[DEBUGGER] == "pdb"
        folder = Path(os.environ[FOLDER])
        for tag in ("reached", "step", "reached"):
            breakpoint_at(tag)
    assert stopped == ["reached", "reached"]
    assert said == [
        "--break stepp: never reached (did you mean step?)",
        "--break none: never reached (known: reached, step)",
    ]
    assert not folder.exists()
    assert not {TAGS, FOLDER, HERE, DEBUGGER} & set(os.environ)


def test_what_waits_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    with switched_on(["a"], said.append, debugger="debugpy", here=True):
        assert os.environ[DEBUGGER] == "debugpy"
        assert os.environ[HERE] == str(os.getpid())
        announce("breakpoint a waits:\n there")
        announce("breakpoint a waits again")
        report("reached", "a")
        assert waits()
        let_go()
        assert not waits()
    assert said == ["breakpoint a waits:\n there", "breakpoint a waits again"]
    announce("without a command")
    assert capsys.readouterr().err == "without a command\n"


def test_without_tags_nothing_changes() -> None:
    with switched_on([], pytest.fail):
        assert TAGS not in os.environ


@pytest.mark.parametrize("tag", ["", "a,b", "a/b", "a b", "x" * 65, "ä", "a\n"])
def test_wrong_tags_are_refused(tag: str) -> None:
    with pytest.raises(ConfigError, match=r"--break .*: a tag is of letters"):
        check_tags([tag])


def test_wrong_debuggers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--debugger: 'pbd' is none \(did you mean pdb\?\)"):
        check_tags(["a"], "pbd")
    with pytest.raises(ConfigError, match="without --break"):
        check_tags([], "pdb")

    def absent(package: str, extra: str, purpose: str) -> None:
        raise MissingDependency(package, extra, purpose)

    monkeypatch.setattr(breakpoints, "require", absent)
    check_tags(["a"], "pdb")
    with pytest.raises(MissingDependency, match=r"ludus-rl\[debug\]"):
        check_tags(["a"], "debugpy")


def test_a_debugged_run_has_no_time_limits() -> None:
    config = load_config("babyai-tiny")
    free = patient(config)
    assert free.rollout.step_deadline_s == free.rollout.episode_deadline_s == PATIENT_S
    assert free.rollout.tool_calls.deadline_s == PATIENT_S
    assert free.demonstrations is not None
    assert free.demonstrations.timeout_s == PATIENT_S
    assert patient(config.model_copy(update={"demonstrations": None})).demonstrations is None
    assert config.rollout.step_deadline_s < PATIENT_S
