"""Bearer tokens: read from the environment, checked in constant time."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable

from ludus.core.errors import ConfigError

MIN_CHARS = 16
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


def client_tokens() -> tuple[str, ...]:
    """The comma-separated tokens of LUDUS_TOKENS. Errors: ConfigError for a weak token."""
    tokens = [token.strip() for token in os.environ.get("LUDUS_TOKENS", "").split(",")]
    return check_tokens("LUDUS_TOKENS", tokens)


def admin_token() -> str:
    """The token in LUDUS_ADMIN_TOKEN, or "". Errors: ConfigError for a weak token."""
    token = os.environ.get("LUDUS_ADMIN_TOKEN", "").strip()
    return "".join(check_tokens("LUDUS_ADMIN_TOKEN", [token]))


def require_tokens(host: str, tokens: tuple[str, ...]) -> None:
    """Errors: ConfigError if `host` is reachable from other machines and there is no token."""
    if not tokens and host not in LOCAL_HOSTS:
        raise ConfigError(
            f"--host {host} is open to other machines: set a token in LUDUS_TOKENS, or "
            "serve on 127.0.0.1"
        )


def match_token(authorization: bytes, tokens: Iterable[str]) -> str | None:
    """The token of an `Authorization: Bearer TOKEN` header, or None if it is not in `tokens`."""
    scheme, _, given = authorization.partition(b" ")
    if scheme.lower() != b"bearer":
        return None
    matches = [token for token in tokens if secrets.compare_digest(token.encode(), given)]
    return matches[0] if matches else None


def check_tokens(variable: str, tokens: list[str]) -> tuple[str, ...]:
    """The tokens that are not empty. Errors: ConfigError for a weak one; `variable` names it."""
    present = tuple(token for token in tokens if token)
    if any(len(token) < MIN_CHARS or not token.isascii() for token in present):
        raise ConfigError(f"{variable}: a token needs at least {MIN_CHARS} ASCII characters")
    return present
