"""Precision and recall on labelled kernels. Those held out were written, and labelled, after the
rules; the floors are what the rules reached on them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("tree_sitter_cuda", reason="needs tree-sitter-cuda: ludus-rl[kernels]")

from ludus.kernels.analysis import analyse

HELD_OUT = Path(__file__).with_name("heldout.cu")


def labelled() -> list[tuple[str, frozenset[str], str]]:
    """Name, rules that should find something, and source."""
    found = []
    for part in HELD_OUT.read_text(encoding="utf-8").split("//// ")[1:]:
        head, _, source = part.partition("\n")
        name, _, rules = head.partition("|")
        found.append((name.strip(), frozenset(rules.replace(",", " ").split()), source))
    return found


def measured() -> tuple[Counter[str], list[str]]:
    """Counts of `hit`, `missed` and `false` over all kernels and rules, and what went wrong."""
    counts: Counter[str] = Counter()
    wrong = []
    for name, expected, source in labelled():
        found = analyse(source).rules
        counts["hit"] += len(found & expected)
        counts["missed"] += len(expected - found)
        counts["false"] += len(found - expected)
        wrong += [f"{name}: missed {rule}" for rule in sorted(expected - found)]
        wrong += [f"{name}: false {rule}" for rule in sorted(found - expected)]
    return counts, wrong
