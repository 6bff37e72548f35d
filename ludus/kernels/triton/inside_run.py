"""Runs inside the jail: kernels in Triton's interpreter, program after program, in NumPy.

The source of this file becomes the module `ludus_triton` of the jail; the zygote has loaded Triton
as an interpreter. A program reads `source.txt` (which ludus has read and allowed), `plan.json` and
`inputs.bin`, and writes `report.json`; after the last trial also `outputs.bin`. There is no torch
in this jail, and no output of a reference.
"""

from __future__ import annotations

import json
import linecache
import os
import random
import sys
import traceback
import types
import warnings
from typing import Any, NoReturn

MODULE, FILE = "ludus_triton", "kernel.py"
DONE, STOPPED = 0, 40
POISON = (b"\xff", b"\x71")
ALIGNMENT = 256


class Outside(Exception):
    """An access that no launch may make."""


class Memory:
    """Buffers of a launch: `roles` are 0 for inputs, 1 for the output, 2 for scratch."""

    def __init__(self, buffers: list[list[Any]]) -> None:
        import numpy as np

        self.names = [item[0] for item in buffers]
        self.roles = np.array([item[1] for item in buffers])
        self.dtypes = [item[2] for item in buffers]
        self.arrays, starts = [], []
        for _, _, _, size in buffers:
            block = np.zeros(size + 2 * ALIGNMENT, np.uint8)
            skip = -block.ctypes.data % ALIGNMENT
            self.arrays.append(block[skip : skip + size])
            starts.append(block.ctypes.data + skip)
        self.starts = np.array(starts, np.int64)
        self.sizes = np.array([item[3] for item in buffers], np.int64)
        self.order = np.argsort(self.starts)

    def check(self, pointers: Any, mask: Any, width: int, writes: bool) -> None:
        """Raise Outside for an access beyond the buffers, and for one that changes an input."""
        import numpy as np

        addresses = np.broadcast_to(np.asarray(pointers), np.shape(mask) or (1,))
        addresses = addresses[np.broadcast_to(np.asarray(mask, bool), addresses.shape)]
        if addresses.size == 0:
            return
        addresses = addresses.astype(np.int64)
        starts = self.starts[self.order]
        place = np.searchsorted(starts, addresses, "right") - 1
        index = self.order[np.maximum(place, 0)]
        offset = addresses - self.starts[index]
        bad = (place < 0) | (offset + width > self.sizes[index])
        what = "writes" if writes else "reads"
        if bad.any():
            first = int(np.argmax(bad))
            item, name = int(offset[first]) // width, self.names[int(index[first])]
            end = int(self.sizes[index[first]]) // width
            raise Outside(f"it {what} item {item} of `{name}`, which has {end}")
        if writes and (self.roles[index] == 0).any():
            first = int(np.argmax(self.roles[index] == 0))
            name = self.names[int(index[first])]
            raise Outside(f"the input `{name}` is changed: inputs may be read only")


class Pointer:
    """An object that Triton takes for a tensor."""

    def __init__(self, address: int, dtype: str) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address


def load_module(source: str) -> Any:
    """The module of a source; Triton reads its text again, from here."""
    lines = source.splitlines(True)
    linecache.cache[FILE] = (len(source), None, lines, FILE)
    module: Any = types.ModuleType("kernel")
    sys.modules["kernel"] = module
    module.__file__ = FILE
    module.__loader__ = object()  # for a file that is not on the disk
    exec(compile(source, FILE, "exec"), module.__dict__)
    return module


