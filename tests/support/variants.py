"""Variants of a test: some run always, the others with the slow tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def variants(values: Iterable[Any], quick: Iterable[Any]) -> list[Any]:
    """The values of `pytest.mark.parametrize`; those that are not `quick` are marked slow."""
    kept = list(quick)
    values = list(values)
    assert all(value in values for value in kept), "a quick value is no value"
    return [
        value
        if value in kept
        else pytest.param(*(value if isinstance(value, tuple) else [value]), marks=pytest.mark.slow)
        for value in values
    ]
