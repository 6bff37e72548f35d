"""Selection of the episodes of a data set, and its data card."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from ludus.core.types import Wire
from ludus.data.journal import Record


class Lengths(Wire):
    """Statistics of the kept episodes."""

    mean: float
    median: float
    max: int


class EnvCard(Wire):
    """Statistics of one environment in a data set.

    `success` is the share of scored episodes that succeeded, kept or not, by source (expert or
    model). `left_out` counts the episodes that are not kept, by reason.
    """

    played: dict[str, int]
    scored: dict[str, int]
    success: dict[str, float]
    kept: int
    kept_by: dict[str, int]
    tasks_played: int
    tasks_kept: int
    mean_reward: float | None
    turns: Lengths | None
    characters: Lengths | None
    tiers: dict[str, int]
    left_out: dict[str, int]


class Selection(Wire):
    """Kept episodes in the order of their tasks, and counts of the others by reason."""

    kept: list[Record]
    left_out: dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True)
class KeepRule:
    """Keeps episodes with a score of at least `min_score` (None: successes), in at most
    `max_turns` turns (None: no limit)."""

    min_score: float | None = None
    max_turns: int | None = None

    def rejection(self, record: Record) -> str | None:
        """Returns the reason to leave an episode out, or None to keep it."""
        if record.score is None:
            return (record.reason or "not scored").partition(":")[0]
        if not (record.success if self.min_score is None else record.score >= self.min_score):
            return "the score is too low"
        too_long = self.max_turns is not None and record.num_turns > self.max_turns
        return "more turns than allowed" if too_long else None


def select(records: Iterable[Record], keep: int, rule: KeepRule) -> Selection:
    """Rejection sampling: keeps the best `keep` episodes of each task among those that pass `rule`.

    Episodes rank by score, then fewer turns, then sample number. Duplicate conversations, of the
    same or another task, are kept once.
    """
    by_task: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        by_task[record.env, record.task_id].append(record)
    kept: list[Record] = []
    seen: set[bytes] = set()
    left_out: dict[str, Counter[str]] = defaultdict(Counter)
    for (env, _), candidates in by_task.items():
        num_kept = 0
        for record in sorted(candidates, key=_rank):
            reason = rule.rejection(record)
            if reason is None and fingerprint(record) in seen:
                reason = "duplicate"
            elif reason is None and num_kept == keep:
                reason = "a better episode of its task is kept"
            if reason is not None:
                left_out[env][reason] += 1
                continue
            seen.add(fingerprint(record))
            kept.append(record)
            num_kept += 1
    return Selection(kept=kept, left_out={env: dict(counts) for env, counts in left_out.items()})


def fingerprint(record: Record) -> bytes:
    """Hash of environment and conversation; the task's id does not enter."""
    turns = [
        (m.role, m.content, m.thinking, [(c.name, c.arguments) for c in m.tool_calls])
        for m in record.messages
    ]
    return hashlib.sha256(json.dumps([record.env, turns], sort_keys=True).encode()).digest()


def _rank(record: Record) -> tuple[float, int, int, str]:
    score = -1.0 if record.score is None else record.score
    return -score, record.num_turns, record.sample, record.source


def build_cards(records: Sequence[Record], selection: Selection) -> dict[str, EnvCard]:
    """Returns the data card of each environment."""
    envs = sorted({record.env for record in records})
    return {
        env: _env_card(
            [r for r in records if r.env == env],
            [r for r in selection.kept if r.env == env],
            selection.left_out.get(env, {}),
        )
        for env in envs
    }


def _env_card(played: list[Record], kept: list[Record], left_out: dict[str, int]) -> EnvCard:
    scored = [r for r in played if r.score is not None]
    sources = sorted({r.source for r in scored})
    characters = [
        sum(len(m.content) + len(m.thinking or "") for m in r.messages if m.role == "assistant")
        for r in kept
    ]
    return EnvCard(
        played=dict(Counter(r.source for r in played)),
        scored=dict(Counter(r.source for r in scored)),
        success={s: mean(r.success for r in scored if r.source == s) for s in sources},
        kept=len(kept),
        kept_by=dict(Counter(r.source for r in kept)),
        tasks_played=len({r.task_id for r in played}),
        tasks_kept=len({r.task_id for r in kept}),
        mean_reward=mean(r.reward or 0.0 for r in kept) if kept else None,
        turns=_lengths([r.num_turns for r in kept]),
        characters=_lengths(characters),
        tiers=dict(sorted(Counter(r.tier or "all" for r in kept).items())),
        left_out=dict(sorted(left_out.items())),
    )


def _lengths(values: list[int]) -> Lengths | None:
    if not values:
        return None
    return Lengths(mean=round(mean(values), 2), median=median(values), max=max(values))


def render(cards: dict[str, EnvCard], settings: dict[str, Any]) -> str:
    """The cards and the settings as Markdown."""
    lines = ["# Data card", ""]
    for env, card in cards.items():
        lines += [f"## {env}", "", "| | |", "|---|---|"]
        lines += [f"| {name} | {value} |" for name, value in _rows(card)]
        lines.append("")
    return "\n".join([*lines, "## Settings", "", "```json", json.dumps(settings, indent=2), "```"])


def _rows(card: EnvCard) -> list[tuple[str, str]]:
    rows = [("kept episodes", f"{card.kept}, of {card.tasks_kept} of {card.tasks_played} tasks")]
    rows += [(f"kept, by the {who}", str(count)) for who, count in card.kept_by.items()]
    for who, rate in card.success.items():
        played = f"{100 * rate:.1f} % of {card.scored[who]} scored, {card.played[who]} played"
        rows.append((f"success of the {who}", played))
    if card.mean_reward is not None:
        rows.append(("mean reward of the kept", f"{card.mean_reward:.4g}"))
    for name, lengths in (("turns", card.turns), ("characters of the turns", card.characters)):
        if lengths is not None:
            text = f"mean {lengths.mean:g}, median {lengths.median:g}, at most {lengths.max}"
            rows.append((name, text))
    rows += [(f"left out: {reason}", str(count)) for reason, count in card.left_out.items()]
    return rows + [(f"tier {tier}", str(count)) for tier, count in card.tiers.items()]
