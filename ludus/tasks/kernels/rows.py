"""The rows of KernelBench and of the AI CUDA Engineer Archive, as they are published.

    KernelBench                code, level, name, problem_id
    AI-CUDA-Engineer-Archive   Op_Name, Level_ID, Task_ID, Kernel_Name, CUDA_Code, the reference as
                               PyTorch_Code_Module and _Functional, and claims: Correct, Max_Diff,
                               Error, runtimes, speed-ups

What the archive says of its kernels is kept as `claims`: some of its kernels read the reference's
output from memory, and claimed speed-ups of 150 were slower than the reference. Nothing in ludus
computes a reward from a claim.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ludus.core.errors import did_you_mean
from ludus.tasks.kernels.difficulty import parse, tier_of
from ludus.tasks.readers import check_unicode

Row = Mapping[str, Any]

CLAIMS = {
    "correct": "Correct",
    "max_diff": "Max_Diff",
    "error": "Error",
    "runtime": "CUDA_Runtime",
    "runtime_native": "PyTorch_Native_Runtime",
    "runtime_compile": "PyTorch_Compile_Runtime",
    "speedup_native": "CUDA_Speedup_Native",
    "speedup_compile": "CUDA_Speedup_Compile",
}
"""Key in `claims`: the archive's column."""

KERNELBENCH_COLUMNS = ("code", "level", "name", "problem_id")
ARCHIVE_COLUMNS = (
    "Op_Name", "Level_ID", "Task_ID", "PyTorch_Code_Module", "PyTorch_Code_Functional",
)  # fmt: skip
"""Of a problem."""

KERNEL_COLUMNS = ("Kernel_Name", "CUDA_Code", *CLAIMS.values())
"""Of the archive's kernel for it."""

_NEEDED = ("Model", "get_inputs")


@dataclass(frozen=True, slots=True)
class Problem:
    """A row as read: the problem, and in the archive one kernel for it with its claims.

    `reference` is a Python module with a class `Model` and a function `get_inputs`, as in
    KernelBench. It is untrusted code.
    """

    name: str
    number: int
    level: int | None
    tier: str
    reference: str
    functional: str | None = None
    kernel: str | None = None
    kernel_name: str | None = None
    claims: dict[str, Any] | None = None


def kernelbench_row(row: Row, level: int | None) -> Problem:
    """The problem of a row of KernelBench. `level` is that of its file or split, if known.

    Errors: ValueError with the column and what is wrong.
    """
    reference = _text(row, "code")
    own = _level(row, "level", level)
    return Problem(
        name=_text(row, "name"),
        number=_number(row, "problem_id"),
        level=own,
        tier=tier_of(own, _checked(reference, "code")),
        reference=reference,
    )


def archive_row(row: Row, level: int | None, *, kernel: bool) -> Problem:
    """The problem of a row of the archive, with its kernel if asked for.

    Errors: as `kernelbench_row`.
    """
    reference = _text(row, "PyTorch_Code_Module")
    own = _level(row, "Level_ID", level)
    functional = row.get("PyTorch_Code_Functional")
    if functional is not None:
        functional = _text(row, "PyTorch_Code_Functional")
    problem = Problem(
        name=_text(row, "Op_Name"),
        number=_number(row, "Task_ID"),
        level=own,
        tier=tier_of(own, _checked(reference, "PyTorch_Code_Module")),
        reference=reference,
        functional=functional,
    )
    if not kernel:
        return problem
    return replace(
        problem,
        kernel=_text(row, "CUDA_Code"),
        kernel_name=_text(row, "Kernel_Name"),
        claims={key: _claim(row, key, column) for key, column in CLAIMS.items()},
    )


@lru_cache(maxsize=256)  # the archive repeats each problem in every row of its kernels
def _checked(code: str, column: str) -> ast.Module:
    """The parsed reference. Errors: ValueError if it is not Python or lacks what runs it."""
    try:
        tree = parse(code)
    except ValueError as error:
        raise ValueError(f"column {column!r} {error}") from None
    defined = {n.name for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    if missing := [name for name in _NEEDED if name not in defined]:
        raise ValueError(f"column {column!r} does not define {' and '.join(missing)}")
    return tree


def _value(row: Row, column: str) -> Any:
    if column not in row:
        raise ValueError(f"has no column {column!r}{did_you_mean(column, row)}")
    return row[column]


def _text(row: Row, column: str) -> str:
    value = _value(row, column)
    if not isinstance(value, str):
        raise ValueError(f"column {column!r} must be a text, got {value!r:.80}")
    if not value.strip():
        raise ValueError(f"column {column!r} is empty")
    check_unicode(value)
    return value


def _number(row: Row, column: str) -> int:
    value = _value(row, column)
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a column of pandas with a gap
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"column {column!r} must be a whole number >= 0, got {value!r:.80}")
    return value


def _level(row: Row, column: str, level: int | None) -> int | None:
    """The level of the row, else that of its file; None where neither is known."""
    if row.get(column) is None:
        return level
    own = _number(row, column)
    if level is not None and own != level:
        raise ValueError(f"column {column!r} is {own}, but its file or split is of level {level}")
    return own


def _claim(row: Row, key: str, column: str) -> Any:
    """A claim, or None where the row makes none. A number that is not finite is none."""
    value = row.get(column)
    if value is None:
        return None
    if key == "error":
        return _text(row, column) if value != "" else None
    if key == "correct":
        if not isinstance(value, bool):
            raise ValueError(f"column {column!r} must be true, false or null, got {value!r:.80}")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"column {column!r} must be a number or null, got {value!r:.80}")
    return float(value) if math.isfinite(value) else None
