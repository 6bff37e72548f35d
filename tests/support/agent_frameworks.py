"""Shared by the tests of agents in foreign frameworks."""

from __future__ import annotations

WARNINGS = (
    "ignore::ResourceWarning",
    "ignore::DeprecationWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)
"""Filters. Frameworks silence their own deprecations with `warnings.catch_warnings`, which is for
one thread: with agents in several, one restores the filters while another needs them."""
