"""The command `ludus`, and `python -m ludus`."""

from __future__ import annotations

import signal


def main() -> None:
    """Entry point: Ctrl-C ends the imports of the command without a traceback."""
    # There is nothing to end in order until `ludus.cli` handles signals itself.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ludus.cli import main as command

    command()


if __name__ == "__main__":
    main()
