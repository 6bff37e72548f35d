"""Checks of the episodes: is there anything to learn from them?"""

from __future__ import annotations

from ludus.config.schema import RunConfig
from ludus.report.diagnosis.findings import (
    WINDOW,
    Found,
    History,
    level_of,
    mean,
    percent,
)

SIGNAL_STEPS = 5
"""Steps without any signal before a warning: a warm-up or a hard batch may take a few."""

NO_SIGNAL = (0.9, 0.99)
"""Share of groups whose episodes have equal rewards. At 0.9, a batch of 32 groups trains on 3. Runs
that learn are between 0.1 and 0.6, and come near 0.8 once most tasks are solved."""

WITHOUT_ADVANTAGE = 0.1
"""Share of groups with different rewards, and without an advantage, from which the algorithm is
blamed."""

MIN_GROUPS = 50
"""Groups before their share is judged: without a success in 50, pass@k is below 6 % (95 %)."""

REACH_STEPS = 3
OUT_OF_REACH = 0.02
"""pass@k of the groups since the start of RL up to which there is nothing to reinforce."""

CUT_BY_LENGTH = (0.25, 0.75)
"""Share of episodes cut by a limit of tokens: the expert's are never cut there."""

CUT_BY_TURNS = (0.6, 0.9)
NEAR_LIMIT = 0.75
"""Share of episodes cut by the limit of turns, which a weak policy reaches too: the limit is
blamed only where solved episodes need most of it, or none is solved."""

UNKNOWN = (0.005, 0.05)
"""Share of tokens that the model reads as `<unk>`. One word in 200 is one in an observation of a
tiny environment; the words of the training tasks are all known."""

EXCLUDED = (0.2, 0.6)
"""Share of episodes that failed or could not be scored, and are left out."""


def out_of_reach(history: History, config: RunConfig) -> Found | None:
    """Almost no group has had a success since RL began, and rewards do not differ either."""
    rl = config.rl
    if rl is None or history.num_steps < min(REACH_STEPS, rl.steps):
        return None
    failed = history.overall("rollout/groups_failed")
    groups = round(history.total("rollout/episodes") / rl.group_size)
    signal = history.last("rollout/groups_with_signal")
    if failed is None or groups < MIN_GROUPS or (signal and mean(signal) > 0.25):
        return None
    solved = 1.0 - failed
    if solved > OUT_OF_REACH:
        return None
    k = rl.group_size
    if round(solved * groups):
        text = f"{round(solved * groups)} of {groups:,} groups of {k} episodes had a success"
    else:  # the rule of three: 0 of n leaves 3/n open at 95 %
        text = f"no success in {groups:,} groups of {k} episodes: pass@{k} is below "
        text += f"{percent(3 / groups)} (95 %)"
    more = "more `demonstrations.num_episodes` or `sft.steps`" if config.sft else "an `sft` stage"
    return Found(
        1 if groups < 20 * MIN_GROUPS else 2,
        f"{text}; RL has nothing to reinforce",
        f"Give the policy a start: {more}; or begin with easier tiers (`tasks.curriculum`)",
    )


def signal_of(history: History, count: int = WINDOW) -> list[float]:
    """Shares of the groups that train: with some algorithms those whose rewards are equal do too.
    Of runs before that was recorded, shares of the groups whose rewards differ."""
    found = history.last("train/groups_with_advantage", count)
    return found or history.last("rollout/groups_with_signal", count)


def no_signal(history: History, config: RunConfig) -> Found | None:
    """The episodes of nearly every group have equal rewards, so nothing has an advantage."""
    signal = signal_of(history, SIGNAL_STEPS)
    if config.rl is None or len(signal) < SIGNAL_STEPS:
        return None
    if any(signal):
        signal = signal_of(history)
        if len(signal) < WINDOW or config.rl.groups_per_step * WINDOW < MIN_GROUPS:
            return None
    equal = 1.0 - mean(signal)
    if not (level := level_of(equal, NO_SIGNAL)):
        return None
    steps = len(signal)
    failed = mean(history.last("rollout/groups_failed", steps) or [0.0])
    solved = mean(history.last("rollout/groups_solved", steps) or [0.0])
    different = mean(history.last("rollout/groups_with_signal", steps) or [0.0])
    if different - mean(signal) > WITHOUT_ADVANTAGE:
        return Found(
            level,
            f"{percent(different)} of the groups of the last {steps} steps have different rewards, "
            f"but only {percent(mean(signal))} an advantage other than 0, so the others train "
            "nothing",
            f"See `advantages` and `keep` of `rl.algorithm` ({config.rl.algorithm.name})",
        )
    text = f"{percent(equal)} of the groups of the last {steps} steps have equal rewards"
    if solved > 0.5:
        text += f": in {percent(solved)} every episode succeeds"
        advice = (
            "The training tasks are solved: if held-out success is high too, use harder ones in "
            "`tasks.train`, or stop; if it is not, train on more different tasks"
        )
    elif failed > 0.5:
        text += f": in {percent(failed)} no episode succeeds"
        advice = (
            "Use easier tiers (`tasks.curriculum`), more demonstrations, a larger `rl.group_size` "
            f"or a higher `rollout.temperature` (now {config.rollout.temperature:g})"
        )
    else:
        advice = (
            f"Raise `rollout.temperature` (now {config.rollout.temperature:g}) or `rl.group_size` "
            f"(now {config.rl.group_size}), so that the episodes of a group differ"
        )
    return Found(level, f"{text}, so they train nothing", advice)


