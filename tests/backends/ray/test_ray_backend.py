"""The back end `ray`: what every back end must do, on real actors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ludus.backends.base import Backend
from ludus.backends.conformance import CHECKS, Check, environments_play, judges_score

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("local_ray")]


SHORT = {
    "stale_turns_are_refused", "training_reports_metrics", "resuming_equals_never_having_stopped",
    "failures_are_errors",
}  # fmt: skip
"""Checks of each run of the slow tests; the others are left to `make test-long`."""
BROADCAST = {"versions_count_up", "resuming_equals_never_having_stopped"}
"""Those of the other publication."""


@pytest.mark.parametrize(
    ("check", "weights"),
    [
        pytest.param(check, weights, marks=[] if check.__name__ in kept else pytest.mark.long)
        for weights, kept in (("object_store", SHORT), ("broadcast", BROADCAST))
        for check in CHECKS
    ],
)
async def test_conformance(
    check: Check, weights: str, make: Callable[..., Backend], tmp_path: Path
) -> None:
    await check(lambda folder: make(folder, weights=weights), tmp_path)


@pytest.mark.parametrize("check", [environments_play, judges_score], ids=lambda f: f.__name__)
async def test_workers_conform(check: Check, make: Callable[..., Backend], tmp_path: Path) -> None:
    await check(lambda folder: make(folder, env_workers=2), tmp_path)
