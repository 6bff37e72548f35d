"""Episodes of the expert, as many as fit into a few seconds."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from ludus.config.messages import show
from ludus.core.errors import ConfigError, counted
from ludus.core.system.signals import run
from ludus.core.types import Spec, Task
from ludus.data.demonstrations import (
    EPISODES_PER_JOB,
    Dropped,
    Summary,
    generate_demonstrations,
    load_demonstrations,
    load_dropped,
)
from ludus.data.expert import Demonstration
from ludus.diagnostics.calibration.episodes import MOST_TURNS, expert_of
from ludus.envs.checks.play import EpisodeProcessDied, play_in_process
from ludus.pipeline.preflight.episodes import play_one
from ludus.rollout.hosts.host import LocalEnvs
from ludus.rollout.hosts.threads import EnvThread

LONGEST_S = 20.0
"""Seconds of an episode of the expert at most."""

FIRST_S = 12.0
"""The same of the first episode, where other levels are left."""

LEAST_LEFT = 0.25
"""Share of the seconds that levels which do not end leave to the others."""

LONGEST_REASON = 160
"""Characters of the reason of a dropped episode where it is told, its place in the code apart."""

PROBE = 2
"""Episodes that show whether an episode takes seconds."""

FIRST = 4 * EPISODES_PER_JOB
"""Episodes that show how long an episode takes: jobs come back whole."""

HERE_S = 4.0
"""Seconds of the expert's episodes in this process at most; also of the first of them."""

LEVEL_S = 2.0
"""Seconds of the first episode of each further level in this process."""

SECOND_S = 3.0
"""Least seconds of a second try of a level whose first episode took too long here."""

MARGIN = 0.5
"""Share of the episodes, counted by those in this process, that are played: processes start, and
share cores."""


PLACE = re.compile(r" \[[^\[\]]+, line \d+\]$")


def in_a_line(reason: str) -> str:
    """A reason in one line, of LONGEST_REASON characters at most, with its place in the code."""
    text = " ".join(reason.split())
    place = PLACE.search(text)
    end = place[0] if place else ""
    return show(text.removesuffix(end), bare=True, width=LONGEST_REASON) + end


@dataclass(frozen=True, slots=True)
class Expert:
    """Episodes of the expert.

    Args:
        dropped: episodes without a demonstration.
        seconds: wall time, with the start of the processes.
        per_s: episodes a second, without that start.
    """

    demonstrations: Sequence[Demonstration] = ()
    dropped: Sequence[Dropped] = ()
    seconds: float = 0.0
    per_s: float = 1.0

    def joined(self, more: Expert) -> Expert:
        """These episodes and more of them."""
        return Expert(
            [*self.demonstrations, *more.demonstrations],
            [*self.dropped, *more.dropped],
            self.seconds + more.seconds,
            more.per_s,
        )

    def without(self, tiers: Collection[str]) -> Expert:
        """These episodes without those of some tiers."""
        shown = [one for one in self.demonstrations if one.tier not in tiers]
        dropped = [one for one in self.dropped if one.tier not in tiers]
        return replace(self, demonstrations=shown, dropped=dropped)

    def dropped_of(self, tiers: Collection[str]) -> dict[str, list[Dropped]]:
        """The dropped episodes of each of these tiers that has any."""
        found: dict[str, list[Dropped]] = {}
        for one in self.dropped:
            if one.tier is not None and one.tier in tiers:
                found.setdefault(one.tier, []).append(one)
        return found

    def played_of(self, tier: str) -> int:
        """The number of episodes of a tier, with or without a demonstration."""
        shown = sum(one.tier == tier for one in self.demonstrations)
        return shown + sum(one.tier == tier for one in self.dropped)

    @property
    def failed(self) -> Counter[str]:
        """The number of dropped episodes, by kind."""
        return Counter(one.kind for one in self.dropped)

    @property
    def reason(self) -> str:
        """The reason of the first dropped episode; empty: there is none."""
        return self.dropped[0].reason if self.dropped else ""

    @property
    def num_played(self) -> int:
        return len(self.demonstrations) + len(self.dropped)

    @property
    def success(self) -> float:
        return fmean(d.success for d in self.demonstrations) if self.demonstrations else 0.0

    @property
    def turns(self) -> list[int]:
        """Turns of each episode, ascending."""
        return sorted(d.num_turns for d in self.demonstrations)

    @property
    def rewards(self) -> list[float]:
        return [d.reward for d in self.demonstrations]


