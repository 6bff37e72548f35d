"""The machine that this process runs on."""

from __future__ import annotations

import os
from pathlib import Path


def num_cores() -> int:
    """Returns the cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def machine_memory() -> int:
    """Returns the bytes of memory of the machine, or of the container if its limit is lower."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return memory
    return min(memory, int(limit)) if limit.isdigit() else memory
