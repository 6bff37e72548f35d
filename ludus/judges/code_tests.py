"""Tests of programs, in the forms of the field's data sets.

    TACO, APPS       input_output: {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}, or with
                     "fn_name": "add" and lists of arguments as inputs, [[1, 2]]; an object or JSON
    LiveCodeBench    public_test_cases, private_test_cases: [{"input", "output", "testtype"}],
                     testtype "stdin" or "functional" (arguments: JSON, one a line); a list or JSON,
                     also pickled, compressed by zlib and encoded in base64;
                     metadata: {"func_name": "add"}
    HumanEval        test: a text that defines check(candidate); entry_point: "add"; prompt: code
    MBPP             test_list: ["assert add(1, 2) == 3"], test_setup_code, test_imports

They are fields of `task.answer` (an object) or of `task.data`.

Outputs on stdout are compared line by line and word by word, so spaces between words do not count,
nor do empty lines at the end. Words are equal as texts; one with a decimal point may differ by
1e-6, relative or absolute. Returned values are compared as JSON (a tuple is a list), numbers alike.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import pickle
import re
import secrets
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ludus.core.errors import Unscorable
from ludus.core.types import Task

MAX_BYTES = 256_000_000
"""Limit of a task's tests, decompressed."""
TOLERANCE = 1e-6

_IMPORTS = """\
import bisect, collections, functools, heapq, itertools, json, math, operator, random, re
import string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
"""
"""As the evaluations of LiveCodeBench and TACO import them before a function."""


_APART = Path(__file__).with_name("workers").joinpath("apart.py").read_text()
_FUTURE = re.compile(r"(?:\s*from __future__ import [^\n]*\n)+")


@dataclass(frozen=True, slots=True)
class Test:
    """One run of a program: with `stdin`, or with a `call` appended that prints its result.

    `expected` is the output (text), the accepted values, or None where `call` has the assertions,
    which run apart from the program (see `workers.apart`). `key` begins the line of the result, and
    is drawn anew for each test. `prompt` is code that the answer continues, or defines again;
    `setup` follows the answer.
    """

    __test__ = False  # not pytest's

    stdin: bytes = b""
    call: str = ""
    prompt: str = ""
    setup: str = ""
    name: str = ""
    expected: Any = None
    key: str = ""

    def program(self, code: str) -> str:
        """The text of the program to run."""
        if not self.call:
            return code
        program = self._whole(code)
        if self.expected is None:
            return f"{_APART}\nrun({program!r})\n"
        return f"{program}\n{self.call}"

    @property
    def given(self) -> bytes:
        """The standard input of the program to run."""
        if not self.call or self.expected is not None:
            return self.stdin
        job = {"prompt": self.prompt and f"{self.prompt.rstrip()}\n    pass\n", "name": self.name}
        return json.dumps({**job, "text": f"{self.setup}\n{self.call}", "key": self.key}).encode()

    def digest(self, code: str) -> bytes:
        """A digest of all that decides this test's verdict."""
        call = self.call.replace(self.key, "") if self.key else self.call
        parts = (code, self.stdin, call, self.prompt, self.setup, self.name, self.expected)
        return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).digest()

    def _whole(self, code: str) -> str:
        """The answer with what stands before and after it."""
        if not self.prompt:
            before = _IMPORTS
        elif re.search(rf"^[ \t]*(?:async )?def {self.name}\b", code, re.MULTILINE):
            before = f"{self.prompt.rstrip()}\n    pass\n\n"
        else:
            return f"{self.prompt}{code}\n{self.setup}"
        future, rest = _FUTURE.match(code), code
        if future is not None:
            before, rest = future[0] + before, code[future.end() :]
        return f"{before}{rest}\n{self.setup}"

    def fault(self, stdout: str) -> str | None:
        """The fault of an output; None: it is right.

        Errors: Unscorable for assertions that cannot run apart from the program.
        """
        if not self.call:
            if same_output(stdout, self.expected):
                return None
            return f"printed {stdout.strip()[:120]!r}, expected {self.expected.strip()[:120]!r}"
        lines = [line for line in stdout.splitlines() if line.startswith(self.key)]
        if not lines:
            return "the program ended before its result"
        try:
            value = json.loads(lines[-1].removeprefix(self.key))
        except (ValueError, RecursionError):
            return "its result is no JSON"
        if self.expected is None and value is not None:
            raise Unscorable(f"a test cannot run: {value}")
        if self.expected is None or any(same_value(value, e) for e in self.expected):
            return None
        return f"returned {json.dumps(value)[:120]}, expected {json.dumps(self.expected[0])[:120]}"


def read_tests(task: Task) -> list[Test]:
    """The task's tests. Errors: Unscorable: none, or in none of the known forms."""
    fields = {**task.data, **(task.answer if isinstance(task.answer, dict) else {})}
    try:
        if fields.get("input_output"):
            tests = _taco(_object(fields["input_output"]))
        elif "public_test_cases" in fields or "private_test_cases" in fields:
            tests = _livecodebench(fields)
        elif "entry_point" in fields and "test" in fields:
            tests = [_humaneval(fields)]
        else:
            tests = [_assertion(str(line), fields) for line in fields.get("test_list", ())]
    except (LookupError, TypeError, ValueError, RecursionError, EOFError, zlib.error) as error:
        raise Unscorable(
            f"task {task.id}: its tests cannot be read ({type(error).__name__}: {error!s:.200})"
        ) from error
    if not tests:
        raise Unscorable(
            f"task {task.id} has no tests: give input_output, public_test_cases, test and "
            "entry_point, or test_list, in `answer` or `data`"
        )
    return tests


