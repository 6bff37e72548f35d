"""Settings of all tests: no internet, one thread, seeded property tests, skips by marker.

Fixtures of several folders: the command line (`ludus`), the sandbox's layers, NVRTC and a browser.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from engines import engine_python
from hypothesis import settings

if TYPE_CHECKING:  # for the folders that run no commands: torch takes seconds
    from harness import Ludus, Zygote

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


@functools.cache
def _own_addresses() -> frozenset[str]:
    """Addresses of this machine: a node of Ray on it listens at one."""
    import psutil

    return frozenset(a.address for found in psutil.net_if_addrs().values() for a in found)


def _refuse_internet(event: str, args: tuple[Any, ...]) -> None:
    if event == "socket.getaddrinfo":
        host = args[0]
    elif event == "socket.connect" and isinstance(args[1], tuple):
        host = args[1][0]
    else:
        return
    name = host.decode() if isinstance(host, bytes) else host
    if name and not name.startswith(LOOPBACK) and name not in _own_addresses():
        raise OSError(f"a test reached for {name}: tests use this machine only")


def _set_ray_token() -> None:
    """One token of Ray for all test processes and the commands that they start.

    Ray else sets RAY_AUTH_MODE in the first process that starts a local Ray: clusters of that
    process then ask for a token that other processes do not send.
    """
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        with tempfile.NamedTemporaryFile("w", prefix="ray-token-", delete=False) as file:
            file.write(secrets.token_hex(32))
        atexit.register(os.unlink, file.name)
        os.environ["RAY_AUTH_TOKEN_PATH"] = file.name
    os.environ["RAY_AUTH_MODE"] = "token"


def pytest_configure(config: pytest.Config) -> None:
    sys.addaudithook(_refuse_internet)
    _set_ray_token()


def pytest_collection_finish() -> None:
    """Spare the garbage collector the imported modules, which it would look through each time."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("engine"):
        if not engine_python(marker.args[0]).exists():
            pytest.skip(f"`make {marker.args[0]}` installs the environment that this test needs")
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def layers() -> None:
    """The sandbox's jail, all its layers; without one of them, the test is skipped."""
    from ludus.core.errors import ConfigError
    from ludus.sandbox.layers import require_layers

    try:
        require_layers()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def nvrtc(layers: None) -> None:
    """NVRTC, in the sandbox; without one of them, the test is skipped."""
    from ludus.kernels.compiler import PACKAGES
    from ludus.sandbox.bubblewrap import jailed

    for package in PACKAGES:
        try:
            version(package)
        except PackageNotFoundError:
            pytest.skip(f"{package} is not installed: pip install 'ludus-rl[kernels]'")
    if absent := jailed(PACKAGES).absent:
        pytest.skip(
            f"the sandbox's user may not read {absent[0]}: root's clone lies in a private folder; "
            "clone into one that other users may enter (chmod o+x)"
        )


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """The process that all commands of this test process are forked from."""
    from harness import Zygote

    started = Zygote(tmp_path_factory.mktemp("printed"))
    yield started
    started.close()


@pytest.fixture
def ludus(zygote: Zygote, tmp_path: Path) -> Ludus:
    """The command line in an empty folder."""
    from harness import Ludus

    return Ludus(zygote, tmp_path)


@pytest.fixture(scope="module")  # its event loop would stop other modules' own
def browser() -> Iterator[Any]:
    """Chromium, driven by Playwright."""
    sync_api = pytest.importorskip("playwright.sync_api")
    names = ("chromium", "google-chrome", "chromium-browser")
    chromium = next(filter(None, map(shutil.which, names)), None)
    if chromium is None:
        pytest.skip("no chromium on this machine (apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=chromium,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        yield started
        started.close()
