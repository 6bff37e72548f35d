"""Levels of an environment that a recipe trains on; the others are left out, with the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

from ludus.core.errors import ConfigError, DataError, counted, printable
from ludus.core.system.signals import run
from ludus.diagnostics.calibration import choices
from ludus.diagnostics.calibration.episodes import play_openings
from ludus.diagnostics.calibration.expert import Expert, in_a_line, play_expert
from ludus.diagnostics.calibration.subject import MAX_TIERS, Subject
from ludus.diagnostics.calibration.warnings import FEW
from ludus.envs.checks.levels import named

EXPERT_S = 12.0
"""Seconds for the expert's episodes."""

LEAST_SHOWN = 0.1
"""Share of a level's episodes of the expert that give a demonstration; with less, its code is
broken, and the few successes would stand for the level."""

MOST_TOLD = 8
"""Levels that are left out and named, each in a line."""

MOST_COMPARED = 60
"""Levels whose episodes are compared, to choose the shortest."""

LONGEST_TOKEN = 20
"""Characters of a token that no text reaches on average."""

NUM_OPENED, OPENING_S = 4, 4.0
"""Tasks whose openings are compared with the context; at most so many seconds."""


def failing_tiers(subject: Subject, expert: Expert) -> dict[str, str]:
    """The levels of which fewer than LEAST_SHOWN of the expert's episodes gave a demonstration,
    where others have more: how many failed, and the reason of the first, in one line."""
    shown = Counter(one.tier for one in expert.demonstrations)
    failing: dict[str, str] = {}
    for tier, dropped in expert.dropped_of(subject.tiers).items():
        played = shown[tier] + len(dropped)
        if shown[tier] < LEAST_SHOWN * played:
            why = in_a_line(dropped[0].reason)
            failing[tier] = (
                f"of the expert, {len(dropped):,} of {counted(played, 'episode')} failed, {why}"
            )
    healthy = [tier for tier in subject.tiers if shown[tier] and tier not in failing]
    return failing if healthy else {}


def without_failing_tiers(
    subject: Subject, expert: Expert, say: Callable[[str], object]
) -> tuple[Subject, Expert, dict[str, str]]:
    """The subject and the expert's episodes without its `failing_tiers`, and these."""
    failing = failing_tiers(subject, expert)
    return without_tiers(subject, failing, say), expert.without(failing), failing


def without_tiers(
    subject: Subject, broken: Mapping[str, str], say: Callable[[str], object]
) -> Subject:
    """The subject without some levels; their reasons are told."""
    for tier in list(broken)[:MOST_TOLD]:
        say(f"level {tier!r} is left out: {broken[tier]}")
    if (more := len(broken) - MOST_TOLD) > 0:
        say(f"{counted(more, 'more level')} left out for such reasons")
    return replace(subject, tiers=[tier for tier in subject.tiers if tier not in broken])


