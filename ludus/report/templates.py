"""Jinja's environment of the report's pages: escapes every value; style and script are inline."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from functools import cache
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from ludus.report import charts

PACKAGE = "ludus.report"


@cache
def environment(package: str = PACKAGE) -> Environment:
    """Returns the templates of a package, and those of this one."""
    packages = dict.fromkeys((package, PACKAGE))
    made = Environment(
        loader=ChoiceLoader([PackageLoader(name, ".") for name in packages]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Callable[..., str]] = {
        "duration": charts.duration,
        "percent": lambda value: f"{100 * value:.1f}\u202f%",
        "points": lambda value: f"{100 * value:+.1f}",
        "codes": codes,
    }
    made.filters |= filters
    return made


def codes(text: str) -> Markup:
    """Returns a text with its parts in backquotes as code."""
    parts = [escape(part) for part in text.split("`")]
    odd = len(parts) % 2 == 1  # else a backquote is open
    if not odd:
        return escape(text)
    code = Markup("<code>{}</code>")
    return Markup("").join(code.format(p) if i % 2 else p for i, p in enumerate(parts))


def assets() -> dict[str, Any]:
    """Returns what a template needs beside its data: style, script, the script's hash, sizes."""
    loader = environment().loader
    assert loader is not None
    style, script = (loader.get_source(environment(), name)[0] for name in ("page.css", "page.js"))
    return {
        "style": Markup(style),
        "script": Markup(script),
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "size": {
            "width": charts.WIDTH,
            "height": charts.HEIGHT,
            "left": charts.LEFT,
            "right": charts.WIDTH - charts.RIGHT,
            "top": charts.TOP,
            "bottom": charts.HEIGHT - charts.BOTTOM,
        },
    }
