"""Runs inside the jail: a reference in torch. Its inputs and outputs of each seed go out as bytes.

The source of this file becomes the module `ludus_reference` of the jail. A program reads
`reference.py` and `seeds.json`, and writes `trials.bin`: a line of JSON, then the tensors' bytes.
"""

from __future__ import annotations

import inspect
import json
import os
import types
from typing import Any, NoReturn

MODULE = "ludus_reference"
FAILED = 60
DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "int16", "int8", "uint8",
          "bool")  # fmt: skip


def _end(text: str) -> NoReturn:
    os.write(2, text.replace("\n", " ").encode("utf-8", "replace")[:2000])
    os._exit(FAILED)


def _bytes(tensor: Any) -> bytes:
    import torch

    tensor = tensor.detach().contiguous().cpu()
    kept: bytes = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return kept


def _trial(module: Any, seed: int) -> tuple[list[tuple[str, Any]], dict[str, Any], Any, Any]:
    """Inputs and parameters by name, numbers by name, the output, and that of a second call."""
    import torch

    torch.manual_seed(seed)
    initial = module.get_init_inputs() if hasattr(module, "get_init_inputs") else []
    torch.manual_seed(seed)
    model = module.Model(**initial) if isinstance(initial, dict) else module.Model(*initial)
    model.eval()
    given = list(module.get_inputs())
    names = list(inspect.signature(model.forward).parameters)
    names = [names[i] if i < len(names) else f"input{i}" for i in range(len(given))]
    tensors: list[tuple[str, Any]] = []
    numbers: dict[str, Any] = {}
    for name, value in zip(names, given, strict=True):
        if isinstance(value, torch.Tensor):
            tensors.append((name, value.clone()))
        elif isinstance(value, bool | int | float):
            numbers[name] = value
        else:
            _end(f"the input {name} is a {type(value).__name__}: tensors and numbers are possible")
    for name, value in model.state_dict().items():
        tensors.append((name.replace(".", "_"), value.clone()))
    with torch.no_grad():
        first = model(*[v.clone() if isinstance(v, torch.Tensor) else v for v in given])
        again = model(*[v.clone() if isinstance(v, torch.Tensor) else v for v in given])
    return tensors, numbers, first, again


def run() -> NoReturn:
    """Run the reference; see the head of this file."""
    import torch

    module: Any = types.ModuleType("reference")
    with open("reference.py", encoding="utf-8") as file:
        source = file.read()
    with open("seeds.json", encoding="utf-8") as file:
        seeds = json.load(file)
    heads: list[Any] = []
    pieces: list[bytes] = []
    try:
        exec(compile(source, "reference.py", "exec"), module.__dict__)
        for seed in seeds:
            tensors, numbers, out, again = _trial(module, seed)
            if not isinstance(out, torch.Tensor):
                _end(f"the output is a {type(out).__name__}: one tensor is possible")
            if out.shape != again.shape or not torch.allclose(
                out.double(), again.double(), rtol=1e-6, atol=1e-7, equal_nan=True
            ):
                _end("two calls with the same inputs give different outputs")
            head = []
            for name, value in [*tensors, ("out", out)]:
                kind = str(value.dtype).removeprefix("torch.")
                if kind not in DTYPES:
                    _end(f"{name} is {kind}: {', '.join(DTYPES)} are possible")
                data = _bytes(value)
                head.append([name, list(value.shape), kind, len(data)])
                pieces.append(data)
            heads.append({"tensors": head, "numbers": numbers})
    except BaseException as error:
        _end(f"{type(error).__name__}: {error}")
    with open("trials.bin", "wb") as file:
        file.write(json.dumps(heads).encode() + b"\n")
        for piece in pieces:
            file.write(piece)
    os._exit(0)


if __name__ == MODULE:  # the first call of torch in a process is slow: it happens in the zygote
    import torch

    torch.set_num_threads(1)
    torch.nn.functional.gelu(torch.randn(8, 8) @ torch.randn(8, 8)).sum().item()
    torch.nn.functional.conv2d(torch.randn(1, 1, 8, 8), torch.randn(1, 1, 3, 3))
    torch.nn.Linear(2, 2)(torch.randn(1, 2))
