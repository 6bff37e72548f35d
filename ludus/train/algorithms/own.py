"""Calls of an algorithm's functions, which may be a user's."""

from __future__ import annotations

from bdb import BdbQuit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ludus.core.errors import LudusError, TrainingError
from ludus.core.modules import own_frame, told
from ludus.models.memory import is_out_of_memory


class OwnFunctionError(TrainingError):
    """An error of a user's function of an algorithm; `part` names it, for example `advantages`."""

    part = ""


@contextmanager
def calling(part: str) -> Iterator[None]:
    """Errors: OwnFunctionError where a user's code raised. An error of ludus keeps its
    traceback."""
    try:
        yield
    except (LudusError, BdbQuit):
        raise
    except (Exception, SystemExit) as error:
        if own_frame(error) is None or is_out_of_memory(error):
            raise
        raised = OwnFunctionError(f"rl.algorithm: {part} raised {told(error)}")
        raised.part = part.strip("`")
        raise raised from error


def name_of(function: Callable[..., Any]) -> str:
    """Returns the name of a function, of the class of a callable, or of what a partial calls."""
    while isinstance(function, partial):
        function = function.keywords.get("loss", function.func)
    return str(getattr(function, "__qualname__", type(function).__qualname__))
