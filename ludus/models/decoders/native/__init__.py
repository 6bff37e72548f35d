"""Compiles the C kernels with the system's compiler at first use.

The library is cached in the user's cache folder; its name is a hash of sources, compiler, options
and processor. It is moved there atomically, so several processes may build it concurrently. Without
a compiler, or with LUDUS_NATIVE=0 in the environment, callers fall back to torch; the log, the
report and `ludus doctor` then give the reason.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from ludus.core.files import atomic_file

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("decoder.c")
HEADERS = sorted(Path(__file__).parent.glob("*.h"))
FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
VARIANTS = (("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-march=native",), ())
"""Options in order of preference; not every compiler supports native tuning or OpenMP."""


REMEDY = (
    "install a C compiler (Debian: apt-get install gcc libc6-dev; macOS: xcode-select --install): "
    "a GRPO step took 1.9 to 2.4 times as long without one (docs/benchmarks/native.md)"
)


class Unavailable(Exception):
    """The native library is not available; the message gives the reason."""


@functools.cache
def library(half: bool = False, source: Path = SOURCE) -> ctypes.CDLL:
    """Load the kernels of a source file, for float32 or bfloat16. Errors: Unavailable."""
    if os.environ.get("LUDUS_NATIVE", "1") == "0":
        raise Unavailable("LUDUS_NATIVE=0 is set")
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise Unavailable("no C compiler (cc) on the PATH")
    messages = []
    flags = (*FLAGS, "-DHALF") if half else FLAGS
    for options in VARIANTS:
        try:
            return ctypes.CDLL(str(_build(source, compiler, (*flags, *options))))
        except (OSError, subprocess.SubprocessError) as error:
            output = getattr(error, "stderr", None)
            messages.append(output.strip() if isinstance(output, str) and output else str(error))
    raise Unavailable(f"{compiler} could not build the kernels: {messages[-1][-500:]}")


def absence() -> str:
    """Returns the reason why torch computes in place of the kernels; empty where they are built."""
    try:
        library()
    except Unavailable as reason:
        return str(reason)
    return ""


def _build(source: Path, compiler: str, flags: tuple[str, ...]) -> Path:
    """Returns the path of the library; builds it if it is not cached."""
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    texts = [path.read_text() for path in (source, *HEADERS)]
    key = "\0".join([*texts, version, *flags, _processor()])
    name = f"{source.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    for folder in _folders():
        path = folder / name
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not _is_ours(folder):
                continue
            if path.exists():
                return path
            with atomic_file(path) as temporary:
                temporary.touch()  # OSError where the folder is not writable
                paths = [f"-I{SOURCE.parent}", str(source), "-o", str(temporary)]
                command = [compiler, *flags, *paths, "-lm"]
                subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        except OSError as error:  # e.g. not writable
            logger.debug("no kernels in %s: %s", folder, error)
            continue
        return path
    raise Unavailable("no writable folder for the compiled kernels: set XDG_CACHE_HOME")


def _folders() -> list[Path]:
    """Cache folders: the user's, else a private folder for temporary files."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        cache = Path(base) if base else Path.home() / ".cache"
    except RuntimeError:  # no home folder
        return [Path(tempfile.mkdtemp(prefix="ludus-"))]
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return [cache / "ludus" / "native", Path(tempfile.gettempdir()) / f"ludus-native-{user}"]


def _is_ours(folder: Path) -> bool:
    """True if no other user can write to the folder."""
    status = folder.stat()
    owned = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    return owned and not status.st_mode & 0o022


def _processor() -> str:
    """Processor features, on which `-march=native` depends; machines may share a cache."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
