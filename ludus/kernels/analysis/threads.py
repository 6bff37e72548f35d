"""Dependence of a kernel's values on the thread: which do, with which stride in threadIdx.x."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from ludus.kernels.analysis.tree import (
    LOOPS,
    Function,
    Node,
    Source,
    called,
    condition_of,
    declared_name,
    text,
    walk,
)

T = TypeVar("T")
MAX_DEPTH = 24
SIZES = {
    "char": 1, "bool": 1, "uint8_t": 1, "int8_t": 1, "unsigned char": 1, "signed char": 1,
    "half": 2, "__half": 2, "short": 2, "__nv_bfloat16": 2, "nv_bfloat16": 2, "uint16_t": 2,
    "int16_t": 2, "double": 8, "long": 8, "long long": 8, "unsigned long long": 8, "int64_t": 8,
    "uint64_t": 8, "size_t": 8, "float2": 8, "int2": 8, "uint2": 8, "float4": 16, "int4": 16,
    "uint4": 16, "double2": 16,
}  # fmt: skip
"""Bytes of types; 4 for all others."""
UNIFORM_CALLS = frozenset({"__syncthreads_count", "__syncthreads_and", "__syncthreads_or"})
THREAD_CALLS = frozenset({"thread_rank", "thread_index", "__laneid", "lane_id"})
BRANCHES = ("if_statement", "switch_statement", "conditional_expression", *LOOPS)


@dataclass(frozen=True, slots=True)
class Stride:
    """The change of a value from one threadIdx.x to the next: `factor`, times something unknown
    that is the same for all threads where `symbolic`."""

    factor: int
    symbolic: bool = False

    def plus(self, other: Stride) -> Stride:
        """The stride of a sum."""
        if not self.factor or not other.factor:
            return other if other.factor else self
        if self.symbolic or other.symbolic:
            return Stride(1, True)
        return Stride(self.factor + other.factor)


ZERO, ONE = Stride(0), Stride(1)


@dataclass(frozen=True, slots=True)
class Linear:
    """A sum of terms, by their text, with constant factors, and a constant."""

    terms: dict[str, int]
    constant: int

    def plus(self, other: Linear, scale: int = 1) -> Linear:
        """This sum, and `scale` times the other."""
        terms = dict(self.terms)
        for name, factor in other.terms.items():
            terms[name] = terms.get(name, 0) + scale * factor
        kept = {name: factor for name, factor in terms.items() if factor}
        return Linear(kept, self.constant + scale * other.constant)


ZERO_SUM = Linear({}, 0)


@dataclass(frozen=True, slots=True)
class Definition:
    """An assignment: operator (`=`, `+=`, ...), value (None: unknown), and the node itself."""

    operator: str
    value: Node | None
    node: Node


@dataclass
class Kernel:
    """A device function, with what is known of its names."""

    source: Source
    function: Function
    shared: dict[str, tuple[str, list[Node | None]]] = field(default_factory=dict)
    """Arrays in shared memory: element type and sizes; a single variable has no sizes."""
    _known: dict[tuple[str, int], Any] = field(default_factory=dict)
    """Answers by the node's id: names lead to the same values again and again."""

    def __post_init__(self) -> None:
        outside = [  # an extern array may stand before the kernels
            node for node in self.source.root.named_children if node.type == "declaration"
        ]
        inside = [node for node in walk(self.function.body) if node.type == "declaration"]
        for node in (*outside, *inside):
            if not any(text(child) == "__shared__" for child in node.children):
                continue
            kind = text(node.child_by_field_name("type"))
            for declarator in node.children_by_field_name("declarator"):
                sizes: list[Node | None] = []
                current: Node | None = declarator
                if current is not None and current.type == "init_declarator":
                    current = current.child_by_field_name("declarator")
                while current is not None and current.type == "array_declarator":
                    sizes.insert(0, current.child_by_field_name("size"))
                    current = current.child_by_field_name("declarator")
                if (name := declared_name(declarator)) is not None:
                    self.shared[text(name)] = (kind, sizes)

    @cached_property
    def definitions(self) -> dict[str, list[Definition]]:
        """All assignments of each name in the function."""
        found: dict[str, list[Definition]] = {}
        for node in walk(self.function.node):
            name: Node | None = None
            operator, value = "=", None
            if node.type == "init_declarator":
                name = declared_name(node.child_by_field_name("declarator"))
                value = node.child_by_field_name("value")
                if value is not None and value.type in ("argument_list", "initializer_list"):
                    value = value.named_children[0] if value.named_child_count == 1 else None
            elif node.type == "assignment_expression":
                left = node.child_by_field_name("left")
                name = left if left is not None and left.type == "identifier" else None
                operator = text(node.child_by_field_name("operator"))
                value = node.child_by_field_name("right")
            elif node.type == "update_expression":
                argument = node.child_by_field_name("argument")
                name = argument if argument is not None and argument.type == "identifier" else None
                operator = "+="
            if name is not None:
                found.setdefault(text(name), []).append(Definition(operator, value, node))
        return found

    def single(self, name: str) -> Node | None:
        """The value of a name that is assigned once."""
        found = self.definitions.get(name, [])
        return found[0].value if len(found) == 1 and found[0].operator == "=" else None

    # Dependence on the thread

    @cached_property
    def varying(self) -> frozenset[str]:
        """Names whose values differ between the threads of a block."""
        found = {
            name
            for name, body in self.source.macros.items()
            if re.search(r"\bthreadIdx\b|\bthread_rank\b", body)
        }
        for _ in range(10):
            before = len(found)
            for name, definitions in self.definitions.items():
                if name in found:
                    continue
                if any(self._defines_varying(item, found) for item in definitions):
                    found.add(name)
            if len(found) == before:
                break
        return frozenset(found)

    def _defines_varying(self, item: Definition, known: set[str]) -> bool:
        if item.value is not None and self._varies(item.value, known):
            return True
        current = item.node.parent
        while current is not None and current.id != self.function.node.id:
            if current.type in BRANCHES and item.node.type != "init_declarator":
                condition = condition_of(current)
                if condition is not None and self._varies(condition, known):
                    return True
            current = current.parent
        return False

    def varies(self, node: Node) -> bool:
        """True if an expression differs between the threads of a block."""
        return self._varies(node, self.varying)

    def _varies(self, node: Node, known: frozenset[str] | set[str]) -> bool:
        waiting = [node]
        while waiting:
            current = waiting.pop()
            if current.type == "call_expression":
                name = called(current)
                if name in UNIFORM_CALLS:
                    continue
                if name in THREAD_CALLS or "shfl" in name or name.startswith("atomic"):
                    return True
            elif current.type == "identifier":
                name = text(current)
                if name == "threadIdx" or name in known:
                    return True
            waiting.extend(current.children)
        return False

    # Constants and strides

    def _remembered(
        self, what: str, node: Node, depth: int, compute: Callable[[Node, int], T]
    ) -> T:
        key = (what, node.id)
        if key not in self._known:
            self._known[key] = compute(node, depth)
        found: T = self._known[key]
        return found

    def constant(self, node: Node | None, depth: int = 0) -> int | None:
        """The value of a constant expression; None if it is not known."""
        if node is None or depth > MAX_DEPTH:
            return None
        return self._remembered("constant", node, depth, self._constant)

    def _constant(self, node: Node, depth: int) -> int | None:
        if node.type == "number_literal":
            match = re.fullmatch(r"(0[xX][0-9a-fA-F]+|\d+)[uUlL]*", text(node))
            return int(match[1], 0) if match and not re.match(r"0\d", match[1]) else None
        if node.type == "parenthesized_expression" and node.named_child_count == 1:
            return self.constant(node.named_children[0], depth + 1)
        if node.type == "identifier":
            return self._named_constant(text(node), depth)
        if node.type == "binary_expression":
            sides = [
                self.constant(node.child_by_field_name(s), depth + 1) for s in ("left", "right")
            ]
            left, right = sides
            if left is None or right is None:
                return None
            return _computed(text(node.child_by_field_name("operator")), left, right)
        return None

    def _named_constant(self, name: str, depth: int) -> int | None:
        if name == "warpSize":
            return 32
        if name in self.source.macros:
            body = self.source.macros[name].strip("() ")
            return int(body) if re.fullmatch(r"\d{1,9}", body) else None
        value = self.single(name)
        if value is None:
            value = self._global_constants.get(name)
        return self.constant(value, depth + 1)

    @cached_property
    def _global_constants(self) -> dict[str, Node | None]:
        found: dict[str, Node | None] = {}
        for node in self.source.root.named_children:
            if node.type != "declaration" or not re.match(r"[^=]*\bconst", text(node)):
                continue
            for declarator in node.children_by_field_name("declarator"):
                if (name := declared_name(declarator)) is not None:
                    found[text(name)] = declarator.child_by_field_name("value")
        return found

    def stride(self, node: Node | None, depth: int = 0) -> Stride | None:
        """The stride of an expression in threadIdx.x; None if it is not linear, or not known."""
        if node is None or depth > MAX_DEPTH:
            return None
        return self._remembered("stride", node, depth, self._stride)

    def _stride(self, node: Node, depth: int) -> Stride | None:
        kind = node.type
        if kind in ("number_literal", "char_literal", "sizeof_expression"):
            return ZERO
        if kind == "field_expression":
            if text(node.child_by_field_name("argument")) == "threadIdx":
                return ONE if text(node.child_by_field_name("field")) == "x" else ZERO
            return None if self.varies(node) else ZERO
        if kind == "identifier":
            return self._named_stride(text(node), depth)
        if kind == "parenthesized_expression" and node.named_child_count == 1:
            return self.stride(node.named_children[0], depth + 1)
        if kind == "cast_expression":
            return self.stride(node.child_by_field_name("value"), depth + 1)
        if kind == "binary_expression":
            return self._binary_stride(node, depth)
        return None if self.varies(node) else ZERO

    def _named_stride(self, name: str, depth: int) -> Stride | None:
        if name in self.source.macros:
            body = re.sub(r"[()\s]", "", self.source.macros[name])
            return ONE if body == "threadIdx.x" else None if name in self.varying else ZERO
        if name not in self.varying:
            return ZERO
        starts = [item for item in self.definitions.get(name, []) if item.operator == "="]
        others = [item for item in self.definitions.get(name, []) if item.operator != "="]
        if len(starts) != 1 or any(
            item.operator not in ("+=", "-=")
            or (item.value is not None and self.stride(item.value, depth + 1) != ZERO)
            for item in others
        ):
            return None
        return self.stride(starts[0].value, depth + 1)

    def _binary_stride(self, node: Node, depth: int) -> Stride | None:
        left_node, right_node = (node.child_by_field_name(side) for side in ("left", "right"))
        left, right = self.stride(left_node, depth + 1), self.stride(right_node, depth + 1)
        if left is None or right is None:
            return None
        operator = text(node.child_by_field_name("operator"))
        if operator == "+":
            return left.plus(right)
        if operator == "-":
            return left.plus(Stride(-right.factor, right.symbolic))
        if not left.factor and not right.factor:
            return None if self.varies(node) and operator not in ("*", "<<") else ZERO
        if operator == "*" and not (left.factor and right.factor):
            varying, other = (left, right_node) if left.factor else (right, left_node)
            if other is not None and self.varies(other):
                return None  # by threadIdx.y
            scale = self.constant(other)
            if scale is None:
                return Stride(varying.factor * self._factor(other), True)
            return Stride(varying.factor * scale, varying.symbolic)
        if operator == "<<" and left.factor and (bits := self.constant(right_node)) is not None:
            return Stride(left.factor << min(bits, 32), left.symbolic)
        return None

    def _factor(self, node: Node | None, depth: int = 0) -> int:
        """A constant that an expression is a multiple of: 2 for `2 * w`."""
        known = self.constant(node)
        if known is not None or node is None or depth > MAX_DEPTH:
            return known or 1
        if node.type == "parenthesized_expression" and node.named_child_count == 1:
            return self._factor(node.named_children[0], depth + 1)
        if node.type == "binary_expression" and (text(node.child_by_field_name("operator")) == "*"):
            sides = (node.child_by_field_name(side) for side in ("left", "right"))
            left, right = (self._factor(side, depth + 1) for side in sides)
            return left * right
        return 1

    def linear(self, node: Node, depth: int = 0) -> Linear:
        """An expression as a sum: of what it cannot take apart, the text is a term of it."""
        return self._remembered("linear", node, depth, self._linear)

    def _linear(self, node: Node, depth: int) -> Linear:
        if (known := self.constant(node)) is not None:
            return Linear({}, known)
        if depth < MAX_DEPTH:
            if node.type == "parenthesized_expression" and node.named_child_count == 1:
                return self.linear(node.named_children[0], depth + 1)
            if node.type == "cast_expression" and (value := node.child_by_field_name("value")):
                return self.linear(value, depth + 1)
            if node.type == "identifier" and (value := self.single(text(node))) is not None:
                return self.linear(value, depth + 1)
            if node.type == "binary_expression":
                left, right = (node.child_by_field_name(side) for side in ("left", "right"))
                operator = text(node.child_by_field_name("operator"))
                if left is not None and right is not None:
                    if operator in "+-":
                        sign = 1 if operator == "+" else -1
                        return self.linear(left, depth + 1).plus(
                            self.linear(right, depth + 1), sign
                        )
                    for side, other in ((left, right), (right, left)):
                        if operator == "*" and (scale := self.constant(side)) is not None:
                            return ZERO_SUM.plus(self.linear(other, depth + 1), scale)
        return Linear({self.canonical(node): 1}, 0)

    # The text of an index, with names that only rename replaced

    def canonical(self, node: Node) -> str:
        """The text of an expression, without blanks and renamings (`int t = threadIdx.x;`)."""
        return "".join(self._words(node, 0))

    def _words(self, node: Node, depth: int) -> Iterator[str]:
        if node.type == "identifier" and depth < MAX_DEPTH:
            value = self.single(text(node))
            if value is not None and value.type in ("identifier", "field_expression"):
                yield from self._words(value, depth + 1)
                return
        if not node.children:
            yield text(node)
            return
        for child in node.children:
            yield from self._words(child, depth)

    def guards(self, node: Node) -> tuple[tuple[int, bool], ...]:
        """The branches on the thread that a node lies in: id, and whether one thread takes it."""
        found = []
        current: Node | None = node
        while current is not None and current.id != self.function.node.id:
            parent = current.parent
            if parent is not None and parent.type == "if_statement":
                condition = condition_of(parent)
                if condition is not None and condition.id != current.id and self.varies(condition):
                    one = condition.type == "binary_expression" and (
                        text(condition.child_by_field_name("operator")) == "=="
                    )
                    found.append((current.id, one))
            current = parent
        return tuple(found)


def _computed(operator: str, left: int, right: int) -> int | None:
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    if operator == "*":
        return left * right
    if operator == "/" and right:
        return left // right
    if operator == "%" and right:
        return left % right
    if operator == "<<" and 0 <= right < 64:
        return left << right
    if operator == ">>" and 0 <= right < 64:
        return left >> right
    return None
