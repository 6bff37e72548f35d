"""Runs inside vLLM's processes: entry point, and a worker extension that loads weights.

It does not import ludus, since vLLM may have its own environment. The folder of this file is on
that environment's path. `vllm_server` starts it as a program and passes `Worker` to vLLM as the
worker extension class.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import runpy
import signal
import sys
import threading
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1


def content_hash(path: str | Path) -> str:
    """Returns the hash of a weights file (names, types, shapes, bytes), 32 hexadecimal digits."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def difference(expected: dict[str, str], given: dict[str, str]) -> str | None:
    """Returns the first difference of two layouts (name to type and shape), None if equal."""
    for name in sorted(expected.keys() | given.keys()):
        if name not in given:
            return f"{name} is missing"
        if name not in expected:
            return f"{name} is unknown to the model"
        if expected[name] != given[name]:
            return f"{name} is {given[name]}; the model has {expected[name]}"
    return None


def layout(path: str | Path) -> dict[str, str]:
    """Returns the layout of a weights file: name to type and shape."""
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: f"{part.get_dtype()}{part.get_shape()}" for name, part in parts.items()}


class Worker:
    """Extension of vLLM's worker."""

    model_runner: Any
    vllm_config: Any
    _ludus_layout: dict[str, str] | None = None

    def ludus_load(self, path: str, expected_hash: str) -> dict[str, Any]:
        """Load a weights file, or refuse it and leave the model unchanged.

        Returns {"refused": reason} or {"hash": content hash}.
        """
        if self._ludus_layout is None:
            folder = Path(self.vllm_config.model_config.model)
            self._ludus_layout = layout(folder / "model.safetensors")
        if (actual_hash := content_hash(path)) != expected_hash:
            return {"refused": f"the content hash is {actual_hash}, not {expected_hash}"}
        if mismatch := difference(self._ludus_layout, layout(path)):
            return {"refused": mismatch}
        from safetensors.torch import load_file

        self.model_runner.get_model().load_weights(iter(load_file(path).items()))
        return {"hash": actual_hash}


def keep_weights_plain() -> None:
    """On a CPU, make vLLM compute with the loaded tensors directly.

    By default it packs them at startup and does not repack weights that are loaded later. With tied
    embeddings, new weights would then reach the input embeddings but not the output layer.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm import _custom_ops
        from vllm.model_executor.layers import utils

        _custom_ops._supports_onednn = False
        utils.check_cpu_sgl_kernel = lambda *args, **options: False


def end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with_pipe() -> None:
    """Wait until standard input is closed, then kill this process group."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with_pipe, daemon=True).start()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
elif __name__ == "ludus_vllm_side":  # imported by one of vLLM's workers
    end_with_parent()
    keep_weights_plain()
