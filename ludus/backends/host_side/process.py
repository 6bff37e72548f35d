"""The process of a host: `python -m MODULE [--check] JOB.json`, in its environment.

The job has the host's settings by dotted key; `--check` composes them with the host's
configuration, prints one line for each fault, and ends. The process ends when its standard input
closes, which is when `ludus train` has ended in any way.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from ludus.core.errors import did_you_mean

CHECKED = 3
"""Exit code of `--check` where there are faults."""

Job = dict[str, Any]


def set_keys(
    config: Any, settings: Mapping[str, Any], host: str, is_open: Callable[[str], bool]
) -> list[str]:
    """Set dotted keys of an OmegaConf tree; returns a line for each that it refuses.

    Args:
        is_open: True for a key that may be added; so may one with a `+`.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    known = list(_keys(OmegaConf.to_container(config, resolve=False)))
    faults = []
    for key, value in settings.items():
        name, added = key.removeprefix("+"), key.startswith("+") or is_open(key)
        try:
            if added:
                merge = OmegaConf.select(config, name) is not None
                OmegaConf.update(config, name, value, merge=merge, force_add=True)
            else:
                config.merge_with(_nested(name, value))
        except OmegaConfBaseException as error:
            text = str(error).splitlines()[0]
            absent = "not in struct" in text or "' not in '" in text
            near = did_you_mean(name, known) if absent else f": {text}"
            faults.append(f"{name}: {host}'s configuration refuses it{near}")
    return faults


def _nested(name: str, value: Any) -> dict[str, Any]:
    for part in reversed(name.split(".")):
        value = {part: value}
    return dict(value)


def _keys(tree: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(tree, dict):
        for name, inner in tree.items():
            yield f"{prefix}{name}"
            yield from _keys(inner, f"{prefix}{name}.")


def device_faults(job: Job, host: str) -> list[str]:
    """The faults of `model.device` on this machine."""
    import torch

    on_cpu, gpu = job["device"] == "cpu", torch.cuda.is_available()
    if on_cpu and gpu:
        return [f"model.device: cpu, but {host}'s environment has a GPU, and uses it: set cuda"]
    if not on_cpu and not gpu:
        return [f"model.device: {job['device']}, but {host}'s environment has no CUDA device"]
    return []


def _end_with_parent() -> None:
    """End this process in order when its standard input closes."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="parent").start()


def run_process(check: Callable[[Job], list[str]], train: Callable[[Job], None]) -> None:
    """Check or run the job of the command line."""
    *options, path = sys.argv[1:]
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    if "--check" in options:
        with redirect_stdout(sys.stderr):  # hosts log to it
            faults = check(job)
        if faults:
            print("\n".join(faults))
            raise SystemExit(CHECKED)
        return
    _end_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    train(job)
