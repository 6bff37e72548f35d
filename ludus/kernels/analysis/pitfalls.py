"""Pitfalls of kernels: barriers in branches, bank conflicts, uncoalesced access, divergence.

The rules speak where the index is linear in threadIdx.x; what they cannot see through, they leave.
"""

from __future__ import annotations

from collections.abc import Iterator

from ludus.kernels.analysis.findings import Finding
from ludus.kernels.analysis.races import RaceFinder
from ludus.kernels.analysis.safety import finding, place
from ludus.kernels.analysis.threads import BRANCHES, SIZES, Kernel, Stride
from ludus.kernels.analysis.tree import (
    LOOPS,
    Node,
    Source,
    ancestors,
    condition_of,
    is_barrier,
    subscript,
    text,
    walk,
)

BANKS, BANK_BYTES, WARP = 32, 4, 32
STATIC_SHARED_BYTES = 48 * 1024
MIN_WAYS = 2


def pitfall_findings(source: Source) -> Iterator[Finding]:
    """The findings of all rules, for every kernel and device function."""
    for function in source.functions:
        if not function.is_device:
            continue
        kernel = Kernel(source, function)
        yield from RaceFinder(kernel).run()
        yield from _barriers(kernel)
        yield from _accesses(kernel)
        yield from _divergence(kernel)
        if function.is_kernel:
            yield from _shared_size(kernel)


def _barriers(kernel: Kernel) -> Iterator[Finding]:
    body = kernel.function.body
    exits = [
        (node, branch)
        for node in walk(body)
        if node.type == "return_statement"
        for branch in ancestors(node, body)
        if branch.type == "if_statement" and _varies(kernel, branch)
    ]
    for node in walk(body):
        if not is_barrier(node, kernel.source.barrier_functions):
            continue
        above = list(ancestors(node, body))
        inside = [part for part in above if part.type in BRANCHES and _varies(kernel, part)]
        inside = [part for part in inside if not _holds(condition_of(part), node)]
        if inside:
            line, _ = place(inside[0])
            kind = "loop" if inside[0].type in LOOPS else "branch"
            reason = f"the {kind} of line {line} depends on the thread"
            yield finding(node, "barrier-in-branch", reason)
            continue
        for leaving, branch in exits:
            around = {part.id for part in above}
            if leaving.end_byte <= node.start_byte and branch.id not in around:
                line, _ = place(leaving)
                reason = f"threads return on line {line}, and do not reach this barrier"
                yield finding(node, "barrier-after-exit", reason)
                break


def _varies(kernel: Kernel, branch: Node) -> bool:
    condition = condition_of(branch)
    return condition is not None and kernel.varies(condition)


def _holds(node: Node | None, inner: Node) -> bool:
    return (
        node is not None and node.start_byte <= inner.start_byte and inner.end_byte <= node.end_byte
    )


def _accesses(kernel: Kernel) -> Iterator[Finding]:
    seen = set()
    for node in walk(kernel.function.body):
        if node.type != "subscript_expression":
            continue
        parent = node.parent
        if (
            parent is not None
            and parent.type == "subscript_expression"
            and (parent.child_by_field_name("argument") == node)
        ):
            continue
        name, indices = subscript(node)
        told = (name, tuple(map(text, indices)))
        if not indices or told in seen:
            continue
        if name in kernel.shared:
            found = _bank_conflict(kernel, node, name, indices)
        elif kernel.function.is_kernel and (
            name in kernel.function.pointers or _offset(kernel, name) is not None
        ):
            found = _uncoalesced(kernel, node, name, indices)
        else:
            continue
        if found is not None:
            seen.add(told)
            yield found


def _bank_conflict(kernel: Kernel, node: Node, name: str, indices: list[Node]) -> Finding | None:
    kind, sizes = kernel.shared[name]
    if len(indices) != len(sizes):
        return None
    total, width = Stride(0), 1
    for index, size in zip(reversed(indices), reversed(sizes), strict=True):
        stride = kernel.stride(index)
        if stride is None or width == 0:
            return None
        total = total.plus(Stride(stride.factor * width, stride.symbolic))
        known = kernel.constant(size)
        width = width * known if known is not None else 0
        if (
            width == 0
            and index.id != indices[0].id
            and any(kernel.stride(other) != Stride(0) for other in indices[: indices.index(index)])
        ):
            return None
    size_bytes = SIZES.get(kind.removeprefix("const ").removeprefix("unsigned "), BANK_BYTES)
    if total.symbolic:
        if total.factor % 2 or not total.factor:
            return None
        return finding(
            node, "bank-conflict", f"{text(node)[:60]}: the stride is a multiple of {total.factor}"
        )
    ways = bank_ways(total.factor, size_bytes)
    if ways < MIN_WAYS:
        return None
    reason = f"{text(node)[:60]}: {ways} threads of a warp share a bank (stride {total.factor})"
    return finding(node, "bank-conflict", reason)