def _cut(history: History, name: str, thresholds: tuple[float, float]) -> tuple[float, int, int]:
    """Share of episodes that a limit cut, its level, and the steps it is of: few suffice if it cut
    nearly all."""
    shares = history.last(name)
    if len(shares) < REACH_STEPS:
        return 0.0, 0, 0
    share = mean(shares)
    level = level_of(share, thresholds)
    return share, level if level == 2 or len(shares) == WINDOW else 0, len(shares)


def cut_by_turns(history: History, config: RunConfig) -> Found | None:
    """Most episodes end at the limit of turns, and the solved ones come near it."""
    cut, level, steps = _cut(history, "rollout/truncated_turns", CUT_BY_TURNS)
    if not level:
        return None
    needed, limit = (
        history.last(f"rollout/turns_{kind}") for kind in ("of_success", "of_truncated")
    )
    text = f"the limit of turns cut {percent(cut)} of the episodes of the last {steps} steps"
    if limit:
        text += f" after {mean(limit):.1f} turns"
    if needed and limit:
        if mean(needed) < NEAR_LIMIT * mean(limit):
            return None
        text += f"; the solved ones took {mean(needed):.1f}"
    elif not needed:
        text += "; none was solved"
    turns = config.rollout.max_turns
    now = f"now {turns}" if turns is not None else "now the environment's"
    return Found(level, text, f"Raise `rollout.max_turns` ({now}), or use tasks with shorter ways")


def cut_by_length(history: History, config: RunConfig) -> Found | None:
    """Episodes end in the middle of a turn: the turn or the context is full."""
    cut, level, steps = _cut(history, "rollout/truncated_length", CUT_BY_LENGTH)
    if not level:
        return None
    text = f"a limit of tokens cut {percent(cut)} of the episodes of the last {steps} steps"
    turn, context = config.rollout.max_tokens_per_turn, config.model.context_length
    full = mean(history.last("rollout/truncated_context") or [0.0])
    tokens = history.last("rollout/tokens")
    size = sum(tokens) / (sum(history.last("rollout/episodes")) or 1.0)
    if full > 0.5 * cut or size > 0.8 * context:
        text += f"; an episode has {size:.0f} tokens"
        advice = f"Raise `model.context_length` (now {context}), or lower `rollout.max_turns`"
    else:
        advice = (
            f"Raise `rollout.max_tokens_per_turn` (now {turn}) if the expert's turns need more; "
            "else teach the policy to end its turns: more `sft.steps`"
        )
    return Found(level, text, advice)


def unknown_tokens(history: History, config: RunConfig) -> Found | None:
    """Prompts and replies have words that the tokenizer does not know."""
    values = history.last("rollout/unknown_tokens")
    if not values or not (level := level_of(mean(values), UNKNOWN)):
        return None
    return Found(
        level,
        f"{percent(mean(values))} of the tokens of prompts and replies are `<unk>`: the policy "
        "cannot read these words",
        "Collect the vocabulary from more tasks and demonstrations (`tasks.train`, "
        "`demonstrations.num_episodes`), lower `min_count` or raise `vocab_size` of "
        "`model.tokenizer`, or use a tokenizer of bytes",
    )


def excluded(history: History, config: RunConfig) -> Found | None:
    """Many episodes failed, or have no score."""
    episodes = history.last("rollout/episodes")
    lost = history.last("rollout/excluded")
    steps = min(WINDOW, config.rl.steps) if config.rl else WINDOW
    if len(episodes) < steps or not sum(episodes):
        return None
    share = sum(lost) / sum(episodes)
    if not (level := level_of(share, EXCLUDED)):
        return None
    return Found(
        level,
        f"{percent(share)} of the episodes of the last {len(episodes)} steps failed or have no "
        "score, and are left out",
        "See their errors: `ludus show RUN` lists them as dropped, with their reasons",
    )
