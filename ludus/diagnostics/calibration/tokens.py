"""Tokens of the expert's episodes, and the tokenizer that fits them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any, TypeVar

from ludus.config.schema import RunConfig
from ludus.core.types import Task, Trajectory
from ludus.data.conversations import Conversation, replay_all
from ludus.diagnostics.calibration.choices import (
    MAX_WORDS,
    UNKNOWN_PROMPTS,
    UNKNOWN_TURNS,
    Lengths,
)
from ludus.models.chat.tokenizers import UNK
from ludus.pipeline.parts.tokenizer import make_renderers, make_tokenizer

Number = TypeVar("Number", int, float)

NO_LIMIT = 10**9

OUTLIER = 4.0
"""Times the 99th percentile above which the longest sets no size: all other episodes would pay for
one."""


def longest(values: Sequence[Number]) -> Number:
    """The largest value; the 99th percentile where it exceeds OUTLIER times that."""
    ascending = sorted(values)
    most = ascending[math.ceil(0.99 * len(ascending)) - 1]
    return ascending[-1] if ascending[-1] <= OUTLIER * most else most


def unknown_shares(
    config: RunConfig, shown: Sequence[Conversation], new: Sequence[Conversation]
) -> tuple[int, float, float]:
    """Train a tokenizer on half of the conversations; returns the size of its vocabulary, and the
    share of unknown tokens in the turns and in the prompts of the other half."""
    tokenizer = trained(config, shown, ())
    unknown = tokenizer.convert_tokens_to_ids(UNK)
    _, trajectories, _ = replay_all(new, make_renderers(config, tokenizer), NO_LIMIT)
    counts = {True: [0, 0], False: [0, 0]}
    for segment in (s for t in trajectories for s in t.segments):
        own = counts[segment.logprobs is not None]
        own[0] += sum(token == unknown for token in segment.token_ids)
        own[1] += len(segment.token_ids)
    (turn, turns), (prompt, prompts) = counts[True], counts[False]
    return len(tokenizer), turn / max(turns, 1), prompt / max(prompts, 1)


def trained(config: RunConfig, shown: Sequence[Conversation], tasks: Sequence[Task]) -> Any:
    """The tokenizer of a configuration, trained on conversations and the opening of tasks."""
    return make_tokenizer(config, tasks, [m for item in shown for m in item.messages])


def fits_words(size: int, in_turns: float, in_prompts: float) -> bool:
    """True where the tokenizer `words` loses next to nothing of unseen episodes."""
    return size <= MAX_WORDS and in_turns <= UNKNOWN_TURNS and in_prompts <= UNKNOWN_PROMPTS


def lengths(config: RunConfig, tokenizer: Any, shown: Sequence[Conversation]) -> Lengths:
    """Tokens of prompts, turns and episodes."""
    _, trajectories, _ = replay_all(shown, make_renderers(config, tokenizer), NO_LIMIT)
    prompts = [_prompt(t) for t in trajectories]
    turns = [len(s.token_ids) for t in trajectories for s in t.segments if s.logprobs is not None]
    episodes = sorted(t.num_tokens for t in trajectories)
    turn_max, episode_most = longest(turns), longest(episodes)
    return Lengths(
        prompt_max=longest(prompts),
        turn_mean=fmean(n for n in turns if n <= turn_max),
        turn_max=turn_max,
        per_turn_max=longest(
            [
                (t.num_tokens - prompt) / max(t.num_turns, 1)
                for t, prompt in zip(trajectories, prompts, strict=True)
            ]
        ),
        episode_mean=fmean(n for n in episodes if n <= episode_most),
        episode_max=episodes[-1],
        episode_min=episodes[0],
        episodes=episodes,
    )


def _prompt(trajectory: Trajectory) -> int:
    """Tokens before the first sampled turn."""
    total = 0
    for segment in trajectory.segments:
        if segment.logprobs is not None:
            break
        total += len(segment.token_ids)
    return total
