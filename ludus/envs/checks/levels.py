"""A first episode of each level, so that a broken level is named and hides no other.

Where it raises, another task tells whether the whole level is broken.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ludus.core.errors import EpisodeTimeout
from ludus.core.modules import told
from ludus.core.types import Task
from ludus.envs.base import tiers_of
from ludus.envs.checks.own_tasks import made
from ludus.envs.checks.play import ForksOn, Player
from ludus.envs.checks.subject import Subject

NAME = "levels"

_ADDRESS = re.compile(r"0x[0-9a-f]+")

LEVELS_S = 20.0
"""Seconds in which episodes begin; of levels that are left no more is known."""

EPISODE_S = 3.0
"""Seconds after which an episode that goes on is enough."""

MOST_NAMED = 8
"""Levels that a line names."""


async def healthy_levels(subject: Subject, player: Player) -> list[str]:
    """The levels whose first episode raises nothing and does not hang, and those that were not
    tried; all where none can be played, or where there are no two.

    A finding names the others, each with its fault. Errors: EpisodeTimeout of `tiers`, ForksOn.
    """

    async def ask() -> list[str]:
        return tiers_of(subject.env_class)

    try:
        tiers = await player.call("tiers", ask)
    except EpisodeTimeout:
        raise
    except Exception:  # `own_tasks` tells it
        return []
    if len(tiers) < 2:
        return tiers
    faults: dict[str, list[str]] = {}
    untried: list[str] = []
    partly: list[str] = []
    begun = time.monotonic()
    for tier in tiers:
        if time.monotonic() - begun > LEVELS_S:
            untried.append(tier)
        elif fault := await _fault(subject, tier, 0):
            if not fault.hangs and not await _fault(subject, tier, 1):
                fault = replace(fault, text=f"{fault.text}, in its first task; its second plays")
                partly.append(tier)
            faults.setdefault(fault.text, []).append(tier)
    broken = [tier for those in faults.values() for tier in those]
    played = [tier for tier in tiers if tier not in broken and tier not in untried]
    faults = _alike(faults)
    # One fault of all levels is told by the other checks.
    told_here = played or untried or len(faults) > 1
    for text, those in list(faults.items())[:MOST_NAMED] if told_here else ():
        subject.error(NAME, f"{named(those)}: {text}")
    if told_here and (left := list(faults.values())[MOST_NAMED:]):
        subject.error(NAME, f"{named([tier for those in left for tier in those])}: other faults")
    if told_here and (broken or untried):
        wait = "" if not untried else f" in {LEVELS_S:g} s"
        subject.tell(
            f"of {len(tiers)} levels {len(played)} can be played{wait}"
            + (f" ({named(played)})" if played else "")
            + (f", {len(partly)} in part" if partly else "")
            + (f", {len(broken) - len(partly)} cannot" if len(broken) > len(partly) else "")
            + (f", {len(untried)} not tried ({named(untried)})" if untried else "")
        )
    return [tier for tier in tiers if tier not in broken] or tiers


@dataclass(frozen=True, slots=True)
class _Fault:
    text: str
    hangs: bool = False


async def _fault(subject: Subject, tier: str, seed: int) -> _Fault | None:
    """The fault of an episode of a level; None: it has none."""
    player = Player(subject.make, subject.timeout_s, lambda *_: None)
    begun = time.monotonic()

    async def make() -> Task:
        return made(subject.env_class, tier, seed)

    try:
        task = await player.call("task", make)
        env = await player.new()
        async for _ in player.turns(env, task):
            if time.monotonic() - begun > EPISODE_S:
                break
        await player.close_env(env)
    except ForksOn:
        raise
    except NotImplementedError:  # `own_tasks` tells it
        return None
    except EpisodeTimeout as error:
        return _Fault(str(error), hangs=True)
    except Exception as error:
        if player.at is not None:
            return _Fault(f"{player.at[0]}: {' '.join(told(error, 200).split())}")
        said = " ".join(str(error).split())
        return _Fault(said.replace(f"task({tier!r}, {seed})", "task", 1))  # alike in all levels
    finally:
        player.close()
    return None


def _alike(faults: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """The levels by fault, where faults that differ in a level's name or an address are one."""
    found: dict[str, tuple[str, list[str]]] = {}
    for fault, those in faults.items():
        key = _ADDRESS.sub("0x", fault)
        for tier in those:
            key = re.sub(rf"(?<!\w){re.escape(tier)}(?!\w)", "", key)
        found.setdefault(key, (fault, []))[1].extend(those)
    return dict(found.values())


def named(tiers: Sequence[str]) -> str:
    """`'a', 'b'`, at most MOST_NAMED."""
    more = f" and {len(tiers) - MOST_NAMED} more" if len(tiers) > MOST_NAMED else ""
    return ", ".join(map(repr, tiers[:MOST_NAMED])) + more
