"""Names of the user's as parts of metrics' names."""

from __future__ import annotations

import re


def metric_part(text: str) -> str:
    """Returns text as part of a metric's name: `level: 1` is `level-1`; `-` where nothing is left.

    Kept are ASCII letters and digits, and `_ . @ -` and `/` within.
    """
    kept = re.sub(r"[^A-Za-z0-9_.@/-]+", "-", text)
    return re.sub(r"/{2,}", "/", kept).strip("-/") or "-"
