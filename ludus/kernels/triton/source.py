"""Rules for a submission in Triton: kernels, constants, and nothing that runs beside them.

    import triton
    import triton.language as tl

    # launch: add[cdiv(n, 256)](a, b, out, n, BLOCK=256)
    @triton.jit
    def add(a, b, out, n, BLOCK: tl.constexpr):
        ...

Triton runs a module as Python, and its interpreter runs a kernel as Python too. So the source is
read first, and may hold only what is known here: names that it defines, functions of
`triton.language`, and a tensor's methods. The jail stands behind these rules.
"""

from __future__ import annotations

import ast
import builtins
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ludus.core.errors import did_you_mean
from ludus.core.sources import parse_module
from ludus.kernels.triton.names import (
    ATTRIBUTES,
    BUILTINS,
    LANGUAGE,
    MATH,
    METHODS,
    UNSUPPORTED,
)
from ludus.kernels.verify.result import VerifyStatus

EXAMPLE = "# launch: kernel[cdiv(n, 256)](a, out, n, BLOCK=256)"
IMPORTS = frozenset({"import triton", "import triton.language as tl",
                     "from triton import language as tl"})  # fmt: skip
TRITON = frozenset({"cdiv", "next_power_of_2"})
MAX_DEPTH = 60
MAX_INTEGER = 1 << 64
STATEMENTS = (
    ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For, ast.While, ast.If, ast.Return, ast.Expr,
    ast.Pass, ast.Assert, ast.Break, ast.Continue,
)  # fmt: skip
EXPRESSIONS = (
    ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Call, ast.Name, ast.Attribute,
    ast.Subscript, ast.Slice, ast.Constant, ast.Tuple, ast.List, ast.IfExp, ast.keyword,
    ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context,
)  # fmt: skip
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f\x85\u2028\u2029\ud800-\udfff]")
FORBIDDEN = frozenset({*dir(builtins), "torch", "np", "numpy", "os", "sys"})
TUNERS = frozenset({"autotune", "heuristics", "Config"})


@dataclass(frozen=True, slots=True)
class SourceProblem:
    """A line that a submission may not have: it is refused, not run here (`unsupported`), or an
    author's slip (`compile_error`)."""

    line: int
    reason: str
    status: VerifyStatus = VerifyStatus.REFUSED

    def __str__(self) -> str:
        return f"line {self.line}: {self.reason}"


@dataclass(frozen=True, slots=True)
class TritonKernel:
    """A function under `@triton.jit`. `constants`: parameters annotated with `tl.constexpr`;
    `defaults` by name."""

    name: str
    line: int
    parameters: tuple[str, ...]
    constants: frozenset[str]
    defaults: Mapping[str, int | float]


@dataclass(frozen=True, slots=True)
class TritonSource:
    """Functions by name, and the first problem that was found."""

    kernels: Mapping[str, TritonKernel]
    problem: SourceProblem | None = None


