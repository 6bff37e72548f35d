"""Tagged breakpoints: `breakpoint_at("TAG")` in user code, switched on by `--break TAG`.

    process                                             debugger
    one that a debugger of an editor is attached to     that one
    `ludus debug`                                       pdb, in its terminal
    any other process or thread of a run                one that attaches (`core.debugger`)

Switched off, a breakpoint costs a look at the environment.
"""

from __future__ import annotations

import os
import sys

from ludus.core.debugging.breaks import TAGS, in_an_editor, report

HERE = "LUDUS_BREAK_HERE"
"""Environment variable with the pid of the process whose terminal pdb uses."""

_seen: set[tuple[str, str]] = set()


def breakpoint_at(tag: str) -> None:
    """Stop here for a debugger if `--break TAG` switched the tag on; else do nothing.

        def step(self, action):
            breakpoint_at("step")

    Under `ludus debug`, pdb opens in the terminal. In the processes and threads of `ludus train`,
    the call waits until a debugger attaches; the command prints where.
    """
    tags = os.environ.get(TAGS)
    if not tags:
        return
    on = tag in tags.split(",")
    _report_once("reached" if on else "off", tag)
    if not on:
        return
    frame = sys._getframe(1)
    if os.environ.get(HERE) == str(os.getpid()) and not in_an_editor():
        import pdb

        pdb.Pdb().set_trace(frame)
        return
    from ludus.core.debugging.debugger import stop

    stop(tag, frame)


def _report_once(event: str, tag: object) -> None:
    if (event, str(tag)) not in _seen:
        _seen.add((event, str(tag)))
        report(event, str(tag))
