"""NVRTC's log: errors with line and column, and the resources of each kernel.

    kernel.cu(3): error: identifier "x" is undefined
        a[i] = x;
               ^

The log has text of the source's author, who may write there what looks like a line of ptxas
(`#line 1 "ptxas info ..."`). ptxas writes last, so the last block of a kernel is its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest

MAX_DIAGNOSTICS = 200
MAX_MESSAGE = 2000

_PLACE = re.compile(
    r"(?P<file>[^\s(][^()\n]*)\((?P<line>\d+)\): "
    r"(?P<severity>catastrophic error|internal error|error|warning|remark|note)"
    r"(?: #(?P<code>[\w-]+))?: (?P<message>.*)"
)
_AT_END = re.compile(
    r"At end of source: (?P<severity>(?:\w+ )?error|warning)"
    r"(?: #(?P<code>[\w-]+))?: (?P<message>.*)"
)
_PLACELESS = re.compile(
    r"(?P<tool>nvrtc|ptxas|nvlink)\s*(?:[^:\n]*?, line \d+; )?:?\s*"
    r"(?P<severity>fatal|error|warning)\s*:\s*(?P<message>.*)"
)
_TOTAL = re.compile(r"\d+ (catastrophic )?errors? detected in the compilation|Error limit reached")
_REMARK = re.compile(r"Remark: The warnings can be suppressed")
_ENTRY = re.compile(r"^ptxas info\s*: Compiling entry function '([^'\n]+)' for 'sm_\w+'$", re.M)
_STACK = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)  # behind "ptxas         .     ", in other versions behind spaces
_USED = re.compile(r"^ptxas info\s*: Used (\d+) registers(.*)$", re.M)
_SHARED = re.compile(r"(\d+)(?:\+\d+)? bytes smem")
_BARRIERS = re.compile(r"used (\d+) barriers")


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """A message of the compiler.

    `severity`: `error`, `warning`, `remark` or `note` (on the error before it). `line` and `column`
    count from 1, and are None where the compiler names no place. `file` is `kernel.cu`, a header,
    or empty. `code`: such as `177-D`.
    """

    severity: str
    message: str
    line: int | None = None
    column: int | None = None
    file: str = ""
    code: str = ""

    def __str__(self) -> str:
        numbers = ":".join(str(number) for number in (self.line, self.column) if number is not None)
        place = ":".join(part for part in (self.file, numbers) if part)
        return f"{place}: {self.severity}: {self.message}" if place else self.message


@dataclass(frozen=True, slots=True)
class Reported:
    """Report of ptxas on a kernel, in bytes but for `registers` (of a thread) and `barriers`."""

    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    barriers: int


def diagnostics_of(log: str) -> list[Diagnostic]:
    """The messages of a log in their order, MAX_DIAGNOSTICS at most."""
    found: list[Diagnostic] = []
    lines = log.split("\n")
    for number, line in enumerate(lines):
        if len(found) >= MAX_DIAGNOSTICS:
            break
        if match := _PLACE.fullmatch(line):
            more, column = _rest(lines, number + 1)
            message = "\n".join([match["message"], *more])[:MAX_MESSAGE]
            severity = match["severity"].rpartition(" ")[2]
            place = (int(match["line"]), column, match["file"], match["code"] or "")
            found.append(Diagnostic(severity, message, *place))
        elif match := _AT_END.fullmatch(line):
            severity = match["severity"].rpartition(" ")[2]
            message = f"{match['message']}, at the end of the source"[:MAX_MESSAGE]
            found.append(Diagnostic(severity, message, code=match["code"] or ""))
        elif match := _PLACELESS.match(line):
            severity = "warning" if match["severity"] == "warning" else "error"
            message = f"{match['tool']}: {match['message']}"[:MAX_MESSAGE]
            found.append(Diagnostic(severity, message))
    return found


def _rest(lines: list[str], start: int) -> tuple[list[str], int | None]:
    """Further lines of a message, and the column that its caret marks.

    A message may go on over lines ("detected during: ..."), which are indented more deeply than the
    source line, by two, and its caret.
    """
    more: list[str] = []
    for number in range(start, min(start + 40, len(lines))):
        line = lines[number]
        if not line.strip():
            break
        if (
            _PLACE.fullmatch(line)
            or _AT_END.fullmatch(line)
            or _TOTAL.match(line)
            or _REMARK.match(line)
        ):
            break
        if line.strip() == "^":
            return more[:-1], max(line.index("^") - 1, 1)
        more.append(line.strip())
    return more, None


def reported(log: str) -> Mapping[str, Reported]:
    """The reports of ptxas, by the kernel's symbol."""
    return dict(_blocks(log))


def _blocks(log: str) -> Iterator[tuple[str, Reported]]:
    entries = list(_ENTRY.finditer(log))
    for entry, following in zip_longest(entries, entries[1:]):
        end = following.start() if following else len(log)
        block = log[entry.end() : end]
        used, stack = _USED.search(block), _STACK.search(block)
        if used is None or stack is None:
            continue
        shared, barriers = _SHARED.search(used[2]), _BARRIERS.search(used[2])
        yield (
            entry[1],
            Reported(
                registers=int(used[1]),
                shared_bytes=int(shared[1]) if shared else 0,
                stack_bytes=int(stack[1]),
                spill_store_bytes=int(stack[2]),
                spill_load_bytes=int(stack[3]),
                barriers=int(barriers[1]) if barriers else 0,
            ),
        )
