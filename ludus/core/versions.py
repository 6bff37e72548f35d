"""Versions of the weights that sampled a sequence of tokens, as runs.

    version of each token    3 3 3 4 4
    runs                     [(3, 3), (4, 2)]

The weights may be updated while a turn is sampled. A carrier has `policy_version`, the oldest
version, and `version_runs`, which is None where that version sampled all tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

Run = tuple[int, int]
"""A version, and the number of consecutive tokens that it sampled."""


def runs_of(versions: Iterable[int]) -> list[Run]:
    """Returns the runs of the tokens' versions."""
    return [(version, sum(1 for _ in same)) for version, same in groupby(versions)]


def expand(runs: Iterable[Run]) -> list[int]:
    """Returns the version of each token, the inverse of `runs_of`."""
    return [version for version, count in runs for _ in range(count)]


def all_runs(oldest: int | None, runs: list[Run] | None, num_tokens: int) -> list[Run]:
    """Returns a carrier's runs, also where it has one version; empty where that is None."""
    if runs is not None:
        return runs
    return [] if oldest is None else [(oldest, num_tokens)]


def check_runs(runs: Sequence[Run], oldest: int | None, num_tokens: int | None) -> None:
    """Check a carrier's `version_runs`. `num_tokens` is None where its tokens are unknown.

    Errors: ValueError for runs that do not add up to the tokens, or whose oldest version is not
    `oldest`.
    """
    total = sum(count for _, count in runs)
    if num_tokens not in (None, total) or any(count < 1 for _, count in runs):
        raise ValueError(f"version_runs cover {total} tokens, not {num_tokens}: {list(runs)}")
    versions = [version for version, _ in runs]
    if not versions or min(versions) != oldest:
        raise ValueError(f"policy_version {oldest} is not the oldest of version_runs {list(runs)}")


def several(runs: list[Run]) -> list[Run] | None:
    """Returns `version_runs` of a carrier with these runs: None for a single version."""
    return runs if len(runs) > 1 else None


def spell_runs(runs: Sequence[Run]) -> str:
    """Returns "3", or "3 (17 tokens), 4 (20 tokens)"; empty without a version."""
    if len(runs) == 1:
        return str(runs[0][0])
    return ", ".join(f"{v} ({n} token{'s' if n != 1 else ''})" for v, n in runs)


def mean_age(ages: Counter[int]) -> float:
    """Returns the mean age of tokens, counted by age; 0 without tokens."""
    return sum(age * count for age, count in ages.items()) / (ages.total() or 1)
