"""HTML pages of an iteration's problems: the kept ones and the rejected ones, each by p.

    generated_question/iteration-1/index.html   counts, and the pages with their range of p
    .../kept-1.html ... rejected-1.html ...     PER_PAGE problems each

Texts of models are untrusted: Jinja escapes them, they are cut, each stands in an element that
isolates its direction, and the policy of the page allows no script.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment

from ludus.coevolve.report.problems import Problem
from ludus.coevolve.storage import Storage
from ludus.core.files import atomic_write
from ludus.report.templates import assets, environment

PER_PAGE = 250
LIMITS = {"label": 120, "line": 240, "text": 2000, "answer": 400}
"""Characters that a page shows of a text. Of an answer, its end: the result is there."""

PACKAGE = "ludus.coevolve.report"

_PAGE = re.compile(r"(kept|rejected)-\d+\.html")
_HIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True, slots=True)
class Page:
    """Some problems, and the file's name."""

    file: str
    name: str
    problems: Sequence[Problem]

    @property
    def range(self) -> str:
        shares = [problem.p for problem in self.problems if problem.p is not None]
        if not shares:
            return "no vote"
        told = f"p {min(shares):.2f} to {max(shares):.2f}"
        without = len(self.problems) - len(shares)
        return f"{told}, {without} without a vote" if without else told


def write_pages(storage: Storage, iteration: int, problems: Sequence[Problem]) -> Path:
    """Write an iteration's pages, each atomically, and return the index. Errors: OSError."""
    folder = storage.questions(iteration, "problems").parent
    folder.mkdir(parents=True, exist_ok=True)
    pages = make_pages(problems)
    shown = {"name": storage.root.name, "iteration": iteration, "pages": pages, "limits": LIMITS}
    template = templates().get_template("problems.html")
    for place, page in enumerate(pages):
        near = pages[max(place - 1, 0)], pages[min(place + 1, len(pages) - 1)]
        text = template.render(**shown, page=page, near=near, **assets())
        atomic_write(folder / page.file, text.encode("utf-8", "replace"))
    index = folder / "index.html"
    text = template.render(**shown, page=None, near=(), **assets())
    atomic_write(index, text.encode("utf-8", "replace"))
    for old in folder.iterdir():
        if _PAGE.fullmatch(old.name) and old.name not in {page.file for page in pages}:
            old.unlink(missing_ok=True)
    return index


def make_pages(problems: Sequence[Problem]) -> list[Page]:
    """Returns the pages: problems by rising p, those without a vote last."""
    ordered = sorted(problems, key=lambda one: (one.p is None, one.p or 0.0, one.number))
    pages = []
    for name, kept in (("kept", True), ("rejected", False)):
        chosen = [problem for problem in ordered if problem.is_kept is kept]
        for number, first in enumerate(range(0, len(chosen), PER_PAGE), start=1):
            some = chosen[first : first + PER_PAGE]
            pages.append(Page(f"{name}-{number}.html", name, some))
    return pages


def start(text: str, limit: int) -> str:
    """Returns the first characters of a text, and how many are left out."""
    left = len(text) - limit
    return shown(text) if left <= 0 else f"{shown(text[:limit])} … {left:,} more characters"


def end(text: str, limit: int) -> str:
    """Returns the last characters of a text, and how many are left out."""
    left = len(text) - limit
    return shown(text) if left <= 0 else f"{left:,} more characters … {shown(text[-limit:])}"


def shown(text: str) -> str:
    """Returns the text with a picture in place of each control character and direction mark."""
    return _HIDDEN.sub("\ufffd", text)


def templates() -> Environment:
    """Returns the templates of this folder."""
    made = environment(PACKAGE)
    made.filters |= {"start": start, "end": end}
    return made
