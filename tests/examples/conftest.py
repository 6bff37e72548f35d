"""Fixtures of the examples' tests."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture
def unclosed_clients() -> Iterator[None]:
    """Frameworks leave their clients open, to Python's garbage collector. It is spared what a test
    leaves for good, such as the frameworks' modules."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
        gc.freeze()