def bank_ways(stride: int, size: int) -> int:
    """The largest number of different words of one bank that the threads of a request access.

    A warp's access of more than 4 bytes a thread is served in parts of 128 bytes.
    """
    unit = max(size, BANK_BYTES)
    group = BANKS * BANK_BYTES // unit
    hit: dict[int, set[int]] = {}
    for thread in range(min(group, WARP)):
        word = stride * thread * size // unit
        hit.setdefault(word % group, set()).add(word)
    return max(len(words) for words in hit.values())


def _uncoalesced(kernel: Kernel, node: Node, name: str, indices: list[Node]) -> Finding | None:
    if len(indices) != 1:
        return None
    stride = kernel.stride(indices[0])
    if stride is not None and (start := _offset(kernel, name)) is not None:
        before = kernel.stride(start)
        stride = stride.plus(before) if before is not None else None
    if stride is None or (not stride.symbolic and abs(stride.factor) <= 1):
        return None
    if stride.symbolic and not stride.factor:
        return None
    far = "by a factor known at run time" if stride.symbolic else f"{abs(stride.factor)} elements"
    reason = f"{text(node)[:60]}: neighbouring threads are {far} apart"
    return finding(node, "uncoalesced", reason)


def _offset(kernel: Kernel, name: str) -> Node | None:
    """The offset of a pointer that is made once from a parameter: `float *row = m + r * cols`."""
    value = kernel.single(name)
    if value is None or value.type != "binary_expression":
        return None
    left, right = (value.child_by_field_name(side) for side in ("left", "right"))
    plus = text(value.child_by_field_name("operator")) == "+"
    if plus and left is not None and text(left) in kernel.function.pointers:
        return right
    return None


def _divergence(kernel: Kernel) -> Iterator[Finding]:
    for node in walk(kernel.function.body):
        if node.type not in ("if_statement", "switch_statement", *LOOPS):
            continue
        condition = condition_of(node)
        if condition is None or not kernel.varies(condition):
            continue
        for part in _with_definitions(kernel, condition):
            if part.type != "binary_expression":
                continue
            operator = text(part.child_by_field_name("operator"))
            left, right = (part.child_by_field_name(side) for side in ("left", "right"))
            if operator not in ("%", "&") or left is None or right is None:
                continue
            stride = kernel.stride(left)
            if stride is None or stride.symbolic or not stride.factor or kernel.varies(right):
                continue
            value = kernel.constant(right)
            lanes = value is None or (value < WARP if operator == "%" else 0 < value < WARP - 1)
            if lanes and not (operator == "&" and value is None):
                reason = f"{text(part)[:60]} differs between the lanes of a warp"
                yield finding(node, "warp-divergence", reason)
                break


def _with_definitions(kernel: Kernel, condition: Node) -> Iterator[Node]:
    """The nodes of a condition, and of the values of its names: `bool odd = t & 1; if (odd)`."""
    for part in walk(condition):
        yield part
        if part.type == "identifier" and (value := kernel.single(text(part))) is not None:
            yield from walk(value)


def _shared_size(kernel: Kernel) -> Iterator[Finding]:
    total = 0
    for node in walk(kernel.function.body):
        if node.type != "declaration":
            continue
        for declarator in node.children_by_field_name("declarator"):
            for name, (kind, sizes) in kernel.shared.items():
                if text(declarator).partition("[")[0].strip() != name:
                    continue
                numbers = [kernel.constant(size) for size in sizes]
                count = 1
                for number in numbers:
                    count *= number or 0
                total += count * SIZES.get(kind, BANK_BYTES)
    if total > STATIC_SHARED_BYTES:
        reason = f"{total:,} bytes of static shared memory; a block has {STATIC_SHARED_BYTES:,}"
        yield finding(kernel.function.node, "shared-too-large", reason)
