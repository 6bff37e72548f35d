"""The token of Ray's token authentication, as this machine has it."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ludus.core.errors import ConfigError
from ludus.core.files import atomic_file


def token_path() -> Path:
    """The file of the token: `RAY_AUTH_TOKEN_PATH`, or Ray's own `~/.ray/auth_token`."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()


def own_token(create: bool = False) -> str:
    """Returns this user's token (`RAY_AUTH_TOKEN`, or its file); empty where there is none.

    With `create`, a token is made and written where there is none. Errors: ConfigError.
    """
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return token
    path = token_path()
    try:
        if token := path.read_text(encoding="utf-8").strip():
            return token
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the token of Ray cannot be read: {error}") from None
    if not create:
        return ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(path.with_name(f".{path.name}.lock")):
            if token := own_token():  # another thread or command has made it
                return token
            token = secrets.token_hex(32)
            with atomic_file(path) as temporary:
                temporary.touch(0o600)
                temporary.write_text(token)
    except OSError as error:
        raise ConfigError(f"{path}: the token of Ray cannot be written: {error}") from None
    return token


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Hold a lock that threads and processes share: two hosts must not get two tokens."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
