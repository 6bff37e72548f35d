"""A source as a syntax tree (tree-sitter with the grammar of CUDA): functions, names, macros."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ludus.core.errors import MissingDependency

try:
    import tree_sitter
    import tree_sitter_cuda
except ImportError as error:
    raise MissingDependency(
        "tree-sitter-cuda", "kernels", "the analysis of CUDA kernels"
    ) from error

Node = tree_sitter.Node
CUDA = tree_sitter.Language(tree_sitter_cuda.language())
LOOPS = ("for_statement", "while_statement", "do_statement")
FUNCTION = ("function_definition",)
BLOCK_BARRIERS = frozenset(
    {"__syncthreads", "__syncthreads_count", "__syncthreads_and", "__syncthreads_or",
     "__barrier_sync", "__barrier_sync_count"}
)  # fmt: skip
WARP_BARRIERS = frozenset({"__syncwarp"})
SYNC_METHODS = frozenset({"sync", "arrive_and_wait", "wait"})


def text(node: Node | None) -> str:
    """The source text of a node."""
    return (node.text or b"").decode("utf-8", "replace") if node is not None else ""


def walk(node: Node) -> Iterator[Node]:
    """A node and all below it, in the order of the source, without what `#if 0` leaves out."""
    waiting = [node]
    while waiting:
        current = waiting.pop()
        yield current
        children = current.children
        if current.type == "preproc_if" and text(current.child_by_field_name("condition")) == "0":
            other = current.child_by_field_name("alternative")
            children = [other] if other is not None else []
        waiting.extend(reversed(children))


def ancestors(node: Node, top: Node) -> Iterator[Node]:
    """The nodes above one, up to `top`, which is left out."""
    current = node.parent
    while current is not None and current.id != top.id:
        yield current
        current = current.parent


def condition_of(node: Node) -> Node | None:
    """The condition of a branch or a loop, without parentheses."""
    found = node.child_by_field_name("condition")
    while found is not None and found.type in ("condition_clause", "parenthesized_expression"):
        inner = found.child_by_field_name("value") or _last(found)
        if inner is None:
            break
        found = inner
    return found


def _last(node: Node) -> Node | None:
    return node.named_children[-1] if node.named_children else None


def called(node: Node) -> str:
    """The name that a call_expression calls: `f` of `f(x)`, `f<T>(x)`, `ns::f(x)`, `a.f(x)`."""
    function = node.child_by_field_name("function")
    while function is not None:
        inner = None
        if function.type in ("qualified_identifier", "template_function", "template_method"):
            inner = function.child_by_field_name("name")
        elif function.type == "field_expression":
            inner = function.child_by_field_name("field")
        if inner is None:
            break
        function = inner
    return text(function)


def arguments_of(node: Node) -> list[Node]:
    """The arguments of a call."""
    found = node.child_by_field_name("arguments")
    return list(found.named_children) if found is not None else []


def declared_name(node: Node | None) -> Node | None:
    """The identifier that a declarator declares."""
    while node is not None and node.type not in ("identifier", "field_identifier"):
        inner = node.child_by_field_name("declarator") or node.child_by_field_name("name")
        if inner is None and node.type in ("reference_declarator", "parenthesized_declarator"):
            inner = _last(node)
        node = inner
    return node


def subscript(node: Node) -> tuple[str, list[Node]]:
    """The base's name, and the indices, of `s[i][j]`; an empty name for another base."""
    indices: list[Node] = []
    while node.type == "subscript_expression":
        found = node.child_by_field_name("indices")
        indices[:0] = found.named_children if found is not None else []
        inner = node.child_by_field_name("argument")
        if inner is None:
            return "", indices
        node = inner
    return (text(node) if node.type == "identifier" else ""), indices


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the source defines; `pointers`: its parameters that are pointers."""

    name: str
    node: Node
    body: Node
    is_kernel: bool
    is_device: bool
    pointers: dict[str, str]


@dataclass
class Source:
    """A parsed source. `splices`: places where a line break cuts a word in two."""

    data: bytes
    root: Node = field(init=False)

    def __post_init__(self) -> None:
        self.root = tree_sitter.Parser(CUDA).parse(self.data).root_node

    @cached_property
    def nodes(self) -> Sequence[Node]:
        """All nodes."""
        return list(walk(self.root))

    def of_type(self, *types: str) -> Iterator[Node]:
        """The nodes of some types."""
        return (node for node in self.nodes if node.type in types)

    @cached_property
    def macros(self) -> dict[str, str]:
        """Name to body of the macros without parameters."""
        return {
            text(node.child_by_field_name("name")): _uncommented(
                text(node.child_by_field_name("value"))
            )
            for node in self.of_type("preproc_def")
        }

    @cached_property
    def functions(self) -> Sequence[Function]:
        """The functions that have a body."""
        found = []
        for node in self.of_type("function_definition"):
            body = node.child_by_field_name("body")
            declarator = node.child_by_field_name("declarator")
            while declarator is not None and declarator.type != "function_declarator":
                declarator = declarator.child_by_field_name("declarator")
            if body is None or declarator is None or body.type != "compound_statement":
                continue
            name = declarator.child_by_field_name("declarator")
            marks = {child.type for child in node.children} | {
                text(child) for child in node.children if child.type.endswith("specifier")
            }
            kernel = "__global__" in marks or "__global__" in self._marks_before(node)
            device = kernel or "__device__" in marks
            pointers = _pointers(declarator.child_by_field_name("parameters"))
            found.append(
                Function(text(name).rpartition("::")[2], node, body, kernel, device, pointers)
            )
        return found

    def _marks_before(self, node: Node) -> str:
        body = node.child_by_field_name("body")
        return self.data[node.start_byte : body.start_byte if body else node.end_byte].decode(
            "utf-8", "replace"
        )

    @cached_property
    def barrier_functions(self) -> frozenset[str]:
        """Names of functions and macros of this source that hold a barrier of the block."""
        held = {
            text(node.child_by_field_name("name"))
            for node in self.of_type("preproc_def", "preproc_function_def")
            if re.search(r"\b__syncthreads", text(node.child_by_field_name("value")))
        }
        for function in self.functions:
            if any(is_barrier(node) for node in walk(function.body)) and not function.is_kernel:
                held.add(function.name)
        return frozenset(held)


def is_barrier(node: Node, also: frozenset[str] = frozenset(), warp: bool = False) -> bool:
    """True for a call that is a barrier of the block; with `warp`, of a warp too."""
    if node.type == "identifier":  # a macro without parameters, as a statement
        parent = node.parent
        return text(node) in also and parent is not None and parent.type == "expression_statement"
    if node.type != "call_expression":
        return False
    name = called(node)
    if name in BLOCK_BARRIERS or name in also or (warp and name in WARP_BARRIERS):
        return True
    function = node.child_by_field_name("function")
    if function is None or name not in SYNC_METHODS:
        return False
    whole = text(function)
    if re.search(r"tile|warp|coalesced|active", whole):
        return warp
    return function.type in ("field_expression", "qualified_identifier")


def _pointers(parameters: Node | None) -> dict[str, str]:
    found = {}
    for node in parameters.named_children if parameters is not None else ():
        declarator = node.child_by_field_name("declarator")
        if declarator is None or declarator.type not in ("pointer_declarator", "array_declarator"):
            continue
        if (name := declared_name(declarator)) is not None:
            found[text(name)] = text(node.child_by_field_name("type"))
    return found


def _uncommented(body: str) -> str:
    return re.sub(r"/\*.*?\*/|//.*", "", body, flags=re.S).strip()
