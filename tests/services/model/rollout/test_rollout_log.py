"""The log of a roll-out: replayed to the same decisions, continued after any end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ludus
from ludus.core.errors import ConfigError, DataError
from ludus.core.modules import load_module
from ludus.services.model.rollout.events import (
    FIRST_TIME,
    LAST_TIME,
    Ended,
    RolloutSettings,
    Scored,
    Variant,
)
from ludus.services.model.rollout.log import HEADER_START, LogLost, RolloutLog
from ludus.services.model.rollout.replay import replay
from ludus.services.model.rollout.show import render_replay

traffic = load_module(str(Path(ludus.__file__).parents[1] / "benchmarks" / "ab_traffic.py"))

QUICK = RolloutSettings(shares=(0.1, 0.5), min_samples=10, step_s=0.0, max_samples=2000)


def opened(path: Path, **changes: Any) -> RolloutLog:
    given: dict[str, Any] = {
        "champion": "a",
        "challenger": "b",
        "settings": QUICK,
        "t": 0.0,
        **changes,
    }
    return RolloutLog.open(path, **given)


def recorded() -> tuple[list[Any], Any]:
    """The events of a roll-out that ends with a promotion, and its outcome."""
    events: list[Any] = []
    better = traffic.Arm(score=lambda draw: float(draw.random() < 0.7))
    outcome = traffic.simulate(QUICK, traffic.Arm(), better, 6000, 1, on_event=events.append)
    assert outcome.action == "promote"
    return events, outcome


def ended(number: int = 0) -> Ended:
    id, unit = f"id-{number}", f"unit-{number}"
    return Ended(t=1.0, id=id, variant=Variant.CHAMPION, unit=unit, end="ok", seconds=0.5)


def test_log_replays_to_the_same_decisions(tmp_path: Path) -> None:
    path, (events, outcome) = tmp_path / "log.jsonl", recorded()
    rollout = opened(path)
    for event in events:
        rollout.apply(event)
    rollout.close()
    found = replay(path)
    assert found.decisions == outcome.decisions == rollout.decisions
    assert found.controller.state() == rollout.controller.state()
    assert (found.missing, found.num_events) == ([], len(events))


def test_killed_at_any_byte_it_goes_on_to_the_same_decisions(tmp_path: Path) -> None:
    """The log is cut at many places, also within lines; the rest of the events follows."""
    path, (events, outcome) = tmp_path / "log.jsonl", recorded()
    rollout = opened(path)
    for event in events:
        rollout.apply(event)
    rollout.close()
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    decided = [n for n, line in enumerate(lines) if b'"decision"' in line]
    cuts = {len(b"".join(lines[:n])) + extra for n in decided for extra in (-9, 0, 1)}
    cuts |= {len(whole) * part // 7 for part in range(1, 7)}
    for cut in sorted(cuts):
        path.write_bytes(whole[:cut])
        again = opened(path)
        again_from = replay(path).num_events
        for event in events[again_from:]:
            again.apply(event)
        again.close()
        assert path.read_bytes().splitlines(keepends=True)[1:] == lines[1:]  # the salt may be new
        assert again.decisions == outcome.decisions


@pytest.mark.parametrize("start", [b"", HEADER_START, HEADER_START + b'0.0, "champ'])
def test_log_cut_off_in_its_first_line_begins_anew(tmp_path: Path, start: bytes) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(start)
    rollout = opened(path)
    assert [decision.action for decision in rollout.decisions] == ["start"]
    rollout.close()


def test_file_of_something_else_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    for text in ("my notes", "{", '{"kind": "rollout"', HEADER_START.decode()[:-1]):
        path.write_text(text)
        with pytest.raises(ConfigError, match="may be another file: name a new file, or remove"):
            opened(path)
        assert path.read_text() == text
    path.write_text("my notes\n")
    with pytest.raises(DataError, match=r"notes.txt:1: not a line of a roll-out"):
        opened(path)
    assert path.read_text() == "my notes\n"


def changed(lines: list[str], number: int, **fields: Any) -> list[str]:
    line = {**json.loads(lines[number]), **fields}
    return [*lines[:number], json.dumps(line), *lines[number + 1 :]]


def test_damaged_logs_are_refused_with_the_line(tmp_path: Path) -> None:
    path, (events, _) = tmp_path / "log.jsonl", recorded()
    rollout = opened(path)
    for event in events:
        rollout.apply(event)
    rollout.close()
    lines = path.read_text().splitlines()
    place = next(n for n, line in enumerate(lines) if '"increase"' in line)
    cases = [
        (changed(lines, place, share=0.9), f":{place + 1}: increase to 90 % at"),
        (changed(lines, place, t=1.0), "the events give increase to 50 % at"),
        ([*lines[:place], *lines[place + 1 :]], f":{place + 1}: the events give increase"),
        ([*lines[: place + 1], lines[place]], "is recorded, the events give no decision"),
        (changed(lines, 0, format=9), ":1: format 9; this version reads 1"),
        (lines[1:], ":1: the first line of a log of a roll-out is its header"),
        ([*lines, lines[0]], "a second header"),
        (changed(lines, 2, seconds=-1), ": seconds must be a number >= 0, got -1"),
        (changed(lines, 2, sconds=1), ":3: not a line of a roll-out: sconds is not a field (did"),
        (changed(lines, 2, end="lost"), ": end must be one of ok, failed, gone, got 'lost'"),
        (changed(lines, 2, kind="other"), ": kind must be one of rollout, ended, scored, decision"),
        ([*lines[:3], '{"kind": "ended"}', *lines[3:]], ":4: not a line of a roll-out: t is requ"),
        ([*lines[:3], "{", *lines[3:]], ":4: not a line of a roll-out: no JSON from column 2 on"),
        ([*lines[:3], "[]", *lines[3:]], ":4: not a line of a roll-out: no JSON object"),
        ([*lines[:3], "1" * 5000, *lines[3:]], ":4: not a line of a roll-out: no JSON"),
        ([*lines[:3], '{"\\ud800": 1}', *lines[3:]], ": kind must be one of"),
    ]
    for text, said in cases:
        path.write_text("\n".join(text) + "\n")
        with pytest.raises(DataError) as caught:
            replay(path)
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)
        assert "Input" not in str(caught.value)  # pydantic's words


def test_a_reason_in_the_words_of_another_version_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    opened(path).close()
    lines = path.read_text().splitlines()
    path.write_text("\n".join(changed(lines, 1, reason="in other words")) + "\n")
    assert replay(path).decisions[0].reason == "step 1 of 2"


def test_bytes_of_a_line_that_was_cut_off_are_told(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    rollout = opened(path)
    rollout.apply(ended())
    rollout.close()
    assert "left out" not in render_replay(replay(path))
    for bad, told in ((b"{", "1 byte are"), (b'{"kind": "sco', "13 bytes are left out")):
        whole = path.read_bytes()
        path.write_bytes(whole + bad)
        text = render_replay(replay(path))
        assert told.removesuffix(" are") in text
        assert "Replayed: 1 event and 1 decision, as recorded." in text
        path.write_bytes(whole)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"champion": "c"}, "champion was a, now c"),
        ({"challenger": "c"}, "challenger was b, now c"),
        (
            {"settings": QUICK.model_copy(update={"alpha": 0.01})},
            "alpha was 0.05, now 0.01; name another file, or give what it had",
        ),
    ],
)
def test_log_of_another_rollout_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    path = tmp_path / "log.jsonl"
    opened(path).close()
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=said):
        opened(path, **changes)
    assert path.read_bytes() == before


def test_log_is_used_by_one_service(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    rollout = opened(path)
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
        opened(path)
    rollout.close()
    opened(path).close()


def test_log_with_two_names_is_used_by_one_service(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "log.jsonl", tmp_path / "elsewhere"
    elsewhere.mkdir()
    rollout = opened(path)
    names = [tmp_path / "soft", tmp_path / "hard", elsewhere / "soft", elsewhere / "hard"]
    for name in names:
        if name.name == "soft":
            name.symlink_to(path)
        else:
            name.hardlink_to(path)
        with pytest.raises(ConfigError, match=f"{name}: in use by process {os.getpid()}"):
            opened(name)
    rollout.apply(ended())
    rollout.close()
    for name in names:
        again = opened(name)
        assert again.controller.state()["variants"]["champion"]["requests"] == 1
        again.close()


def test_name_of_a_removed_log_stays_in_use(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    rollout = opened(path)
    path.unlink()
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
        opened(path)
    rollout.close()


def test_link_to_no_file_yet_begins_a_log(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "folder" / "log.jsonl"
    link.symlink_to(target)
    opened(link).close()
    assert replay(target).decisions[0].action == "start"
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(ConfigError, match="loop: cannot be written: Too many levels of symbolic"):
        opened(loop)


@pytest.mark.timeout(30)
def test_pipes_and_devices_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(ConfigError, match=f"{path}: cannot be written: not a regular file"):
            opened(path)
        with pytest.raises(OSError, match="not a regular file"):
            replay(path)


def test_folders_are_refused_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for path in (Path("."), Path(".."), Path("/"), folder):
        with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
            opened(path)
        with pytest.raises(IsADirectoryError):
            replay(path)
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]


@pytest.mark.parametrize("t", [1e300, -1e300, 1e15, -1e15])
def test_time_that_no_calendar_has_is_refused_with_its_line(tmp_path: Path, t: float) -> None:
    path = tmp_path / "log.jsonl"
    rollout = opened(path)
    rollout.apply(ended())
    rollout.close()
    lines = path.read_text().splitlines()
    for number in range(3):
        path.write_text("\n".join(changed(lines, number, t=t)) + "\n")
        with pytest.raises(DataError, match=f":{number + 1}: not a line of a roll-out: t must "):
            replay(path)


def test_first_and_last_time_are_shown(tmp_path: Path) -> None:
    for number, t in enumerate((FIRST_TIME, LAST_TIME)):
        path = tmp_path / str(number)
        rollout = opened(path, t=t)
        assert FIRST_TIME <= rollout.now() <= LAST_TIME
        rollout.close()
        assert re.search(r"\n\d*1-01-01 00|\n9999-12-31 23:59", render_replay(replay(path)))


def test_names_cannot_look_like_decisions(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    opened(path, champion="a\x1b[31m\nchallenger  c", challenger="b\x9b\u202e").close()
    lines = render_replay(replay(path)).splitlines()
    assert lines[0] == r"champion    a\x1b[31m\nchallenger  c"
    assert lines[1] == r"challenger  b\x9b\u202e"


def test_clock_of_the_events_goes_on_from_a_log_of_the_future(tmp_path: Path) -> None:
    path, year = tmp_path / "log.jsonl", 3.2e7
    rollout = opened(path, t=year)
    rollout.apply(ended().model_copy(update={"t": rollout.now()}))
    rollout.close()
    again = opened(path, t=0.0)
    times = [again.now() for _ in range(2)]
    while times[0] == times[1]:
        times[1] = again.now()
    assert year < times[0] < times[1] < year + 1000
    again.close()


KILLED = """
import os, signal, sys
from pathlib import Path
from ludus.services.model.rollout.events import Ended, RolloutSettings, Scored, Variant
from ludus.services.model.rollout.log import RolloutLog
settings = RolloutSettings(shares=(0.1, 0.5), min_samples=10, step_s=0.0, max_samples=2000)
for phase, failing in {"holding": (1, 1), "rolled_back": (0, 1), "promoted": (0, 0)}.items():
    rollout = RolloutLog.open(Path(sys.argv[1]) / phase, "a", "b", settings, 0.0)
    for n in range(400):
        for which, variant in enumerate(Variant):
            if rollout.controller.phase == phase:
                break
            id, end = f"{variant}-{n}", "failed" if failing[which] else "ok"
            t = rollout.now()
            rollout.apply(Ended(t=t, id=id, variant=variant, unit=id, end=end, seconds=1.0))
            if end == "ok":
                rollout.apply(Scored(t=t, id=id, score=float(which)))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_in_each_phase_it_starts_in_that_phase(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)])
    assert done.returncode == -signal.SIGKILL
    shares = {"holding": 0.1, "rolled_back": 0.0, "promoted": 1.0}
    for phase, share in shares.items():
        path = tmp_path / phase
        rollout = opened(path)
        assert (rollout.controller.phase, rollout.controller.share) == (phase, share)
        before = path.read_bytes()
        for number in range(60):  # of both variants, all good
            for variant in Variant:
                id = f"later-{variant}-{number}"
                event = Ended(t=1e6, id=id, variant=variant, unit=id, end="ok", seconds=1.0)
                if not rollout.controller.ended:
                    rollout.apply(event)
        rollout.close()
        actions = [decision.action for decision in replay(path).decisions]
        if phase == "holding":
            assert actions == ["start", "hold", "resume"]
        else:
            assert path.read_bytes() == before
            assert actions[-1] == {"rolled_back": "roll_back", "promoted": "promote"}[phase]


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        opened(tmp_path / "file" / "log.jsonl")
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        opened(tmp_path)


def test_full_disk_stops_the_rollout_and_a_restart_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.jsonl"
    rollout = opened(path)
    rollout.apply(ended(1))
    write = os.write

    def half(file: int, data: bytes) -> int:
        write(file, data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(LogLost, match="No space left on device"):
        rollout.apply(ended(2))
    monkeypatch.undo()
    with pytest.raises(LogLost):
        rollout.apply(ended(3))
    rollout.close()
    again = opened(path)
    assert again.controller.state()["variants"]["champion"]["requests"] == 1
    assert again.controller.receipt(Scored(t=2.0, id="id-1", score=1.0)) == "counted"
    again.close()
    replay(path)