def guard(memory: Memory) -> None:
    """Let each access of the interpreter be checked."""
    import numpy as np
    from triton.runtime import interpreter

    def width(pointers: Any) -> int:
        return max(int(pointers.get_element_ty().primitive_bitwidth) // 8, 1)

    kind = interpreter.InterpreterBuilder

    def wrap(name: str, at_pointer: int, at_mask: int | None, writes: bool) -> None:
        inner = getattr(kind, name)

        def checked(self: Any, *given: Any, **named: Any) -> Any:
            pointers, mask = given[at_pointer], np.ones(np.shape(given[at_pointer].data), bool)
            if at_mask is not None:
                mask = given[at_mask].data
                if mask.dtype != np.bool_:  # the compiler converts it, the interpreter does not
                    mask = mask.astype(bool)
                    handle = interpreter.TensorHandle(mask, interpreter.tl.int1)
                    given = (*given[:at_mask], handle, *given[at_mask + 1 :])
            memory.check(pointers.data, mask, width(pointers), writes)
            return inner(self, *given, **named)

        setattr(kind, name, checked)

    wrap("create_masked_load", 0, 1, False)
    wrap("create_masked_store", 0, 2, True)
    wrap("create_atomic_rmw", 1, 3, True)
    wrap("create_atomic_cas", 0, None, True)


def launch(module: Any, step: dict[str, Any], memory: Memory, shuffle: random.Random | str) -> None:
    """Run the programs of a launch."""
    from triton.runtime import interpreter

    function = getattr(module, step["kernel"])
    work = function.rewrite()
    scope = interpreter._patch_lang(work)
    try:
        arguments = {}
        for name, (kind, value) in step["arguments"].items():
            if kind == "buffer":
                address = int(memory.starts[value])
                value = interpreter._implicit_cvt(Pointer(address, memory.dtypes[value]))
            elif kind == "number":
                value = interpreter._implicit_cvt(value)
            arguments[name] = value
        x, y, z = step["grid"]
        interpreter.interpreter_builder.set_grid_dim(x, y, z)
        for number in programs(x * y * z, shuffle):
            place = number // (y * z), number // z % y, number % z
            interpreter.interpreter_builder.set_grid_idx(*place)
            work(**arguments)
    finally:
        scope.restore()


def programs(total: int, shuffle: random.Random | str) -> Any:
    """Numbers of the programs in their order."""
    if isinstance(shuffle, str):
        return range(total) if shuffle == "forwards" else range(total - 1, -1, -1)
    if total > 1_000_000:
        return range(total)
    numbers = list(range(total))
    shuffle.shuffle(numbers)
    return numbers


def _end(code: int, **report: Any) -> NoReturn:
    with open("report.json", "w", encoding="utf-8") as file:
        json.dump(report, file)
    os._exit(code)


def _line(error: BaseException) -> int:
    frames = traceback.extract_tb(error.__traceback__)
    found = [frame.lineno for frame in frames if frame.filename == FILE]
    return int(found[-1] or 0) if found else 0


def _told(error: BaseException, trial: int, number: int) -> NoReturn:
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    kinds: dict[type[BaseException], str] = {
        Outside: "bounds", MemoryError: "memory", AssertionError: "assert",
        NotImplementedError: "unsupported",
    }  # fmt: skip
    kind = kinds.get(type(cause), "error")
    text = str(cause) if isinstance(cause, Outside) else f"{type(cause).__name__}: {cause}"
    line = _line(cause) or _line(error)
    _end(STOPPED, kind=kind, line=line, trial=trial, launch=number, text=text[:500])


def run() -> NoReturn:
    """Run all trials; see the head of this file."""
    import numpy as np

    os.environ["TRITON_INTERPRET"] = "1"
    quiet = os.open("/dev/null", os.O_WRONLY)
    os.dup2(quiet, 1)
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    with open("source.txt", encoding="utf-8") as file:
        source = file.read()
    with open("plan.json", encoding="utf-8") as file:
        plan = json.load(file)
    number, trial = -1, 0
    outputs: list[bytes] = []
    try:
        module = load_module(source)
        memory = Memory(plan["buffers"])
        guard(memory)
        inputs = np.fromfile("inputs.bin", np.uint8)
        at = 0
        for trial in range(plan["trials"]):
            for array, role in zip(memory.arrays, memory.roles, strict=True):
                if role == 0:
                    array[:] = inputs[at : at + array.size]
                    at += array.size
                else:
                    array[:] = POISON[trial % 2][0]
            order: Any = random.Random(f"{plan['seed']}:{trial}")
            if trial < 2:
                order = ("forwards", "backwards")[trial]
            number = -1
            for step in plan["launches"]:
                number += 1
                launch(module, step, memory, order)
            [out] = np.flatnonzero(memory.roles == 1)
            outputs.append(memory.arrays[out].tobytes())
    except BaseException as error:
        _told(error, trial, number)
    with open("outputs.bin", "wb") as file:
        for output in outputs:
            file.write(output)
    _end(DONE, kind="done", line=0, trial=plan["trials"], launch=0, text="")


WARM_UP = """import triton
import triton.language as tl
@triton.jit
def warm_up(a, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(a + i, mask=i < n, other=0.0)
    tl.store(out + i, x / (tl.sum(x, 0) + tl.max(x, 0) + tl.exp(x)), mask=i < n)
"""


def prepare() -> None:
    """Load Triton as an interpreter, and run once."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    buffers = [["a", 0, "float32", 256], ["out", 1, "float32", 256]]
    arguments = {"a": ["buffer", 0], "out": ["buffer", 1], "n": ["number", 64],
                 "BLOCK": ["constant", 64]}  # fmt: skip
    step = {"kernel": "warm_up", "grid": [1, 1, 1], "arguments": arguments}
    launch(load_module(WARM_UP), step, Memory(buffers), "forwards")
    del sys.modules["kernel"]


if __name__ == MODULE:
    prepare()
