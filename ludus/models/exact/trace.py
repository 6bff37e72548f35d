"""Records each operation's result for one token, to find the first difference of two passes.

Shape suffixes: R rows, L columns of the pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

DATA_MOVEMENT = {
    "_to_copy", "_unsafe_view", "alias", "broadcast_to", "cat", "chunk", "clone", "contiguous",
    "copy_", "detach", "expand", "expand_as", "flatten", "gather", "index", "index_copy_",
    "index_put_", "index_select", "movedim", "narrow", "permute", "repeat", "repeat_interleave",
    "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "stack", "t", "to",
    "transpose", "type_as", "unbind", "unflatten", "unsqueeze", "view", "view_as",
}  # fmt: skip
"""Operations that only move data; ignored, since a cache moves other data than a batch."""


@dataclass(frozen=True, slots=True)
class Record:
    """An operation's result for the token; `number` counts the operation within its module."""

    module: str
    kind: str
    operation: str
    number: int
    value: Tensor

    @property
    def key(self) -> tuple[str, str, int, tuple[int, ...]]:
        return self.module, self.operation, self.number, tuple(self.value.shape)

    def __str__(self) -> str:
        count = f" (call {self.number + 1})" if self.number else ""
        return f"{self.operation}{count} in {self.module or 'the model'} ({self.kind})"


class Tracer:
    """Traces one token through a model.

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
    def recording(self) -> Iterator[None]:
        """Record inside the block."""
        hooks = []
        for name, module in self._model.named_modules():
            hooks.append(module.register_forward_pre_hook(partial(self._pre_hook, name)))
            hooks.append(module.register_forward_hook(self._post_hook, always_call=True))
        try:
            with _Operations(self), _Attention(self):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _pre_hook(self, name: str, module: Any, args: Any) -> None:
        self._modules.append((name, type(module).__name__))

    def _post_hook(self, module: Any, args: Any, output: Any) -> None:
        self.record("output", output)
        self._modules.pop()

    def record(self, operation: str, result: Any) -> None:
        """Keep the token's part of a result, if there is one."""
        if self._muted or not isinstance(result, Tensor) or not result.is_floating_point():
            return
        module, kind = self._modules[-1] if self._modules else ("", type(self._model).__name__)
        number = self._counts[module, operation]
        self._counts[module, operation] += 1
        with _muted(self):
            part = self._token_part(result)
            if part is not None:
                self.records.append(Record(module, kind, operation, number, part.clone()))

    def _token_part(self, x: Tensor) -> Tensor | None:
        (rows, columns), (row, column) = self._shape, self._place
        if x.ndim >= 2 and x.shape[0] in (1, rows) and x.shape[1] == columns:
            return x[row if x.shape[0] == rows else 0, column]
        if x.ndim == 4 and x.shape[0] == rows and x.shape[2] == columns:
            return x[row, :, column]
        if x.ndim == 2 and x.shape[0] == rows * columns:
            return x[row * columns + column]
        return None


@contextmanager
def _muted(tracer: Tracer) -> Iterator[None]:
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
        if name not in DATA_MOVEMENT:
            self._tracer.record(name, result)
        return result


class _Attention(TorchFunctionMode):
    """Records fused attention as one operation, not its parts."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        with _muted(self._tracer):
            result = func(*args, **(kwargs or {}))
        self._tracer.record("scaled_dot_product_attention", result)
        return result


def first_difference(
    records: Sequence[Record], others: Sequence[Record]
) -> tuple[Record, Record] | None:
    """Returns the first operation of `records` whose result differs in `others`, with both results.

    Operations are matched by module, operation, call count and shape; unmatched ones are ignored.
    """
    by_key = {record.key: record for record in others}
    for record in records:
        other = by_key.get(record.key)
        if other is not None and not torch.equal(record.value, other.value):
            return record, other
    return None
