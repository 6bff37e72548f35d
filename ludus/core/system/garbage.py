"""Python's search for dead reference cycles, while a run plays and trains.

Everything else is freed at once, by its reference count. The search takes time in proportion to the
objects that are alive, and begins after every 700 new ones: a step of 256 short episodes began 60
searches, which took 26 of its 680 ms.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

NEW_OBJECTS = 50_000
"""New objects (those that can be in a cycle) after which a search begins: about those of a step of
256 short episodes. Dead cycles stay until then, with the arrays that they hold: of environments
of 30 objects that refer to themselves 1,600 at once, in place of 400."""

OLDER = 2
"""Searches among new objects after which those that survived are searched, too; Python: 10."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Search for dead cycles rarely during the block, and never among the objects that exist at its
    start (libraries, the model). A program that has switched the search off keeps it off."""
    before = gc.get_threshold()
    collect_rarely()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def collect_rarely() -> None:
    """As `rare_collections`, to the end of this process."""
    gc.freeze()
    first, *others = gc.get_threshold()
    if first:
        gc.set_threshold(max(first, NEW_OBJECTS), *(min(other, OLDER) for other in others))