def play_expert(
    env: Spec,
    tasks: Sequence[Task],
    folder: Path,
    seconds: float,
    workers: int = 2,
    fit: Callable[[], object] | None = None,
) -> Expert:
    """Let the expert play as many tasks as fit into `seconds`, in processes of its own.

    Their number follows from episodes in this process. Where those do not end, PROBE tasks are
    played, then at most FIRST, then the rest, by the time that those before took. A level whose
    episodes take too long, while those of others do not, is given up after two. `fit` is called
    before them, and refuses what no model can read.
    """
    begun, played, timeout_s = time.perf_counter(), Expert(), LONGEST_S
    tasks, bad = _without_endless_first(env, tasks)
    if not tasks:  # the next ones would take as long
        return Expert(dropped=bad)
    if fit is not None:
        fit()
    here = run(play_here(env, tasks, seconds))
    if bad and not here.ended:
        return Expert(dropped=[*bad, *here.late])
    late = here.late if here.ended else ()  # all levels alike are slow, or load their files
    slow, endless = _second_try(env, tasks, late, folder, seconds)
    tasks, bad = _but_of(tasks, endless), [*bad, *endless]
    sizes: tuple[int, ...] = (PROBE, FIRST, len(tasks))
    per_s = 0.0 if slow else workers * here.per_s
    if bad:
        begun = max(begun, time.perf_counter() - (1 - LEAST_LEFT) * seconds)
    if per_s > 0:  # the first episode of each process loads the environment's files
        sizes = (len(tasks),) if here.shown else (FIRST, len(tasks))
        timeout_s = min(4 * workers / per_s + HERE_S, LONGEST_S)
        left = seconds - (time.perf_counter() - begun)
        tasks = tasks[: max(int(MARGIN * left * per_s), PROBE)]
    for size in sizes:
        left = seconds - (time.perf_counter() - begun)
        at = played.num_played
        number = size if not at else min(size, int(left * played.per_s))
        if at >= len(tasks) or number <= 0:
            break
        more = _batch(env, tasks[at : at + number], folder / f"{at}.jsonl", workers, timeout_s)
        played = played.joined(more)
        check_openings(env, tasks, more.demonstrations)
        if not played.demonstrations:
            break
        # An episode that hangs must not take the time of all others.
        timeout_s = min(max(4 / played.per_s, 2.0), LONGEST_S)
    per_s = max(played.per_s, per_s) if per_s else played.per_s
    return replace(played, dropped=[*played.dropped, *bad], per_s=per_s)


def _but_of(tasks: Sequence[Task], dropped: Sequence[Dropped]) -> Sequence[Task]:
    """The tasks of other levels."""
    tiers = {one.tier for one in dropped}
    return [task for task in tasks if task.tier not in tiers] if dropped else tasks


def _without_endless_first(
    env: Spec, tasks: Sequence[Task]
) -> tuple[Sequence[Task], list[Dropped]]:
    """The tasks without those of the first one's level where that takes too long, and it."""
    if ":" not in env.name:
        return tasks, []
    first = tasks[0]
    several = any(task.tier != first.tier for task in tasks)
    limit_s = FIRST_S if several else LONGEST_S
    if not (reason := _first_alone(env, first, limit_s)):
        return tasks, []
    bad = [Dropped(task_id=first.id, tier=first.tier, kind="timeout", reason=reason)]
    return _but_of(tasks, bad), bad


def _second_try(
    env: Spec, tasks: Sequence[Task], late: Sequence[Dropped], folder: Path, seconds: float
) -> tuple[bool, list[Dropped]]:
    """Let the expert play another task of each level that is `late`, in half of the seconds.

    Returns whether one ends, so that its level is slow and not endless; and the episodes of levels
    that do not end.
    """
    slow, endless = False, list[Dropped]()
    for number, first in enumerate(late):
        limit_s = max(seconds / (2 * len(late)), SECOND_S)
        own = [task for task in tasks if task.tier == first.tier][:2]
        again = _batch(env, own[-1:], folder / f"late-{number}.jsonl", 1, limit_s)
        slow |= bool(again.demonstrations)
        if not again.demonstrations:
            endless += [*again.dropped, first]
    return slow, endless


