"""Processes that an environment forks, and that return from its call as this process does.

Such a copy would go on with the run: it ends here, and leaves the name of the call for this
process, which tells it.
"""

from __future__ import annotations

import mmap
import os
from typing import NoReturn

from ludus.core.errors import EnvError

FORKS = "{} forks, and the new process returns from the call too: end it with os._exit"

NAME_BYTES = 200


class Forked(EnvError):
    """A process that the environment forked returned from one of its calls."""


_returned: dict[int, mmap.mmap] = {}
"""A text for this process, by its id: the name of a call that forked, where the new process came
back from it."""


def returned() -> mmap.mmap:
    """The text of this process, which the processes that it forks share."""
    process = os.getpid()
    if process not in _returned:
        _returned.clear()
        _returned[process] = mmap.mmap(-1, NAME_BYTES)
    return _returned[process]


def end_copy(text: mmap.mmap, name: str) -> NoReturn:
    """End this process, a copy of the one that `text` belongs to. `name`: the call's."""
    text[:] = name.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
    os._exit(1)


def copy_returned() -> str:
    """Returns the fault of a call that forked, if the new process came back from it since this was
    asked last; else ""."""
    text = returned()
    if not text[0]:
        return ""
    name = text[:].rstrip(b"\0").decode("utf-8", "replace")
    text[:] = bytes(NAME_BYTES)
    return FORKS.format(name)
