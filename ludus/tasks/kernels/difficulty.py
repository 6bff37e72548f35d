"""The difficulty of a kernel problem, as a tier: by its level, else by the code of its reference.

    level    tier      KernelBench's levels (Ouyang et al. 2025, arXiv:2502.10517)
    1        easy      one operator
    2        medium    several operators in a row, to be fused
    3, 4     hard      a whole architecture; a model of the Hugging Face hub

The code is parsed and never run. Without a level, operations in the bodies of functions are counted
(not in `__init__`, `get_inputs`, `get_init_inputs`):

    hard      loops, several modules of its own, a container (nn.Sequential, ...), a recurrent or an
              attention module, an import of a library of models, or more than MAX_MEDIUM operations
    easy      one layer or product and nothing else, or none and at most MAX_EASY operations
    medium    all others

An operation is a call of torch, of torch.nn.functional, of a layer of the module or of a tensor's
method, a product by `@`, and arithmetic between a layer's result and something else. Calls that
only change the shape do not count.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from ludus.core.sources import parse_module

EASY, MEDIUM, HARD = "easy", "medium", "hard"
TIERS = (EASY, MEDIUM, HARD)

LEVELS = {1: EASY, 2: MEDIUM, 3: HARD, 4: HARD}

MAX_EASY = 6
MAX_MEDIUM = 9
MAX_CODE = 200_000
"""Characters of a reference that is parsed."""

_NOT_PLAYED = {"__init__", "get_inputs", "get_init_inputs"}
_MODEL_LIBRARIES = {"transformers", "diffusers", "timm", "torchvision"}
_WHOLE = {
    "GRU", "LSTM", "ModuleDict", "ModuleList", "MultiheadAttention", "RNN", "Sequential",
    "Transformer", "TransformerDecoder", "TransformerDecoderLayer", "TransformerEncoder",
    "TransformerEncoderLayer",
}  # fmt: skip
_PRODUCTS = {
    "addmm", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d", "einsum", "linear", "matmul", "mm", "mv", "outer",
    "scaled_dot_product_attention",
}  # fmt: skip
_SHAPES = {
    "arange", "chunk", "clone", "contiguous", "device", "dim", "expand", "flatten", "float", "full",
    "items", "movedim", "numel", "ones", "ones_like", "permute", "repeat", "reshape", "shape",
    "size", "split", "squeeze", "stack", "swapaxes", "t", "tensor", "to", "transpose", "type",
    "unbind", "unflatten", "unsqueeze", "view", "zeros", "zeros_like",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Operations:
    """Content of a reference: numbers of layers and products, of other operations, and
    whether it is built of parts (loops, containers, whole networks, several modules)."""

    products: int
    others: int
    parts: bool

    @property
    def tier(self) -> str:
        if self.parts or self.products + self.others > MAX_MEDIUM:
            return HARD
        if self.products == 1 and not self.others:
            return EASY
        return EASY if not self.products and self.others <= MAX_EASY else MEDIUM


def parse(code: str) -> ast.Module:
    """Parse a reference, without running it. Errors: ValueError with what is wrong."""
    if len(code) > MAX_CODE:
        raise ValueError(f"has {len(code):,} characters; at most {MAX_CODE:,} are read")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes like "\d" in its texts
            return parse_module(code)
    except SyntaxError as error:
        raise ValueError(f"is not Python: {error.msg} in its line {error.lineno}") from None
    except (MemoryError, RecursionError):
        raise ValueError("is nested too deeply") from None


def tier_of(level: int | None, tree: ast.Module) -> str:
    """The tier by level, else by code. Errors: ValueError for an unknown level."""
    if level is None:
        return operations(tree).tier
    if level not in LEVELS:
        known = ", ".join(map(str, LEVELS))
        raise ValueError(f"has level {level}; known levels are {known}")
    return LEVELS[level]


def operations(tree: ast.Module) -> Operations:
    """Count the operations of a reference."""
    modules = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    parts = len(modules) > 1 or any(_is_part(node) for node in ast.walk(tree))
    products = others = 0
    for function in _played(tree):
        layered = False
        for node in ast.walk(function):
            parts |= isinstance(node, ast.For | ast.While)
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
                products += 1
            elif isinstance(node, ast.Call) and (name := _called(node)) is not None:
                own, last = name
                if last in _SHAPES:
                    continue
                if own or last in _PRODUCTS:
                    products, layered = products + 1, True
                else:
                    others += 1
        others += layered * sum(map(_is_arithmetic, ast.walk(function)))
    return Operations(products, others, parts)


def _is_arithmetic(node: ast.AST) -> bool:
    """True for an assignment or a result of arithmetic at its top: `x = x + self.bias`."""
    value = node.value if isinstance(node, ast.Assign | ast.Return | ast.AugAssign) else None
    if isinstance(node, ast.AugAssign):
        return True
    return isinstance(value, ast.BinOp) and not isinstance(value.op, ast.MatMult)


def _is_part(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in _WHOLE
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [node.module or ""]
    return any(name.partition(".")[0] in _MODEL_LIBRARIES for name in names)


def _played(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in tree.body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        for function in inner:
            if isinstance(function, ast.FunctionDef) and function.name not in _NOT_PLAYED:
                yield function


def _called(node: ast.Call) -> tuple[bool, str] | None:
    """True if a layer of the module is called, and the last name; None for other functions."""
    if not isinstance(node.func, ast.Attribute):
        return None
    owner = node.func.value
    own = isinstance(owner, ast.Name) and owner.id == "self"
    if isinstance(owner, ast.Name) and owner.id in ("math", "np", "numpy"):
        return None
    return own, node.func.attr
