"""What holds for every test: no internet, one thread, seeded property tests."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest
from hypothesis import settings

# Set before torch and transformers are imported, and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["WANDB_MODE"] = "offline"

# Where a shell starts this in the background, SIGINT is ignored, and what tests start would inherit
# that: Ctrl-C could not be tested.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A deadline would be a timed assertion, which a busy machine fails.
settings.register_profile("ludus", deadline=None, derandomize=True)
settings.load_profile("ludus")

LOOPBACK = ("127.", "localhost", "::1", "0.0.0.0")


def _refuse_internet(event: str, args: tuple[Any, ...]) -> None:
    if event == "socket.getaddrinfo":
        host = args[0]
    elif event == "socket.connect" and isinstance(args[1], tuple):
        host = args[1][0]
    else:
        return
    name = host.decode() if isinstance(host, bytes) else host
    if name and not name.startswith(LOOPBACK):
        raise OSError(f"a test reached for {name}: tests use this machine only")


def pytest_configure(config: pytest.Config) -> None:
    sys.addaudithook(_refuse_internet)
