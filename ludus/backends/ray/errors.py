"""Errors of Ray in words: why an actor did not start, and a full object store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ludus.core.errors import ConfigError, LudusError


@contextmanager
def explained(subject: str = "an actor") -> Iterator[None]:
    """Explain the errors of Ray while actors start.

    Args:
        subject: for messages.

    Errors: LudusError where one died, or was not ready in time; ConfigError where its node lacks a
    package; a LudusError of its own.
    """
    from ray import exceptions

    try:
        yield
    except TimeoutError:  # Ray's is one, too
        raise LudusError(
            f"{subject} was not ready within its time limit: its node reads the model, or starts "
            "processes, too slowly"
        ) from None
    except (exceptions.RayTaskError, exceptions.RayActorError) as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, LudusError):
            raise cause from None
        text = str(error)
        if "ModuleNotFoundError" in text or "No module named" in text:
            raise ConfigError(
                "a node of the cluster lacks ludus, or a package that it needs: install ludus-rl "
                f"with the same extras on every node ({_line(text, 'No module named')})"
            ) from None
        if isinstance(error, exceptions.RayTaskError):
            raise LudusError(f"{subject} did not start: {error}") from None
        raise LudusError(f"{subject} died while it started: {_line(text, 'cause')}") from None


def no_room(error: BaseException) -> LudusError | None:
    """Returns the error of a full object store, where `error` tells of one."""
    from ray import exceptions

    if not isinstance(error, exceptions.OutOfDiskError | exceptions.ObjectStoreFullError):
        return None
    return LudusError(
        "Ray's object store is full, and so is the disk that takes the rest "
        f"({type(error).__name__}): free space in Ray's temporary folder (/tmp/ray), give the "
        "store more memory (`ray start --object-store-memory BYTES`), or lower checkpoint.every: "
        "the samples since the last checkpoint stay there"
    )


def _line(text: str, word: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if word in line), lines[-1] if lines else "no reason given")
