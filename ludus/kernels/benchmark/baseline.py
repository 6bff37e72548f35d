"""The process that times a reference: `python -m ludus.kernels.benchmark.baseline <socket>`.

A reference is Python, and runs here without a jail: see `Benchmarker`. It is timed by the same
rules as kernels: warm-ups, the L2 cache flushed before each run, CUDA events, all streams waited
for. The first calls of torch.compile are warm-ups too.
"""

from __future__ import annotations

import importlib
import socket
import sys
import time
import types
from collections.abc import Callable, Mapping
from typing import Any

from ludus.sandbox.inside.frames import receive_frame, send_frame


def timed(torch: Any, work: Callable[[], Any], job: Mapping[str, Any]) -> list[float]:
    """Milliseconds of each timed run."""
    flush = torch.empty(job["flush"], dtype=torch.int8, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for number in range(-job["warm"], job["timed"]):
        flush.fill_(number & 0x7F)
        torch.cuda.synchronize()
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if number >= 0:
            found.append(begin.elapsed_time(end))
    return found


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """Times of a reference, eager and compiled; no times of a compiler that fails."""
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return {"kind": "error", "text": "this torch sees no CUDA device"}
    module: Any = types.ModuleType("reference")
    sys.modules["reference"] = module  # for torch.compile, which looks for it
    exec(compile(job["reference"], "reference.py", "exec"), module.__dict__)
    torch.manual_seed(job["seed"])
    initial = module.get_init_inputs() if hasattr(module, "get_init_inputs") else []
    model = module.Model(**initial) if isinstance(initial, dict) else module.Model(*initial)
    model = model.eval().cuda()
    inputs = [v.cuda() if isinstance(v, torch.Tensor) else v for v in module.get_inputs()]
    with torch.no_grad():
        eager = timed(torch, lambda: model(*inputs), job)
        compiled, reason = [], ""
        try:
            quick = torch.compile(model)
            began = time.perf_counter()
            quick(*inputs)
            torch.cuda.synchronize()
            reason = f"compiled in {time.perf_counter() - began:.1f} s"
            compiled = timed(torch, lambda: quick(*inputs), job)
        except Exception as error:
            reason = f"torch.compile: {type(error).__name__}: {error}"[:300]
    return {"kind": "done", "eager": eager, "compiled": compiled, "reason": reason}


def serve(sock: socket.socket) -> None:
    """Answer until the socket ends."""
    while (frame := receive_frame(sock)) is not None:
        try:
            answer = run(frame[0])
        except Exception as error:
            answer = {"kind": "error", "text": f"{type(error).__name__}: {error}"[:500]}
        send_frame(sock, answer)
        if answer["kind"] == "error":
            return


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
