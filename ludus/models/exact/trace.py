"""What each operation of a forward pass made of one token, to find where two passes part.

Shape suffixes: R rows, L columns of the pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

MOVING = {
    "_to_copy", "_unsafe_view", "alias", "broadcast_to", "cat", "chunk", "clone", "contiguous",
    "copy_", "detach", "expand", "expand_as", "flatten", "gather", "index", "index_copy_",
    "index_put_", "index_select", "movedim", "narrow", "permute", "repeat", "repeat_interleave",
    "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "stack", "t", "to",
    "transpose", "type_as", "unbind", "unflatten", "unsqueeze", "view", "view_as",
}  # fmt: skip
"""Operations that only move numbers, passed over: a cache moves other ones than a batch."""


@dataclass(frozen=True, slots=True)
class Record:
    """An operation's result at the token: `number` counts its kind within its module."""

    module: str
    kind: str
    operation: str
    number: int
    value: Tensor

    @property
    def key(self) -> tuple[str, str, int, tuple[int, ...]]:
        return self.module, self.operation, self.number, tuple(self.value.shape)

    def __str__(self) -> str:
        again = f" (its {self.number + 1}th there)" if self.number else ""
        return f"{self.operation}{again} in {self.module or 'the model'} ({self.kind})"


class Tracer:
    """Follows one token through a model.

    Args:
        shape: rows and columns of the pass.
        place: the token's row and column.
    """

    def __init__(self, model: Any, shape: tuple[int, int], place: tuple[int, int]) -> None:
        self.records: list[Record] = []
        self._model = model
        self._shape = shape
        self._place = place
        self._modules: list[tuple[str, str]] = []
        self._counts: Counter[tuple[str, str]] = Counter()
        self._muted = False

    @contextmanager
    def following(self) -> Iterator[None]:
        """Record within the block."""
        hooks = []
        for name, module in self._model.named_modules():
            hooks.append(module.register_forward_pre_hook(self._entering(name)))
            hooks.append(module.register_forward_hook(self._left, always_call=True))
        try:
            with _Operations(self), _Attention(self):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _entering(self, name: str) -> Any:
        def enter(module: Any, args: Any) -> None:
            self._modules.append((name, type(module).__name__))

        return enter

    def _left(self, module: Any, args: Any, output: Any) -> None:
        self.record("output", output)
        self._modules.pop()

    def record(self, operation: str, result: Any) -> None:
        """Keep the token's part of a result, where it has one."""
        if self._muted or not isinstance(result, Tensor) or not result.is_floating_point():
            return
        module, kind = self._modules[-1] if self._modules else ("", type(self._model).__name__)
        number = self._counts[module, operation]
        self._counts[module, operation] += 1
        with _quiet(self):
            part = self._part(result)
            if part is not None:
                self.records.append(Record(module, kind, operation, number, part.clone()))

    def _part(self, x: Tensor) -> Tensor | None:
        (rows, columns), (row, column) = self._shape, self._place
        if x.ndim >= 2 and x.shape[0] in (1, rows) and x.shape[1] == columns:
            return x[row if x.shape[0] == rows else 0, column]
        if x.ndim == 4 and x.shape[0] == rows and x.shape[2] == columns:
            return x[row, :, column]
        if x.ndim == 2 and x.shape[0] == rows * columns:
            return x[row * columns + column]
        return None


@contextmanager
def _quiet(tracer: Tracer) -> Iterator[None]:
    muted, tracer._muted = tracer._muted, True
    try:
        yield
    finally:
        tracer._muted = muted


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, tracer: Tracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracer = tracer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.").partition(".")[0]
        if name not in MOVING:
            self._tracer.record(name, result)
        return result


class _Attention(TorchFunctionMode):
    """Fused attention is one operation, whatever it is made of."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        with _quiet(self._tracer):
            result = func(*args, **(kwargs or {}))
        self._tracer.record("scaled_dot_product_attention", result)
        return result


def first_difference(
    mine: Sequence[Record], others: Sequence[Record]
) -> tuple[Record, Record] | None:
    """The first operation of `mine` whose result at the token differs in `others`.

    Operations are matched by module, kind and count; what one side alone does is passed over.
    """
    known = {record.key: record for record in others}
    for record in mine:
        other = known.get(record.key)
        if other is not None and not torch.equal(record.value, other.value):
            return record, other
    return None
