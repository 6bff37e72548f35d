"""A/B roll-outs from their logs: those in the runs folder, and those that were named.

A log is read in parts, as long as a page asks for it, and kept for the next question with the
controller's state. Nothing is written.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ludus.core.errors import LudusError, printable
from ludus.core.files import locked_by
from ludus.services.model.rollout.controller import NUM_TESTS
from ludus.services.model.rollout.course import Course, Point, median_of, rates
from ludus.services.model.rollout.events import Decision, Header, Variant
from ludus.services.model.rollout.outlook import outlook
from ludus.services.model.rollout.replay import (
    Content,
    LogFollower,
    Replaced,
    Replay,
    first_line,
    last_decision,
)
from ludus.services.viewer.rollout import clipped

MAX_LOGS = 200
MAX_OPEN = 4
READ_S = 0.5
"""A request reads a log for that long at most; the page asks again until it is read."""
CHECK_S, CHECK_ALL_S = 0.1, 1.0
"""Seconds in which the list looks for damage, in a log and in all; a page reads longer logs."""
PHASES = {"hold": "holding", "promote": "promoted", "roll_back": "rolled_back"}
"""After a decision; `running` after the others."""


class UnknownLog(LudusError):
    """No log of this name is known."""


@dataclass
class _Open:
    """A log that was read; `course` grows with it."""

    path: Path
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Read from the start."""
        self.course = Course()
        self.log = LogFollower(self.path, self._count)

    def _count(self, replayed: Replay, line: Content) -> None:
        if isinstance(line, Decision):
            self.course.decided(replayed.controller, replayed.decisions[-1:])
        elif not isinstance(line, Header):
            self.course.count(replayed.controller, line)


class RolloutLogs:
    """The logs, by the name that the page has for each: its path."""

    def __init__(self, runs_dir: Path, named: Sequence[Path] = ()) -> None:
        self._runs_dir, self._named = runs_dir, list(named)
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._checked: dict[str, tuple[Any, str]] = {}
        self._lock = threading.Lock()

    def list(self) -> dict[str, Any]:
        """Heads of the logs, newest first."""
        paths = self._paths()
        heads = [_head(name, path) for name, path in paths.items()]
        heads.sort(key=lambda head: head["changed"] or 0.0, reverse=True)
        until = time.monotonic() + CHECK_ALL_S
        for head in heads[:MAX_LOGS]:
            if not head["problem"]:
                head["problem"] = self._damage(head["log"], paths[head["log"]], until) or None
        return {"logs": heads[:MAX_LOGS], "num": len(heads)}

    def describe(self, name: str) -> dict[str, Any]:
        """A roll-out: state, course, decisions, outlook; as far as it has been read.

        Errors: UnknownLog.
        """
        opened = self._opened(name)
        with opened.lock:
            more, problem = _read(opened)
            found = {
                "log": name,
                "size": opened.log.size,
                "num_read": opened.log.num_read,
                "more": more,
                "problem": problem or None,
                "cut_off": 0 if more or problem else opened.log.size - opened.log.num_read,
                "service": locked_by(opened.path),
                "changed": _changed(opened.path),
                "now": time.time(),
            }
            if opened.log.replayed is None:
                return {**found, "rollout": None}
            return {**found, "rollout": _rollout(opened.log.replayed, opened.course)}

    def pulse(self, name: str) -> Any:
        """A value that changes when a log does, or when a service begins or ends to write it."""
        path = self._paths().get(name)
        return None if path is None else (_mark(path), locked_by(path))

    def _damage(self, name: str, path: Path, until: float) -> str:
        """The damage of a log, with the line; empty if none is known."""
        if (opened := self._open.get(name)) and opened.log.problem:
            return printable(opened.log.problem)
        mark, (checked, problem) = _mark(path), self._checked.get(name, (None, ""))
        seconds = min(CHECK_S, until - time.monotonic())
        if mark != checked and seconds > 0:
            log = LogFollower(path)
            with suppress(OSError):
                log.read_on(seconds)
            problem = printable(log.problem)
            self._checked[name] = mark, problem
        return problem

    def _paths(self) -> dict[str, Path]:
        found = {str(path): path for path in self._named}
        known = {path.resolve() for path in self._named}
        with suppress(OSError):
            for path in sorted(self._runs_dir.glob("*.jsonl")):
                if path.resolve() not in known and _is_log(path):
                    found[str(path)] = path
        return found

    def _opened(self, name: str) -> _Open:
        path = self._paths().get(name)
        if path is None:
            raise UnknownLog(f"{name} is no log of a roll-out that this page knows")
        with self._lock:
            opened = self._open.setdefault(name, _Open(path))
            self._open.move_to_end(name)
            while len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
        return opened