def _taco(fields: Mapping[str, Any]) -> list[Test]:
    inputs, outputs, name = fields["inputs"], fields["outputs"], fields.get("fn_name")
    pairs = list(zip(inputs, outputs, strict=True))
    if name is None:
        return [_stdin(_lines(given), _lines(output)) for given, output in pairs]
    # Some rows wrap the returned value in a list, some do not: TACO's evaluation takes both.
    return [
        _call(name, given, [output, *(output if _single(output) else [])])
        for given, output in pairs
    ]


def _single(output: Any) -> bool:
    return isinstance(output, list) and len(output) == 1


def _livecodebench(fields: Mapping[str, Any]) -> list[Test]:
    metadata = _object(fields.get("metadata") or {})
    name = metadata.get("func_name") or fields.get("func_name")
    tests: list[Test] = []
    for key in ("public_test_cases", "private_test_cases"):
        for case in _cases(fields.get(key) or []):
            if case["testtype"] == "stdin":
                tests.append(_stdin(case["input"], case["output"]))
                continue
            if not isinstance(name, str):
                raise ValueError("a functional test case, and no func_name in `metadata`")
            arguments = [json.loads(line) for line in case["input"].splitlines() if line.strip()]
            tests.append(_call(name, arguments, [json.loads(case["output"])]))
    return tests


def _cases(given: Any) -> list[Any]:
    """Test cases: a list, its JSON, or JSON that was pickled, compressed and encoded."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            given = json.loads(_decompressed(given))
    if not isinstance(given, list):
        raise TypeError("the test cases are no list")
    return given


def _decompressed(text: str) -> str:
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(base64.b64decode(text, validate=True), MAX_BYTES)
    if unpacker.unconsumed_tail:
        raise ValueError(f"more than {MAX_BYTES:,} bytes of test cases")
    value = _OnlyText(io.BytesIO(data)).load()
    if not isinstance(value, str):
        raise TypeError("the pickled test cases are no text")
    return value


class _OnlyText(pickle.Unpickler):
    """Reads a pickled text. Everything else could run code."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise ValueError(f"the test cases are pickled with {module_name}.{global_name}")


def _humaneval(fields: Mapping[str, Any]) -> Test:
    key, name = _key(), _name(fields["entry_point"])
    call = f"{fields['test']}\ncheck({name})\n"
    prompt = fields.get("prompt")
    is_code = isinstance(prompt, str) and f"def {name}" in prompt
    return Test(call=call, prompt=str(prompt) if is_code else "", name=name, key=key)


def _assertion(text: str, fields: Mapping[str, Any]) -> Test:
    setup = "\n".join((*fields.get("test_imports", ()), fields.get("test_setup_code") or ""))
    return Test(call=text, setup=setup, key=_key())


_PRINT = "\nimport json as _j\nprint('\\n{key}' + _j.dumps({value}))\n"


def _call(name: str, arguments: Sequence[Any], expected: list[Any]) -> Test:
    key, name = _key(), _name(name)
    if not isinstance(arguments, list):
        raise TypeError(f"the arguments of {name} are no list")
    given = repr(json.dumps(arguments))
    function = f"getattr(Solution(), {name!r}) if 'Solution' in globals() else {name}"
    value = f"({function})(*_j.loads({given}))"
    return Test(call=_PRINT.format(value=value, key=key), expected=expected, key=key)


def _key() -> str:
    return secrets.token_hex(16)


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"{name!r:.80} is no name of a function")
    return name


def _stdin(given: str, output: str) -> Test:
    return Test(stdin=given.encode("utf-8", "replace"), expected=output)


def _lines(given: Any) -> str:
    """A text, or a list of lines."""
    if isinstance(given, list):
        return "\n".join(str(line) for line in given)
    if not isinstance(given, str):
        raise TypeError(f"{given!r:.80} is no text")
    return given


def _object(given: Any) -> Mapping[str, Any]:
    value = json.loads(given) if isinstance(given, str) else given
    if not isinstance(value, dict):
        raise TypeError("no JSON object")
    return value


def same_output(given: str, expected: str) -> bool:
    """True if two outputs are equal, apart from spaces at the ends of lines and empty last lines,
    and numbers up to TOLERANCE."""
    a = [line.split() for line in given.rstrip().splitlines()]
    b = [line.split() for line in expected.rstrip().splitlines()]
    if a == b:
        return True
    return len(a) == len(b) and all(
        len(x) == len(y) and all(map(_same_word, x, y)) for x, y in zip(a, b, strict=True)
    )


def _same_word(given: str, expected: str) -> bool:
    if given == expected:
        return True
    try:
        return "." in given + expected and _close(float(given), float(expected))
    except ValueError:
        return False


def same_value(given: Any, expected: Any) -> bool:
    """True if two JSON values are equal, numbers with a fraction up to TOLERANCE."""
    if isinstance(given, list) and isinstance(expected, list):
        return len(given) == len(expected) and all(map(same_value, given, expected))
    if isinstance(given, dict) and isinstance(expected, dict):
        return given.keys() == expected.keys() and all(
            same_value(value, expected[key]) for key, value in given.items()
        )
    if isinstance(given, float | int) and isinstance(expected, float | int):
        return given == expected or (
            (isinstance(given, float) or isinstance(expected, float)) and _close(given, expected)
        )
    return bool(given == expected)


def _close(a: float, b: float) -> bool:
    try:
        return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:  # a whole number beyond the largest float
        return False
