"""Values of the configuration that hold secrets: never printed, never stored.

notify: [slack://TokenA/TokenB/TokenC, $LUDUS_NOTIFY]
stored as      [slack://***, $LUDUS_NOTIFY]
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, PlainSerializer

KEYS = {"notify"}
"""Keys of a run whose values hold secrets."""

MASK = "***"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30})://")
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")


class Secret:
    """Marks a type whose values no message shows."""


def masked(url: str) -> str:
    """The URL with its scheme only; `$NAME` stays as it is."""
    if variable_of(url):
        return url
    scheme = _SCHEME.match(url)
    return f"{scheme[1].lower()}://{MASK}" if scheme else MASK


def is_masked(url: str) -> bool:
    """True for what `masked` wrote: a stored configuration does not have the URL."""
    return url.endswith(MASK) and url == masked(url)


def variable_of(url: str) -> str | None:
    """The environment variable of `$NAME` or `${NAME}`; None for a URL."""
    found = _VARIABLE.fullmatch(url)
    return (found[1] or found[2]) if found else None


def scheme_of(url: str) -> str | None:
    """The scheme of a URL; None where it has none."""
    scheme = _SCHEME.match(url)
    return scheme[1].lower() if scheme else None


def shown_override(override: str) -> str:
    """An override as messages show it: a secret's value is masked."""
    key = re.split(r"[.=\s:\[{]", override.strip(), maxsplit=1)[0]
    return f"{key}={MASK}" if key in KEYS else override


def _with_scheme(url: str) -> str:
    if variable_of(url) or is_masked(url):
        return url
    if scheme_of(url) is None:
        raise ValueError(
            "it must be a URL with a scheme, such as json://127.0.0.1:8000, or $NAME of an "
            "environment variable that holds URLs"
        )
    return url


SecretUrl = Annotated[
    str, AfterValidator(_with_scheme), PlainSerializer(masked, return_type=str), Secret()
]
"""A URL that may hold passwords or tokens, or `$NAME` of an environment variable."""
