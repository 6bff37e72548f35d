"""Runs all rules over a source."""

from __future__ import annotations

from collections.abc import Iterator

from ludus.kernels.analysis.findings import Analysis, Finding
from ludus.kernels.analysis.pitfalls import pitfall_findings
from ludus.kernels.analysis.safety import finding, safety_findings
from ludus.kernels.analysis.tree import Source

MAX_SOURCE = 100_000
"""Limit of a source's length, in bytes."""
MAX_DEPTH = 200
"""Limit of nesting."""


def analyse(source: str) -> Analysis:
    """Returns the findings of a source of CUDA C++, in the order of their places.

    The analysis expands no macros and follows no calls; it reads what is written. A source that it
    cannot read in full (too long, too deep, a syntax error) has a finding `unreadable`.
    """
    data = source.encode("utf-8", "replace")
    if len(data) > MAX_SOURCE:
        reason = f"the source has {len(data):,} bytes; {MAX_SOURCE:,} are read at most"
        return Analysis((Finding(1, 1, "unreadable", reason),))
    return Analysis(tuple(sorted(set(_findings(Source(data))))))


def _findings(source: Source) -> Iterator[Finding]:
    if b"\0" in source.data:
        yield Finding(1, 1, "unreadable", "the source has a NUL character")
    if (deep := _too_deep(source)) is not None:
        yield deep
        return
    if source.root.has_error:
        for node in source.nodes:
            if node.is_error or node.is_missing:
                yield finding(node, "unreadable", "the syntax is not that of CUDA C++")
                break
    yield from safety_findings(source)
    yield from pitfall_findings(source)


def _too_deep(source: Source) -> Finding | None:
    waiting = [(source.root, 0)]
    while waiting:
        node, depth = waiting.pop()
        if depth > MAX_DEPTH:
            return finding(node, "unreadable", f"the nesting is deeper than {MAX_DEPTH}")
        waiting.extend((child, depth + 1) for child in node.children)
    return None
