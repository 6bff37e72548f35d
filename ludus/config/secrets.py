"""Values of the configuration that hold secrets: never printed, never stored.

notify: [slack://TokenA/TokenB/TokenC, $LUDUS_NOTIFY]
stored as      [slack://***, $LUDUS_NOTIFY]
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Annotated

from pydantic import AfterValidator, PlainSerializer

KEYS = {"notify"}
"""Keys of a run whose values hold secrets."""

LONGEST = 160
"""Characters of an override that messages show."""

MASK = "***"
_PASSWORD = re.compile(r"://[^/@\s]+@")
_KEYED = re.compile(
    r"""(?i)(?<![a-z])(api_?key|(?:access_?|auth_?)?token|password|secret)(["']?\s*[:=]\s*)"""
    r"""(?!\s*\*\*\*)("[^"]*"|'[^']*'|[^\s,}\]]+)"""
)
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


def is_secret(name: object) -> bool:
    """True for a key of a secret, in any section, and for one that was meant as it."""
    text = str(name).lower()
    return bool(get_close_matches(text, KEYS, n=1, cutoff=0.75))


def without_passwords(text: str) -> str:
    """A text whose URLs have no password."""
    return _PASSWORD.sub(f"://{MASK}@", text)


def shown_override(override: str) -> str:
    """An override as messages show it: a secret's value, those of `api_key`, `token`, `password`
    and `secret`, and a URL's password are masked, and a long one is cut."""
    text = override.strip()
    words = re.finditer(r"\w+", text)
    if (secret := next((word for word in words if is_secret(word[0])), None)) is not None:
        key = re.match(r"[\w.]*", text)
        end = min(secret.end(), key.end() if key else 0)
        return f"{text[:end]}={MASK}"
    text = _KEYED.sub(lambda found: f"{found[1]}{found[2]}{MASK}", without_passwords(text))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


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
