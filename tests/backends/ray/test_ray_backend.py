"""The back end `ray`: what every back end must do, on real actors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ludus.backends.base import Backend
from ludus.backends.conformance import CHECKS, Check, environments_play, judges_score

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("local_ray")]


BROADCAST = {"versions_count_up", "resuming_equals_never_having_stopped"}
"""Checks that the other publication is run through, too, and not only by `make test-long`."""


@pytest.mark.parametrize(
    ("check", "weights"),
    [(check, "object_store") for check in CHECKS]
    + [
        pytest.param(
            check, "broadcast", marks=[] if check.__name__ in BROADCAST else pytest.mark.long
        )
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