def without_unmade_tiers(
    subject: Subject, num_tasks: int, say: Callable[[str], object]
) -> tuple[Subject, dict[str, str]]:
    """The subject without levels of which `task` raises, and these with the reason of each.

    Errors: ConfigError, DataError where no level has tasks.
    """
    try:
        subject.take(num_tasks, 0)
        return subject, {}
    except (ConfigError, DataError) as error:
        broken: dict[str, str] = {}
        for tier in subject.tiers:
            try:
                replace(subject, tiers=[tier]).take(-(-num_tasks // len(subject.tiers)), 0)
            except (ConfigError, DataError) as its:
                broken[tier] = in_a_line(str(its).removeprefix("tasks: "))
        if not 0 < len(broken) < len(subject.tiers):
            raise ConfigError(f"{subject.given}: {str(error).removeprefix('tasks: ')}") from error
    return without_tiers(subject, broken, say), broken


def without_small_tiers(
    subject: Subject, distinct: Mapping[str | None, float], say: Callable[[str], object]
) -> Subject:
    """The subject without levels of few different tasks, where others have more.

    Each level has as many training tasks as the others, and held-out tasks that training lacks. So
    a level of five would leave the others a handful to train on.
    """
    small = [tier for tier in subject.tiers if distinct.get(tier, FEW) < FEW]
    kept = [tier for tier in subject.tiers if tier not in small]
    if not small or not kept:
        return subject
    told = ", ".join(f"{tier} (about {distinct[tier]:.0f})" for tier in small)
    say(f"levels of few different tasks are left out: {told}; the recipe has {', '.join(kept)}")
    return replace(subject, tiers=kept)


def fewer_tiers(
    subject: Subject, folder: Path, say: Callable[[str], object], *, scratch: bool
) -> tuple[Subject, dict[str, str]]:
    """Of an environment with many levels, those with the shortest episodes of the expert; and the
    levels where it fails, each with the reason."""
    if len(subject.tiers) <= MAX_TIERS:
        return subject, {}
    assert subject.env is not None
    some = subject.tiers[:MOST_COMPARED]
    tasks = replace(subject, tiers=some).take(2 * len(some), 0)  # one of each level in turn
    fit = partial(refuse_long, subject) if scratch else None
    expert = play_expert(subject.env, tasks, folder, EXPERT_S / 2, fit=fit)
    shortest: dict[str, float] = {}
    for tier in subject.tiers:
        own = [d for d in expert.demonstrations if d.tier == tier and d.success]
        if own:
            shortest[tier] = fmean(sum(len(m.content) for m in d.messages) for d in own)
    if not shortest:
        raise ConfigError(no_demonstration(subject, expert))
    failing = failing_tiers(subject, expert)
    without_tiers(subject, failing, say)
    chosen = sorted(shortest, key=shortest.__getitem__)[:MAX_TIERS]
    kept = [tier for tier in subject.tiers if tier in chosen]
    say(
        f"{len(subject.tiers)} levels: the shortest of {len(shortest)} played are "
        f"{', '.join(map(printable, kept))} (choose with --tiers)"
    )
    return replace(subject, tiers=kept), failing


def refuse_long(subject: Subject) -> None:
    """Refuse an environment whose openings are all far beyond the context of a model from scratch,
    before its episodes are played and split into tokens.

    Errors: ConfigError.
    """
    assert subject.env is not None
    some = [replace(subject, tiers=[tier]).take(1, 0)[0] for tier in subject.tiers[:NUM_OPENED]]
    tasks = some or subject.take(NUM_OPENED, 0)
    opened = run(play_openings(subject.env, tasks, OPENING_S))
    shortest = min((sum(len(m.content) for m in opening) for _, opening in opened), default=0)
    if shortest > choices.MAX_CONTEXT * LONGEST_TOKEN:
        raise ConfigError(
            f"{subject.given}: every opening exceeds the context: the shortest of "
            f"{len(opened)} has {shortest:,} characters, and the context of a model from scratch "
            f"can have {choices.MAX_CONTEXT:,} tokens here; shorten the prompts"
        )


def no_demonstration(subject: Subject, expert: Expert) -> str:
    """The reason why nothing can be learned from this environment's expert, and the remedy."""
    if expert.demonstrations:
        return (
            f"{subject.given}: the expert played {expert.num_played} episodes and succeeded in "
            f"none (rewards {min(expert.rewards):g} to {max(expert.rewards):g}): compare them with "
            "the environment's success_at"
        )
    if "no expert" not in expert.failed:
        played = counted(expert.num_played, "episode")
        return (
            f"{subject.given}: all {played} of the expert failed{_of_levels(subject, expert)}: "
            f"{expert.reason}. `ludus check-env {subject.given}` tells more"
        )
    return (
        f"{subject.given}: {expert.reason}. A small model from scratch learns an "
        "environment's language from demonstrations: give the class a method `expert_action`, or "
        "collect episodes of a large model with `ludus generate-data` and name the file in "
        "`sft.data`; or train a pretrained model without an expert: --model"
    )


def _of_levels(subject: Subject, expert: Expert) -> str:
    """` in levels 'a', 'b'` of the dropped episodes; empty without levels."""
    tiers = list(expert.dropped_of(subject.tiers))
    return f" in level{'s' if len(tiers) > 1 else ''} {named(tiers)}" if tiers else ""
