"""Outputs against the reference's: tolerances, and references with which no test is possible."""

from __future__ import annotations

import json
import keyword
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from ludus.core.errors import DataError
from ludus.kernels.verify.inside import DTYPES

Array = npt.NDArray[Any]

TOLERANCE = {"float64": 1e-4, "float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-2}
"""Absolute, and relative to the reference, as in KernelBench; other types must be equal."""
TINY = 0.01
MAX_HEADER = 1_000_000
MAX_NUMBER = 2.0**63
"""Of the numbers among the inputs."""
_POISON = {  # of the trials 0, 2, ... and 1, 3, ...
    0: b"\xff", 1: b"\x71",
}  # fmt: skip
_RAW = {"bfloat16": "uint16", "bool": "uint8"}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a trial; `data` in the machine's byte order."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    data: bytes

    @property
    def values(self) -> Array:
        """The values, flat, as float64 or as integers."""
        return values_of(self.data, self.dtype)


@dataclass(frozen=True, slots=True)
class Trial:
    """Inputs (with the parameters) and the output of a reference for one seed."""

    inputs: tuple[Tensor, ...]
    numbers: Mapping[str, int | float]
    out: Tensor


@dataclass(frozen=True, slots=True)
class Comparison:
    """`problem`: what is wrong, or empty. `max_error`: the largest absolute difference."""

    problem: str
    max_error: float


def values_of(data: bytes, dtype: str) -> Array:
    """The values of raw bytes."""
    raw: Array = np.frombuffer(data, dtype=_RAW.get(dtype, dtype))
    if dtype == "bfloat16":
        return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return raw.astype(np.float64) if dtype.startswith("float") else raw.astype(np.int64)


def read_trials(data: bytes, number: int) -> list[Trial]:
    """The trials that the reference's process wrote, which is untrusted.

    Errors: DataError for bytes that are not that.
    """
    head, _, body = data.partition(b"\n")
    try:
        if len(head) > MAX_HEADER:
            raise ValueError("too long")
        trials, at = [], 0
        for item in json.loads(head):
            tensors = []
            for name, shape, dtype, size in item["tensors"]:
                if not (isinstance(name, str) and name.isidentifier() and len(name) < 60) or (
                    keyword.iskeyword(name)
                ):
                    raise ValueError(f"the name {name!r:.40} is not possible")
                if dtype not in DTYPES:
                    raise ValueError(f"{name} is of type {dtype!r:.40}, not {', '.join(DTYPES)}")
                if not all(type(side) is int and side > 0 for side in shape):
                    raise ValueError(f"{name} has the shape {shape!r:.60}")
                wanted = math.prod(shape)
                wanted *= np.dtype(_RAW.get(dtype, dtype)).itemsize
                if size != wanted or size < 0 or at + size > len(body) or size == 0:
                    raise ValueError(f"{name} has {size} bytes")
                tensors.append(Tensor(name, tuple(shape), dtype, body[at : at + size]))
                at += size
            numbers = {str(key): value for key, value in item["numbers"].items()}
            for key, value in numbers.items():
                if type(value) not in (bool, int, float) or not abs(value) <= MAX_NUMBER:
                    raise ValueError(f"the number {key:.40} is {value!r:.40}")
            names = [tensor.name for tensor in tensors] + [*numbers]
            if len({*names}) != len(names):
                raise ValueError("two inputs have the same name")
            trials.append(Trial(tuple(tensors[:-1]), numbers, tensors[-1]))
        layouts = {
            tuple((t.name, t.shape, t.dtype) for t in (*trial.inputs, trial.out))
            for trial in trials
        }
        if len(trials) != number or len(layouts) != 1:
            raise ValueError("the shapes change from one seed to another")
    except (
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        RecursionError,
        OverflowError,
        AttributeError,
    ) as error:
        raise DataError(f"the reference: {str(error)[:200]}") from None
    return trials


def compare(got: bytes, trial: Trial, number: int) -> Comparison:
    """Compare an output with the reference's. `number` of the trial tells what was there before."""
    wanted, dtype = trial.out.values, trial.out.dtype
    if len(got) != len(trial.out.data):
        return Comparison("the output is not complete", float("inf"))
    found = values_of(got, dtype)
    if not dtype.startswith(("float", "bfloat")):
        wrong = found != wanted
        error = float(np.abs(found - wanted).max())
        return Comparison(_told(found, wanted, wrong, got, trial, number), error)
    tolerance = TOLERANCE[dtype]
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.abs(found - wanted)
        close = difference <= tolerance + tolerance * np.abs(wanted)
    special = ~np.isfinite(wanted)
    same = np.where(np.isnan(wanted), np.isnan(found), found == wanted)
    wrong = np.where(special, ~same, ~close)
    finite = difference[np.isfinite(difference)]
    error = float(finite.max()) if finite.size else float("inf")
    return Comparison(_told(found, wanted, wrong, got, trial, number), error)


def _told(found: Array, wanted: Array, wrong: Array, got: bytes, trial: Trial, number: int) -> str:
    count = int(np.count_nonzero(wrong))
    if not count:
        return ""
    first = int(np.argmax(wrong))
    place = [int(i) for i in np.unravel_index(first, trial.out.shape)] if trial.out.shape else []
    size = len(got) // max(len(found), 1)
    item = got[first * size : (first + 1) * size]
    if item == _POISON[number % 2] * size:
        return f"out{place} was not written ({count:,} of {len(found):,} are wrong)"
    value = f"{found[first]:.6g}"
    hint = ""
    if value == "nan" and number % 2 == 0:
        hint = "; out and scratch hold no zeros at the start"
    return (
        f"out{place} is {value}, and must be {wanted[first]:.6g} ({count:,} of {len(found):,} are "
        f"wrong){hint}"
    )


def unfit(trials: Sequence[Trial]) -> str:
    """The reason why a reference cannot test a kernel, or an empty text.

    The outputs of most pairs of seeds must differ by more than the tolerance: otherwise an output
    that is written down passes.
    """
    if len(trials) < 2:
        raise ValueError("two trials at least")
    values = [trial.out.values for trial in trials]
    if all(not np.isfinite(v).any() for v in values):
        return "the output has no finite value"
    if all(np.abs(v[np.isfinite(v)]).max(initial=0) <= TINY for v in values):
        return f"all of the output lies within {TINY} of 0: a kernel that writes zeros would pass"
    if all(v.size > 1 and (v == v[0]).all() for v in values):
        return "the output is constant: all of its elements are equal"
    if not any(trial.inputs for trial in trials):
        return "it has no inputs"
    pairs = list(combinations(trials, 2))
    alike = sum(not compare(earlier.out.data, later, 0).problem for earlier, later in pairs)
    if alike * 3 > len(pairs):  # a single number may be the same for two seeds by chance
        return "the output does not depend on the inputs: that of another seed would pass"
    for tensor in trials[0].inputs:
        if (tensor.dtype, len(tensor.data)) == (trials[0].out.dtype, len(trials[0].out.data)):
            position = trials[0].inputs.index(tensor)
            copies = (compare(t.inputs[position].data, t, 0).problem == "" for t in trials)
            if all(copies):
                return f"the output equals the input {tensor.name}"
    return ""
