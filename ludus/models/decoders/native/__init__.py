"""Small C kernels, compiled by the system's C compiler when they are first needed.

The library is kept in the user's cache folder under a name made of its sources, the compiler and
its options, and moved there in one step: several processes may build it at once. Without a
compiler, or with LUDUS_NATIVE=0 in the environment, there is none, and callers do the same work in
torch.
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
HEADER = Path(__file__).with_name("lanes.h")
FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
VARIANTS = (("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-march=native",), ())
"""Options tried in turn: not every compiler knows its machine or has OpenMP."""


class Unavailable(Exception):
    """There is no native library here; the message says why."""


@functools.cache
def library(half: bool = False, source: Path = SOURCE) -> ctypes.CDLL:
    """The compiled kernels of a source, in float32 or in bfloat16. Errors: Unavailable."""
    if os.environ.get("LUDUS_NATIVE", "1") == "0":
        raise Unavailable("LUDUS_NATIVE=0 is set")
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise Unavailable("there is no C compiler (cc) on the PATH")
    messages = []
    flags = (*FLAGS, "-DHALF") if half else FLAGS
    for options in VARIANTS:
        try:
            return ctypes.CDLL(str(_built(source, compiler, (*flags, *options))))
        except (OSError, subprocess.SubprocessError) as error:
            output = getattr(error, "stderr", None)
            messages.append(output.strip() if isinstance(output, str) and output else str(error))
    raise Unavailable(f"{compiler} could not build the kernels: {messages[-1][-500:]}")


def _built(source: Path, compiler: str, flags: tuple[str, ...]) -> Path:
    """The library's path, built if it is not there yet."""
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    key = "\0".join([source.read_text(), HEADER.read_text(), version, *flags, _processor()])
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
                command = [
                    compiler,
                    *flags,
                    f"-I{HEADER.parent}",
                    str(source),
                    "-o",
                    str(temporary),
                    "-lm",
                ]
                subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        except OSError as error:  # a folder that cannot be written
            logger.debug("no kernels in %s: %s", folder, error)
            continue
        return path
    raise Unavailable("no folder to keep the compiled kernels in: set XDG_CACHE_HOME")


def _folders() -> list[Path]:
    """Where libraries are kept: the user's cache, else one in the folder for temporary files."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        cache = Path(base) if base else Path.home() / ".cache"
    except RuntimeError:  # no home
        return [Path(tempfile.mkdtemp(prefix="ludus-"))]
    return [cache / "ludus" / "native", Path(tempfile.gettempdir()) / f"ludus-native-{_user()}"]


def _is_ours(folder: Path) -> bool:
    """Whether nobody else can have put a library there."""
    status = folder.stat()
    mine = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    return mine and not status.st_mode & 0o022


def _user() -> str:
    return str(os.getuid()) if hasattr(os, "getuid") else "user"


def _processor() -> str:
    """What `-march=native` depends on: a cache may be shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
