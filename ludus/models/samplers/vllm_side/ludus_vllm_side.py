"""What runs inside vLLM's own processes: their entrance, and the loading of new weights.

It imports nothing of ludus, for vLLM may live in an environment of its own; the folder of this file
is put on that environment's path. `vllm_server` starts it as a program, and names `Worker` to vLLM
as an extension of its workers.
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
    """The content of a weights file: names, types, shapes and bytes, as 32 hexadecimal digits."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def difference(expected: dict[str, str], given: dict[str, str]) -> str | None:
    """The first difference of two layouts (name to type and shape); None where they are equal."""
    for name in sorted(expected.keys() | given.keys()):
        if name not in given:
            return f"{name} is missing"
        if name not in expected:
            return f"{name} is unknown to the model"
        if expected[name] != given[name]:
            return f"{name} is {given[name]}; the model has {expected[name]}"
    return None


def layout(path: str | Path) -> dict[str, str]:
    """Name to type and shape, of a weights file."""
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: f"{part.get_dtype()}{part.get_shape()}" for name, part in parts.items()}


class Worker:
    """What vLLM's worker gains."""

    model_runner: Any
    vllm_config: Any
    _ludus_layout: dict[str, str] | None = None

    def ludus_load(self, path: str, expected_hash: str) -> dict[str, Any]:
        """Load a weights file, or refuse it and leave the model as it is.

        Returns {"refused": reason} or {"hash": content hash}.
        """
        if self._ludus_layout is None:
            folder = Path(self.vllm_config.model_config.model)
            self._ludus_layout = layout(folder / "model.safetensors")
        if (found := content_hash(path)) != expected_hash:
            return {"refused": f"the content hash is {found}, not {expected_hash}"}
        if wrong := difference(self._ludus_layout, layout(path)):
            return {"refused": wrong}
        from safetensors.torch import load_file

        self.model_runner.get_model().load_weights(iter(load_file(path).items()))
        return {"hash": found}


def keep_weights_plain() -> None:
    """On a CPU, have vLLM compute with the very tensors that it loaded.

    It would pack them when it starts, and not pack what is loaded later: where input and output
    embeddings are tied, new weights would then reach the one and not the other.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm import _custom_ops
        from vllm.model_executor.layers import utils

        _custom_ops._supports_onednn = False
        utils.check_cpu_sgl_kernel = lambda *args, **options: False


def end_with_parent() -> None:
    """Have the kernel end this process when the one that started it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with_pipe() -> None:
    """Wait until nobody holds the other end of standard input; then end all of this group."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with_pipe, daemon=True).start()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
elif __name__ == "ludus_vllm_side":  # imported by one of vLLM's workers
    end_with_parent()
    keep_weights_plain()
