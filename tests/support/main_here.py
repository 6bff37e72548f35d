"""The command line in the test's own process."""

from __future__ import annotations

import sys
from unittest import mock

from ludus.cli import main


def exit_code(*words: str) -> int:
    """Run `ludus` with these words: its exit code."""
    with mock.patch.object(sys, "argv", ["ludus", *words]):
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0)
    return 0
