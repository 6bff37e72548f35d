"""Races on shared memory: accesses of different threads without a barrier between.

The statements of a kernel are followed in their order; of a branch both sides, of a loop the body
twice, so a barrier that is missing at its end is seen. Two accesses conflict if one of them writes,
and their indices may name the same element for different threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ludus.kernels.analysis.findings import Finding
from ludus.kernels.analysis.safety import finding, place
from ludus.kernels.analysis.threads import Kernel, Linear
from ludus.kernels.analysis.tree import (
    LOOPS,
    Node,
    arguments_of,
    called,
    condition_of,
    is_barrier,
    subscript,
    text,
    walk,
)

MAX_PENDING = 60
MAX_STATEMENTS = 5_000
"""Limit of the statements that are followed, those of a loop each time."""
NESTED = (
    "compound_statement", "preproc_if", "preproc_ifdef", "preproc_else", "else_clause",
    "labeled_statement", "case_statement", "attributed_statement",
)  # fmt: skip
EXITS = ("return_statement", "break_statement", "continue_statement", "goto_statement")


@dataclass(frozen=True)
class Access:
    """An access to an element of a shared array. `varying`: which indices depend on the thread."""

    array: str
    indices: tuple[str, ...]
    sums: tuple[Linear, ...]
    varying: tuple[bool, ...]
    guards: tuple[tuple[int, bool], ...]
    writes: bool
    atomic: bool
    node: Node

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for accesses that conflict with the same others."""
        return self.array, self.indices, self.guards, self.writes, self.atomic

    def conflicts(self, other: Access) -> bool:
        """True if different threads may access the same element, and one of them writes.

        Two plain writes are left out: tiles and their borders are often written so, by indices
        that never meet.
        """
        if self.array != other.array or not (self.writes or other.writes):
            return False
        if self.writes and other.writes and self.atomic == other.atomic:
            return False
        if self.guards and self.guards == other.guards and self.guards[0][1]:
            return False  # the same thread
        if len(self.indices) != len(other.indices):
            return False
        if self.indices == other.indices or self.sums == other.sums:
            return not any(self.varying) and self.guards != other.guards
        pairs = zip(self.indices, other.indices, self.varying, other.varying, strict=True)
        if any(a != b and not va and not vb for a, b, va, vb in pairs):
            return False
        return not any(map(_never_meet, self.sums, other.sums))


def _never_meet(left: Linear, right: Linear) -> bool:
    """True if no two threads have the same value: `2 * t` and `2 * t + 1`."""
    if left.terms != right.terms or left.constant == right.constant:
        return False
    varying = [name for name in left.terms if "threadIdx" in name]
    if varying != ["threadIdx.x"]:
        return False
    return (left.constant - right.constant) % left.terms["threadIdx.x"] != 0


Pending = dict[tuple[object, ...], Access]


