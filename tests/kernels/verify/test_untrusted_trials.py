"""The bytes of a reference's process are untrusted: what is no trial is a DataError."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from ludus.core.errors import DataError
from ludus.kernels.verify.compare import read_trials


def written(
    name: Any = "a", shape: Any = (4,), dtype: Any = "float32", out: Any = "float32",
    numbers: Any = None,
) -> bytes:  # fmt: skip
    tensors = [[name, shape, dtype, 16], ["out", [4], out, 16]]
    head = [{"tensors": tensors, "numbers": {} if numbers is None else numbers}]
    return json.dumps(head).encode() + b"\n" + struct.pack("8f", *range(8))


def test_a_trial_is_read() -> None:
    (trial,) = read_trials(written(numbers={"k": 2, "flag": True}), 1)
    assert trial.inputs[0].shape == (4,)
    assert trial.numbers == {"k": 2, "flag": True}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"dtype": "S4"}, "is of type 'S4'"),
        ({"dtype": "O"}, "is of type 'O'"),
        ({"dtype": "f4,f4", "shape": [2]}, "is of type"),
        ({"dtype": ["x"]}, "is of type"),
        ({"out": "complex32"}, "is of type"),
        ({"shape": [-2, -2]}, "has the shape"),
        ({"shape": [4.5]}, "has the shape"),
        ({"shape": [True]}, "has the shape"),
        ({"shape": 4}, "the reference"),
        ({"name": "for"}, "the name 'for'"),
        ({"name": "out"}, "the same name"),
        ({"numbers": {"k": "abc"}}, "the number k is 'abc'"),
        ({"numbers": {"k": [1]}}, "the number k"),
        ({"numbers": {"k": float("nan")}}, "the number k is nan"),
        ({"numbers": {"k": float("inf")}}, "the number k is inf"),
        ({"numbers": {"k": 10**400}}, "the number k"),
        ({"numbers": [1]}, "the reference"),
    ],
)
def test_what_is_no_trial_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(DataError, match=told):
        read_trials(written(**changes), 1)