def _is_log(path: Path) -> bool:
    with suppress(OSError, LudusError):
        return isinstance(first_line(path), Header)
    return False


def _read(opened: _Open) -> tuple[bool, str]:
    """Read on. Returns whether there is more to read, and what prevents it."""
    try:
        more = opened.log.read_on(READ_S)
    except Replaced:
        opened.begin()
        return True, ""
    except OSError as error:
        return False, f"{opened.path}: {error.strerror}"
    return more, printable(opened.log.problem)


def _mark(path: Path) -> Any:
    with suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_size, found.st_mtime_ns
    return None


def _changed(path: Path) -> float | None:
    """The time of the last entry."""
    with suppress(OSError):
        return path.stat().st_mtime
    return None


def _head(name: str, path: Path) -> dict[str, Any]:
    """A log in the list, from its first line and its last decision."""
    head: dict[str, Any] = {"log": name, "changed": _changed(path), "problem": None, "phase": None}
    try:
        header, last = first_line(path), last_decision(path)
    except OSError as error:
        return {**head, "problem": f"{path}: {error.strerror}"}
    except LudusError as error:
        return {**head, "problem": printable(str(error))}
    if not isinstance(header, Header):
        return {**head, "problem": f"{path}: the log of a roll-out begins with its header"}
    return {
        **head,
        "champion": clipped(header.champion, 300),
        "challenger": clipped(header.challenger, 300),
        "started": header.t,
        "phase": PHASES.get(last.action, "running") if last else "running",
        "share": last.share if last else None,
        "service": locked_by(path),
    }


def _rollout(replayed: Replay, course: Course) -> dict[str, Any]:
    header, controller = replayed.header, replayed.controller
    settings = header.settings
    now = course.point(controller)
    points = [*course.points]
    if not points or points[-1].num_events != now.num_events:
        points.append(now)
    state = controller.state()
    for which, variant in enumerate(Variant):
        state["variants"][variant.value]["median_s"] = median_of(now.seconds[which])
    return {
        "champion": clipped(header.champion, 300),
        "challenger": clipped(header.challenger, 300),
        "started": header.t,
        "last_event": controller.now,
        "num_events": replayed.num_events,
        **state,
        "intervals": now.intervals,
        "estimates": now.estimates,
        "confidence": 1 - settings.alpha / 2,
        "limits": {
            "quality": -settings.margin, "errors": settings.max_error_increase, "latency": 0.5,
        },
        "threshold": NUM_TESTS / settings.alpha,
        "settings": settings.model_dump(),
        "next": [
            {"action": one.action, "share": one.share, "needs": one.needs, "done": one.done}
            for one in outlook(controller)
        ],
        "decisions": [
            {
                **one.decision.model_dump(exclude={"kind"}),
                "reason": clipped(one.decision.reason, 500),
                "num_requests": one.num_requests,
                "num_scored": one.num_scored,
            }
            for one in course.decisions
        ],
        "points": list(_points(points)),
    }  # fmt: skip


def _points(points: Sequence[Point]) -> Iterator[dict[str, Any]]:
    """Points as JSON. Rates of a variant are those since the point before."""
    before: Point | None = None
    for point in points:
        yield {
            "t": point.t,
            "requests": sum(point.requests),
            "scores": sum(point.scores),
            "share": point.share,
            "estimates": point.estimates,
            "intervals": point.intervals,
            "evidence": point.evidence,
            **{v.value: rates(before, point, which) for which, v in enumerate(Variant)},
        }
        before = point