class RaceFinder:
    """Follows the statements of a kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._also = kernel.source.barrier_functions
        self.findings: dict[tuple[int, str], Finding] = {}
        self._followed: dict[tuple[int, frozenset[object]], Pending] = {}
        self._left = MAX_STATEMENTS

    def run(self) -> Iterable[Finding]:
        """The findings of the kernel."""
        if self._kernel.shared:
            self._follow(self._kernel.function.body, {})
        if self._left <= 0:
            reason = f"more than {MAX_STATEMENTS:,} statements on the ways through the kernel"
            stopped = finding(self._kernel.function.node, "unreadable", reason)
            self.findings[(stopped.line, "")] = stopped
        return self.findings.values()

    def _follow(self, node: Node, pending: Pending) -> Pending:
        """The accesses since the last barrier, after a statement."""
        kind = node.type
        if self._left <= 0:
            return pending
        if kind in LOOPS:  # a nested loop is met again and again with the same accesses
            key = (node.id, frozenset(pending))
            if key not in self._followed:
                self._followed[key] = self._loop(node, pending)
            return self._followed[key]
        if kind in NESTED:
            for child in node.named_children:
                pending = self._follow(child, pending)
            return pending
        if kind == "if_statement":
            return self._branch(node, pending)
        if kind == "switch_statement":
            body = node.child_by_field_name("body")
            pending = self._statement(condition_of(node), pending)
            return _joined(pending, self._follow(body, pending)) if body else pending
        if node.is_named and kind != "comment":
            return self._statement(node, pending)
        return pending

    def _branch(self, node: Node, pending: Pending) -> Pending:
        pending = self._statement(condition_of(node), pending)
        ends = []
        for side in ("consequence", "alternative"):
            taken = node.child_by_field_name(side)
            after = self._follow(taken, pending) if taken is not None else pending
            if taken is None or not _exits(taken):
                ends.append(after)
        return _joined(*ends) if ends else pending

    def _loop(self, node: Node, pending: Pending) -> Pending:
        if (start := node.child_by_field_name("initializer")) is not None:
            pending = self._statement(start, pending)
        after, body = pending, node.child_by_field_name("body")
        for _ in range(2):
            if node.type != "do_statement":
                after = self._statement(condition_of(node), after)
            after = self._follow(body, after) if body is not None else after
            for part in (node.child_by_field_name("update"),):
                after = self._statement(part, after)
            if node.type == "do_statement":
                after = self._statement(condition_of(node), after)
        return after  # loops with a barrier run at least once, else there is nothing to say

    def _statement(self, node: Node | None, pending: Pending) -> Pending:
        if node is None:
            return pending
        self._left -= 1
        if any(is_barrier(part, self._also, warp=True) for part in walk(node)):
            return {}
        accesses = list(self._accesses(node))
        for access in accesses:
            behind = [other for other in accesses if _behind(other, access)]
            for other in (*pending.values(), *behind):
                if access.conflicts(other):
                    self._report(access, other)
                    break
        after = {**pending, **{access.key: access for access in accesses}}
        return after if len(after) <= MAX_PENDING else dict(list(after.items())[-MAX_PENDING:])

    def _report(self, access: Access, other: Access) -> None:
        verbs = ("written" if access.writes else "read", "written" if other.writes else "read")
        line, _ = place(other.node)
        reason = (
            f"{text(access.node)[:60]} is {verbs[0]} after {text(other.node)[:60]} of line {line} "
            f"was {verbs[1]}, without a barrier between"
        )
        found = finding(access.node, "shared-race", reason)
        self.findings.setdefault((found.line, access.array), found)

    def _accesses(self, node: Node) -> Iterator[Access]:
        for part in walk(node):
            if part.type == "identifier" and self._is_variable(part):
                writes, atomic = _use(part)
                guards = self._kernel.guards(part)
                yield Access(text(part), (), (), (), guards, writes, atomic, part)
                continue
            if part.type != "subscript_expression":
                continue
            parent = part.parent
            if (
                parent is not None
                and parent.type == "subscript_expression"
                and (parent.child_by_field_name("argument") == part)
            ):
                continue
            name, indices = subscript(part)
            if name not in self._kernel.shared or not indices:
                continue
            if len(indices) < len(self._kernel.shared[name][1]):
                continue  # a row, passed on
            writes, atomic = _use(part)
            yield Access(
                name,
                tuple(self._kernel.canonical(index) for index in indices),
                tuple(self._kernel.linear(index) for index in indices),
                tuple(self._kernel.varies(index) for index in indices),
                self._kernel.guards(part),
                writes,
                atomic,
                part,
            )

    def _is_variable(self, node: Node) -> bool:
        found = self._kernel.shared.get(text(node))
        if found is None or found[1]:
            return False
        parent = node.parent
        return parent is not None and parent.type not in ("declaration", "init_declarator")


def _behind(read: Access, write: Access) -> bool:
    """True for `s[t] = ... s[t - d]` in one statement: another thread writes what is read.

    `s[t] += s[t + w]` is left out: reductions are written so, by threads below w.
    """
    if read.writes or not write.writes or read.array != write.array or len(read.sums) != 1:
        return False
    [offset] = [read.sums[0].plus(write.sums[0], -1)]
    below = offset.constant < 0 if not offset.terms else all(f < 0 for f in offset.terms.values())
    return below and write.varying[0] and not any("threadIdx" in name for name in offset.terms)


def _use(node: Node) -> tuple[bool, bool]:
    """True if an access writes, and true if it is atomic."""
    child: Node = node
    parent = node.parent
    while parent is not None and parent.type in ("parenthesized_expression", "field_expression"):
        child = parent
        parent = parent.parent
    if parent is None:
        return False, False
    if parent.type == "assignment_expression":
        return parent.child_by_field_name("left") == child, False
    if parent.type == "update_expression":
        return True, False
    if parent.type == "pointer_expression" and text(parent).startswith("&"):
        call = parent.parent.parent if parent.parent is not None else None
        if call is not None and call.type == "call_expression":
            return called(call).startswith("atomic") and bool(arguments_of(call)), True
    return False, False


def _exits(node: Node) -> bool:
    last = node
    while last.type in ("compound_statement", "else_clause") and last.named_children:
        last = last.named_children[-1]
    return last.type in EXITS


def _joined(*states: Pending) -> Pending:
    joined: Pending = {}
    for state in states:
        joined |= state
    return joined