def read_source(source: str) -> TritonSource:
    """Read a submission; what is wrong with it stands in the result."""
    if found := _CONTROL.search(source):
        line = source.count("\n", 0, found.start()) + 1
        return TritonSource({}, SourceProblem(line, "a control character in the source"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in strings
            module = parse_module(source)
        _check_depth(module)
    except SyntaxError as error:
        line = error.lineno or 1
        return TritonSource(
            {}, SourceProblem(line, f"not Python: {error.msg}", VerifyStatus.COMPILE_ERROR)
        )
    except (ValueError, RecursionError, MemoryError):
        return TritonSource({}, SourceProblem(1, "it cannot be read: it is nested too deep"))
    reader = _Module(module)
    problem = next(reader.problems(), None)
    return TritonSource(reader.kernels, problem)


def _check_depth(module: ast.Module) -> None:
    """Errors: RecursionError."""
    level: list[ast.AST] = [module]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            return
    raise RecursionError


class _Module:
    """The statements of a module."""

    def __init__(self, module: ast.Module) -> None:
        self._body = module.body
        self.kernels: dict[str, TritonKernel] = {}
        self._constants: set[str] = set()

    def problems(self) -> Iterator[SourceProblem]:
        functions = []
        for node in self._body:
            if isinstance(node, ast.FunctionDef):
                yield from self._signature(node)
                functions.append(node)
            else:
                yield from self._statement(node)
        known = {*self.kernels, *self._constants}
        for node in functions:
            yield from _Function(node, known).problems()

    def _statement(self, node: ast.stmt) -> Iterator[SourceProblem]:
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                return
            case ast.Import() | ast.ImportFrom():
                if ast.unparse(node) not in IMPORTS:
                    text = f"`{ast.unparse(node)[:80]}`: only `import triton` and "
                    text += "`import triton.language as tl` are possible"
                    yield SourceProblem(node.lineno, text)
                return
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if _constant(value):
                if _reserved(name):
                    yield SourceProblem(node.lineno, f"`{name}` is a name of the harness")
                self._constants.add(name)
                return
        yield SourceProblem(
            node.lineno,
            f"`{ast.unparse(node).splitlines()[0][:60]}` would run outside of a kernel: a module "
            "has imports, functions under @triton.jit, and constants: X = tl.constexpr(1)",
        )

    def _signature(self, node: ast.FunctionDef) -> Iterator[SourceProblem]:
        decorators = [ast.unparse(item) for item in node.decorator_list]
        if any(name in text for name in TUNERS for text in decorators):
            text = "@triton.autotune and @triton.heuristics do not run here: give the values in "
            yield SourceProblem(node.lineno, f"{text}the launch line", VerifyStatus.UNSUPPORTED)
        elif decorators != ["triton.jit"]:
            text = f"`{node.name}` needs the decorator @triton.jit, and no other"
            yield SourceProblem(node.lineno, text)
        given = node.args
        if given.vararg or given.kwarg or given.posonlyargs or given.kwonlyargs or node.returns:
            yield SourceProblem(node.lineno, f"`{node.name}` may have plain parameters only")
        if node.name in self.kernels or _reserved(node.name):
            yield SourceProblem(node.lineno, f"the name `{node.name}` is taken")
        constants = set()
        for parameter in given.args:
            if parameter.annotation is None:
                continue
            if ast.unparse(parameter.annotation) not in (
                "tl.constexpr",
                "triton.language.constexpr",
            ):
                text = f"`{parameter.arg}`: the only annotation is tl.constexpr"
                yield SourceProblem(parameter.lineno, text)
            constants.add(parameter.arg)
        names = tuple(parameter.arg for parameter in given.args)
        defaults = {}
        for name, value in zip(reversed(names), reversed(given.defaults), strict=False):
            number = _number(value)
            if number is None:
                yield SourceProblem(node.lineno, f"the default of `{name}` must be a number")
                continue
            defaults[name] = number
        self.kernels[node.name] = TritonKernel(
            node.name, node.lineno, names, frozenset(constants), defaults
        )


class _Function:
    """The body of a function."""

    def __init__(self, node: ast.FunctionDef, known: set[str]) -> None:
        self._node = node
        self._known = {*known, *BUILTINS, *(parameter.arg for parameter in node.args.args)}
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                self._known.add(part.id)

    def problems(self) -> Iterator[SourceProblem]:
        for parameter in self._node.args.args:
            if _reserved(parameter.arg):
                yield SourceProblem(parameter.lineno, f"`{parameter.arg}` cannot be a parameter")
        for statement in self._node.body:
            yield from self._checked(statement)

    def _checked(self, node: ast.AST) -> Iterator[SourceProblem]:
        line = getattr(node, "lineno", self._node.lineno)
        if not isinstance(node, (*STATEMENTS, *EXPRESSIONS)):
            what = type(node).__name__
            yield SourceProblem(line, f"a kernel may not have {what} ({_shown(node)})")
            return
        if isinstance(node, ast.Name):
            yield from self._name(node)
        elif isinstance(node, ast.Attribute):
            yield from self._attribute(node)
            if _root(node) is not None:
                return
        elif isinstance(node, ast.Constant):
            yield from _literal(node)
        elif isinstance(node, ast.Call):
            yield from _call(node)
        for child in ast.iter_child_nodes(node):
            yield from self._checked(child)

    def _name(self, node: ast.Name) -> Iterator[SourceProblem]:
        if isinstance(node.ctx, ast.Store) and _reserved(node.id):
            yield SourceProblem(node.lineno, f"`{node.id}` cannot be assigned")
        elif node.id not in self._known:
            hint = did_you_mean(node.id, self._known)
            text = f"`{node.id}` is not known to a kernel{hint}"
            slip = node.id not in FORBIDDEN and not node.id.startswith("_")
            status = VerifyStatus.COMPILE_ERROR if slip else VerifyStatus.REFUSED
            yield SourceProblem(node.lineno, text, status)

    def _attribute(self, node: ast.Attribute) -> Iterator[SourceProblem]:
        if not isinstance(node.ctx, ast.Load):
            yield SourceProblem(node.lineno, f"`{_shown(node)}` cannot be assigned")
            return
        root = _root(node)
        if root is None:
            if node.attr not in METHODS and node.attr not in ATTRIBUTES:
                text = f"`.{node.attr[:40]}` is no attribute or method of a tensor"
                yield SourceProblem(node.lineno, text)
            return
        parts = ast.unparse(node).split(".")[1:]
        if root == "triton" and parts[:1] == ["language"]:
            root, parts = "tl", parts[1:]
        if root == "triton":
            if len(parts) != 1 or parts[0] not in TRITON:
                text = f"`{_shown(node)}`: of triton a kernel has cdiv and next_power_of_2"
                yield SourceProblem(node.lineno, text)
        elif parts and (reason := UNSUPPORTED.get(parts[0])):
            text = f"tl.{parts[0]}: {reason} does not run here"
            yield SourceProblem(node.lineno, text, VerifyStatus.UNSUPPORTED)
        elif not _in_language(parts):
            hint = did_you_mean(".".join(parts), LANGUAGE)
            text = f"`{_shown(node)}` is not known here{hint}"
            plain = len(parts) == 1 and not parts[0].startswith("_")
            status = VerifyStatus.UNSUPPORTED if plain else VerifyStatus.REFUSED
            yield SourceProblem(node.lineno, text, status)


def _in_language(parts: list[str]) -> bool:
    if len(parts) == 2 and parts[0] == "math":
        return parts[1] in MATH
    return len(parts) == 1 and parts[0] in LANGUAGE


def _root(node: ast.Attribute) -> str | None:
    """`tl` or `triton`, where an attribute is one of theirs; else None."""
    inner: ast.expr = node
    while isinstance(inner, ast.Attribute):
        inner = inner.value
    return inner.id if isinstance(inner, ast.Name) and inner.id in ("tl", "triton") else None


def _call(node: ast.Call) -> Iterator[SourceProblem]:
    if not isinstance(node.func, ast.Name | ast.Attribute):
        yield SourceProblem(node.lineno, f"`{_shown(node.func)}` cannot be called")
    if any(keyword.arg is None for keyword in node.keywords):
        yield SourceProblem(node.lineno, "`**` is not possible in a call")


def _literal(node: ast.Constant) -> Iterator[SourceProblem]:
    value = node.value
    if isinstance(value, bytes | complex) or value is Ellipsis:
        yield SourceProblem(node.lineno, f"a kernel may not have {_shown(node)}")
    if isinstance(value, str) and re.search(r"^\s*(def|@)", value, re.M):
        # Triton looks for a function's first line in its text.
        yield SourceProblem(node.lineno, "a text with a line that begins with `def` or `@`")
    if isinstance(value, int) and abs(value) >= MAX_INTEGER:
        yield SourceProblem(node.lineno, "an integer has at most 64 bits")


def _reserved(name: str) -> bool:
    return name in ("tl", "triton", *BUILTINS) or name.startswith(("_", "ludus", "interpreter"))


def _constant(node: ast.expr) -> bool:
    match node:
        case ast.Call(func=func, args=[value], keywords=[]):
            return ast.unparse(func) == "tl.constexpr" and _number(value) is not None
    return _number(node) is not None


def _number(node: ast.expr) -> int | float | None:
    sign = 1
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        sign, node = -1, node.operand
    if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        assert isinstance(node.value, int | float)
        if isinstance(node.value, float) or abs(node.value) < MAX_INTEGER:
            return node.value if sign == 1 else -node.value
    return None


def _shown(node: ast.AST) -> str:
    return ast.unparse(node).splitlines()[0][:60]
