"""Passages of documents, and the part of a passage that is shown."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Passage:
    """A part of a document that search finds."""

    title: str
    text: str


def snippet(text: str, query: str, limit: int) -> str:
    """At most `limit` characters of a text, around the first word of the query."""
    if len(text) <= limit:
        return text
    words = [re.escape(word) for word in re.findall(r"\w+", query) if len(word) > 2]
    match = re.search(rf"\b(?:{'|'.join(words)})\b", text, re.IGNORECASE) if words else None
    start = max(0, min(match.start() - limit // 4, len(text) - limit)) if match else 0
    if start:  # not in the middle of a word
        start += len(text[start : start + 30].partition(" ")[0])
    cut = text[start : start + limit].strip()
    return f"{'... ' if start else ''}{cut}{' ...' if start + limit < len(text) else ''}"
