"""Settings of all tests: no internet, one thread, seeded property tests, skips by marker."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest
from engines import engine_python
from hypothesis import settings

# Set before torch and transformers are imported, and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["WANDB_MODE"] = "offline"

# A shell starts background jobs with SIGINT ignored. The processes that tests start would inherit
# that, and Ctrl-C could not be tested.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A deadline would assert a time, which fails on a busy machine.
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


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("engine"):
        if not engine_python(marker.args[0]).exists():
            pytest.skip(f"`make {marker.args[0]}` installs the environment that this test needs")
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
