"""Runs inside the jail: nvcc, on what lies in the working folder.

The source of this file becomes the module `ludus_nvcc` of the jail, so it imports the standard
library only. A program reads `kernel.cu` and `options.json` (nvcc's path, then its options), prints
nvcc's log, writes `kernel.cubin`, and ends with code 0, FAILED, or SIGNALLED plus a signal.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import NoReturn

MODULE = "ludus_nvcc"
FAILED, ABSENT, SIGNALLED = 100, 101, 128
SOURCE, OPTIONS, CUBIN = "kernel.cu", "options.json", "kernel.cubin"


def run() -> NoReturn:
    """Compile; see the head of this file."""
    nvcc, *options = json.loads(Path(OPTIONS).read_text(encoding="utf-8"))
    os.mkdir("kept")
    command = [nvcc, *options, "--keep", "--keep-dir", "kept", "-c", SOURCE, "-o", "kept/kernel.o"]
    try:
        done = subprocess.run(command, stdout=1, stderr=1, check=False)
    except OSError as error:
        os.write(2, f"{nvcc}: {error.strerror}".encode())
        os._exit(ABSENT)
    if done.returncode:
        os._exit(SIGNALLED - done.returncode if done.returncode < 0 else FAILED)
    found = sorted(Path("kept").glob("*.cubin"))
    if found:
        shutil.copy(found[0], CUBIN)
    os._exit(0)
