"""Fuzzing of a service from its OpenAPI description: statuses by route, and links to what exists.

A third of the cases is sent as generated, a third with ids of things that exist, a third with a
body that is valid too. Otherwise a route behind an id would only ever answer 404.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings

Link = Callable[[Any, bool], None]
"""Put ids into a case: all that it names, and if True a valid body as well."""


class Statuses:
    """Numbers of answers by route and status."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[int]] = {}

    def add(self, route: str, status: int) -> None:
        self._counts.setdefault(route, Counter())[status] += 1

    def __getitem__(self, route: str) -> Counter[int]:
        return self._counts.get(route, Counter())

    def never_succeeded(self) -> list[str]:
        """Routes without a status of 2xx."""
        found = self._counts.items()
        return [route for route, counts in found if not any(200 <= s < 300 for s in counts)]

    def __str__(self) -> str:
        width = max(map(len, self._counts), default=0)
        lines = (
            f"{route:{width}}  {'  '.join(f'{s}: {n}' for s, n in sorted(counts.items()))}"
            for route, counts in sorted(self._counts.items())
        )
        return "\n".join(lines)


def fuzz(
    schema: Any, examples: int, link: Link, check: Callable[[Any, Any], None], **call: Any
) -> Statuses:
    """Send `examples` cases to each route; `check` gets each case and its answer."""
    statuses = Statuses()
    for found in schema.get_all_operations():
        _fuzz_operation(found.ok(), examples, link, check, statuses, call)
    print(f"\n{statuses}")
    return statuses


def _fuzz_operation(
    operation: Any,
    examples: int,
    link: Link,
    check: Callable[[Any, Any], None],
    statuses: Statuses,
    call: dict[str, Any],
) -> None:
    sent = 0

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def send(case: Any) -> None:
        nonlocal sent
        sent += 1
        if sent % 3 != 1 or examples == 1:
            link(case, sent % 3 == 0)
        answer = case.call(**call)
        statuses.add(f"{case.method} {case.path}", answer.status_code)
        check(case, answer)

    send()
    if sent < 3:  # a route without parameters has one case
        case = operation.Case()
        link(case, True)
        answer = case.call(**call)
        statuses.add(f"{case.method} {case.path}", answer.status_code)
        check(case, answer)