def _first_alone(env: Spec, task: Task, limit_s: float) -> str:
    """Play an episode in another process, which one's own code may end or hold up for ever; returns
    the reason why it does not end; empty: it ends, or raises.

    Errors: ConfigError for an environment that ends its process.
    """
    try:
        turns = play_in_process(env, task, None, limit_s)
    except EpisodeProcessDied as error:
        raise ConfigError(f"{env.name} {error.fault}") from None
    except TimeoutError:
        return f"took longer than {limit_s:g} s"
    except Exception:  # the episodes that follow tell it
        return ""
    if len(turns) > MOST_TURNS and not any(turns[-1][3:]):
        return f"the episode does not end in {counted(MOST_TURNS, 'turn')}"
    return ""


def check_openings(env: Spec, tasks: Sequence[Task], shown: Sequence[Demonstration]) -> None:
    """Errors: ConfigError for an episode that begins with the expert's turn: there is nothing that
    a model could answer."""
    asked = {task.id for task in tasks if task.prompt}
    for one in shown:
        if one.task_id not in asked and one.messages and one.messages[0].role == "assistant":
            raise ConfigError(
                f"{env.name}: reset returned no messages for task {one.task_id}, which has no "
                "prompt either, so a model has nothing to answer: return an Observation with at "
                'least one message, such as Message(role="user", content=...)'
            )


@dataclass(frozen=True, slots=True)
class Here:
    """Episodes of the expert in this process.

    Args:
        per_s: episodes a second, those that failed included; 0: they take too long.
        ended: one ended; `shown`: one without an error.
        late: the first episode of each level where it took too long.
    """

    per_s: float
    ended: bool
    shown: bool
    late: Sequence[Dropped]


async def play_here(env: Spec, tasks: Sequence[Task], seconds: float) -> Here:
    """Play a task of each level, then further ones, at most as many as a job has. The first, with
    which an environment may load its files, does not count for the rate."""
    firsts = list({task.tier: task for task in reversed(tasks)}.values())[::-1]
    others = [task for task in tasks[:EPISODES_PER_JOB] if task not in firsts]
    envs, thread, begun = LocalEnvs(env), EnvThread(), time.perf_counter()
    took, shown, late = list[float](), False, dict[str | None, Dropped]()
    most_s = {True: seconds / 2, False: HERE_S / 2}  # of the first of each level, and of the others
    try:
        for number, task in enumerate([*firsts, *others][:EPISODES_PER_JOB]):
            started = time.perf_counter()
            is_first = number < len(firsts)
            if task.tier in late:
                continue
            if number and (started - begun if is_first else sum(took)) >= most_s[is_first]:
                break
            limit_s = LEVEL_S if number else HERE_S
            played = await play_one(envs, thread, task, limit_s, expert_of)
            if played.overdue and not is_first:
                return Here(0.0, True, shown, list(late.values()))
            if played.overdue:
                reason = f"took longer than {limit_s:g} s"
                late[task.tier] = Dropped(
                    task_id=task.id, tier=task.tier, kind="timeout", reason=reason
                )
                thread.close()
                thread = EnvThread()
                continue
            took.append(time.perf_counter() - started)
            shown |= played.demonstration is not None
    finally:
        thread.close()
    per_s = (len(took) - 1) / max(sum(took[1:]), 1e-6) if len(took) > 1 else 0.0
    return Here(per_s, bool(took), shown, list(late.values()))


def _batch(env: Spec, tasks: Sequence[Task], path: Path, workers: int, timeout_s: float) -> Expert:
    """The expert's episodes."""
    times: list[float] = []
    summary: Summary = generate_demonstrations(
        env,
        tasks,
        path,
        num_workers=workers,
        timeout_s=timeout_s,
        only_successful=False,
        max_turns=MOST_TURNS,
        on_episode=lambda _: times.append(time.perf_counter()),
    )
    found = list(load_demonstrations(path))
    dropped = load_dropped(path)
    later = len(times) - EPISODES_PER_JOB
    span = times[-1] - times[EPISODES_PER_JOB - 1] if later > 0 else summary.seconds
    rate = (later if later > 0 else len(times)) / max(span, 1e-3)
    return Expert(found, dropped, summary.seconds, rate)
