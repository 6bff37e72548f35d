"""Compares the expert's episodes with the limits of a recipe: turns, tokens of a turn, context.

An episode is *cut* at the first turn that a limit does not allow; what it earned before counts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ludus.config.schema import RunConfig
from ludus.core.types import Message, Task, Trajectory
from ludus.data.conversations import read_conversations, replay_all
from ludus.models.chat.by_task import TaskRenderers
from ludus.pipeline.preflight.episodes import Played
from ludus.rollout.sessions.session import with_system_prompt
from ludus.tasks.mixture import for_part, part_of, settings_of

ENOUGH = 4
"""Episodes from which `all of them` counts as `always`; fewer where there are fewer tasks."""

MARGIN = 1.2
"""Factor for the tokens that a tokenizer of a few episodes counted. With BPE of 640 tokens for
TextCraft's tool calls, the run's own counted up to 1.16 times as many."""

SLACK = 1.5
"""Factor by which such a count exceeds a limit before it is told. With BPE of 288 tokens for
letter_counting, turns of 10 tokens were counted as 15."""

AUTOMATIC = "the environment's max_turns (rollout.max_turns is null)"


@dataclass(slots=True)
class Findings:
    """`faults` refuse the run; `notes` warn."""

    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Need:
    """The need of an episode for a limit. `cut`: index of the first turn that it does not allow;
    None: it allows all."""

    played: Played
    limit: int
    needed: int
    cut: int | None

    @property
    def loses_all(self) -> bool:
        """True if the episode is cut before it earns anything."""
        low = self.played.score_range[0]
        earned = sum(self.played.rewards[: self.cut])
        return self.cut is not None and (earned == 0 or earned <= low)


def turn_needs(config: RunConfig, episodes: Sequence[Played]) -> dict[str, list[Need]]:
    """Turns of each episode, by the key of the limit."""
    needs: dict[str, list[Need]] = defaultdict(list)
    for played in episodes:
        key, limit = _turn_limit(config, played)
        needed = len(played.rewards)
        needs[key].append(Need(played, limit, needed, limit if needed > limit else None))
    return needs


def _turn_limit(config: RunConfig, played: Played) -> tuple[str, int]:
    """The key and the highest limit of turns that an episode of the task has in the run."""
    part = part_of(played.task) or ""
    horizon = config.rl.horizon if config.rl else None
    schedule = horizon.get(part) if isinstance(horizon, dict) else horizon
    if schedule:
        return "rl.horizon", max(turns for _, turns in schedule)
    settings, own = settings_of(config.rollout, part), config.rollout.parts.get(part)
    limit = for_part(settings.max_turns, played.task)
    if limit is None:
        return AUTOMATIC, played.max_turns + (
            settings.tool_calls.max_per_episode if config.tools else 0
        )
    if isinstance(settings.max_turns, dict):
        return f"rollout.max_turns.{part}", limit
    return _key("max_turns", part, own), limit


def _key(name: str, part: str, own: Any) -> str:
    """The key of a rollout setting that a part may have of its own."""
    has_own = own is not None and getattr(own, name) is not None
    return f"rollout.parts.{part}.{name}" if has_own else f"rollout.{name}"


def token_needs(
    config: RunConfig, episodes: Sequence[Played], renderers: TaskRenderers
) -> tuple[dict[str, list[Need]], dict[str, list[Need]]]:
    """Tokens of the longest turn, by the key of the limit; and tokens of the whole episode."""
    turns: dict[str, list[Need]] = defaultdict(list)
    whole: list[Need] = []
    for played, trajectory in _replayed(config, episodes, renderers):
        part = part_of(played.task) or ""
        limit = settings_of(config.rollout, part).max_tokens_per_turn
        sizes = [len(s.token_ids) for s in trajectory.segments if s.logprobs is not None]
        too_long = [turn for turn, size in enumerate(sizes) if size > limit]
        key = _key("max_tokens_per_turn", part, config.rollout.parts.get(part))
        turns[key].append(Need(played, limit, max(sizes), next(iter(too_long), None)))
        limit, total, cut, turn = config.model.context_length, 0, None, 0
        for segment in trajectory.segments:
            total += len(segment.token_ids)
            if total > limit and cut is None:
                cut = turn
            turn += segment.logprobs is not None
        whole.append(Need(played, limit, total, cut))
    return turns, {"model.context_length": whole}


def _replayed(
    config: RunConfig, episodes: Sequence[Played], renderers: TaskRenderers
) -> Iterator[tuple[Played, Trajectory]]:
    by_id = {p.task.id: p for p in episodes if p.demonstration is not None}
    demonstrations = [p.demonstration for p in by_id.values() if p.demonstration is not None]
    without_file = config.model_copy(update={"sft": None})
    tasks = [played.task for played in by_id.values()]
    conversations, _ = read_conversations(without_file, demonstrations, tasks)
    replayed, trajectories, _ = replay_all(conversations, renderers, 10**9)
    for task, trajectory in zip(replayed, trajectories, strict=True):
        yield by_id[task.id], trajectory


def opening_sizes(
    config: RunConfig,
    openings: Sequence[tuple[Task, Sequence[Message]]],
    renderers: TaskRenderers,
) -> list[int]:
    """Tokens of the first prompts."""
    sizes = []
    for task, opening in openings:
        messages = [*task.prompt, *opening]
        prompt = with_system_prompt(
            messages, settings_of(config.rollout, part_of(task)).system_prompt
        )
        if prompt:
            sizes.append(len(renderers.of(task).open(prompt)))
    return sizes


def judge_needs(
    needs: Mapping[str, list[Need]],
    found: Findings,
    *,
    what: str,
    result: str,
    exact: bool,
    judged: bool,
    all_played: bool,
) -> None:
    """Add a fault where a limit cuts all episodes before they earn anything, else a note.

    Args:
        what, result: what the expert needs, and what a cut costs, in the messages.
        exact: False where a tokenizer counted that was trained on these few episodes. Other texts
            give it other merges, so only what exceeds a limit by SLACK is told.
        judged: a judge scores the episodes, cut ones too: no fault.
        all_played: `needs` are of all tasks.
    """
    for key, some in needs.items():
        slack = 1.0 if exact else SLACK
        cut = [n for n in some if n.cut is not None and n.needed > slack * n.limit]
        if not cut:
            continue
        limit = max(need.limit for need in cut)
        low, high = min(need.needed for need in cut), max(need.needed for need in some)
        needed = str(high) if low == high else f"{low} to {high}"
        about = "" if exact else " (estimated: the tokenizer will be trained on more texts)"
        enough = high if exact else math.ceil(high * MARGIN)
        remedy = f"set {key if key != AUTOMATIC else 'rollout.max_turns'} to at least {enough}"
        always = len(cut) == len(some) and (len(some) >= ENOUGH or all_played)
        if always and not judged and all(need.loses_all for need in cut):
            found.faults.append(
                f"{key}: {limit} is less than the expert needs in {_all(len(some))}: {needed} "
                f"{what}{about}. {result} and earn nothing: {remedy}"
            )
        else:
            share = _all(len(some)) if len(cut) == len(some) else f"{len(cut)} of {len(some)}"
            episodes = "" if len(cut) == len(some) else " episodes"
            found.notes.append(
                f"{key}: {limit} is less than the expert needs in {share}{episodes}: {needed} "
                f"{what}{about}. {result}: {remedy}"
            )


def judge_openings(sizes: Sequence[int], config: RunConfig, exact: bool, found: Findings) -> None:
    """Add a fault where no first prompt leaves room for a turn, else a note where some do not."""
    limit = config.model.context_length
    long = [size for size in sizes if size >= limit]
    if not long:
        return
    about = "" if exact else " (a low estimate)"
    enough = math.ceil(max(long) * (1.0 if exact else MARGIN))
    every = len(long) == len(sizes)
    whose = _all(len(sizes), "tasks") if every else f"{len(long)} of {len(sizes)} tasks"
    text = (
        f"model.context_length: {limit} tokens have no room for a turn after the first prompt of "
        f"{whose}: up to {max(long)} tokens{about}: set it to at least "
        f"{enough + config.rollout.max_tokens_per_turn}"
    )
    (found.faults if every else found.notes).append(text)


def _all(count: int, noun: str = "episodes") -> str:
    return f"all {count} {noun} that were tried" if count > 1 else f"the one {noun[:-1]} tried"
