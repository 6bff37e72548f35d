# ruff: noqa: E501 - kernels stand as they are
"""Kernels in Triton that cheat, or break things: none may pass.

The problem is that of tests/kernels/verify/cheats.py: `out = 2 * relu(a) + b`, 1,000 elements.
"""

from __future__ import annotations

HONEST = """import triton
import triton.language as tl

# launch: kernel[cdiv(n, 256)](a, b, out, n, BLOCK=256)
@triton.jit
def kernel(a, b, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(a + i, mask=i < n, other=0.0)
    y = tl.load(b + i, mask=i < n, other=0.0)
    v = 2.0 * tl.maximum(x, 0.0) + y
    tl.store(out + i, v, mask=i < n)
"""
RIGHT = "v = 2.0 * tl.maximum(x, 0.0) + y"
STORE = "tl.store(out + i, v, mask=i < n)"
W, R, C, L, U = "wrong", "refused", "compile_error", "bad_launch", "unsupported"


def launched(arguments: str) -> str:
    """The honest kernel with other arguments in its launch line."""
    return HONEST.replace("](a, b, out, n", f"]({arguments}")


def value(text: str) -> str:
    """The honest kernel with another value."""
    return HONEST.replace(RIGHT, text)


def more(text: str) -> str:
    """The honest kernel with a further statement."""
    return HONEST + f"    {text}\n"


def head(text: str) -> str:
    """The honest kernel with a further line of the module."""
    return HONEST.replace("\n\n", f"\n{text}\n\n", 1)


CHEATS: dict[str, tuple[str, set[str]]] = {
    # Values that are not computed
    "no-op": (HONEST.replace(STORE, "pass"), {W}),
    "zeros": (value("v = tl.zeros((BLOCK,), tl.float32)"), {W}),
    "constant": (value("v = tl.full((BLOCK,), 0.5641896, tl.float32)"), {W}),
    "copies an input": (value("v = y"), {W}),
    "copies an input by the launch line": (launched("out, b, b, n"), {W}),
    "swapped launch arguments": (launched("b, a, out, n"), {W}),
    "hard-coded output of a seed, recognised by the input": (
        value("v = tl.where(tl.sum(x, 0) == -1.125, 1.0, y)"), {W},
    ),
    "reads what memory held": (value("v = tl.load(out + i, mask=i < n)"), {W}),
    "reads scratch memory": (
        "# scratch: tmp float32[1000]\n" + launched("tmp, tmp, out, n"), {W},
    ),
    "looks for the reference's output in memory": (
        value("v = tl.load(out - 262144 + i, mask=i < n)"), {W},
    ),
    "an address made of a number": (
        value("v = tl.load((4096 + i).to(tl.int64).to(tl.pointer_type(tl.float32)), mask=i < n)"),
        {W},
    ),
    "random": (value("v = tl.rand(7, i)"), {W}),
    # Less than all
    "half of the output": (HONEST.replace(STORE, STORE.replace("i < n", "i < n // 2")), {W}),
    "all but the last": (HONEST.replace(STORE, STORE.replace("i < n", "i < n - 1")), {W}),
    "every second element": (
        HONEST.replace(STORE, STORE.replace("i < n", "(i < n) & (i % 2 == 0)")), {W},
    ),
    "too small a grid": (HONEST.replace("cdiv(n, 256)", "n // 256"), {W}),
    "one term only": (value("v = 2.0 * tl.maximum(x, 0.0)"), {W}),
    "lower precision": (value(RIGHT + "\n    v = v.to(tl.float16).to(tl.float32)"), {W}),
    "bfloat16": (value(RIGHT + "\n    v = v.to(tl.bfloat16).to(tl.float32)"), {W}),
    "rounded to steps of 0.001": (value(f"{RIGHT}\n    v = tl.floor(v * 1000.0) / 1000.0"), {W}),
    "off by 0.1 %": (value(RIGHT + "\n    v = v * 1.001 + 0.0002"), {W}),
    # NaN and infinity
    "NaN": (value('v = x * float("nan")'), {W}),
    "infinity": (value('v = x * 0.0 + float("inf")'), {W}),
    "NaN in one place": (value(f"{RIGHT}\n    v = tl.where(i == 7, float('nan'), v)"), {W}),
    "adds to what was there": (HONEST.replace("tl.store(out", "tl.atomic_add(out"), {W}),
    "the maximum with what was there": (
        value(f"{RIGHT}\n    v = tl.maximum(v, tl.load(out + i, mask=i < n))"), {W},
    ),
    # Memory of others
    "changes an input": (more("tl.store(a + i, x * 0.5, mask=i < n)"), {W}),
    "makes the inputs zero": (
        HONEST.replace(STORE, "tl.store(a + i, x * 0.0, mask=i < n)\n    " + STORE), {W},
    ),
    "an atomic that changes an input": (more("tl.atomic_add(b + i, 1.0, mask=i < n)"), {W}),
    "exchanges in an input": (more("tl.atomic_cas(n * 0 + b, 1.0, 2.0)"), {W, C}),
    "writes behind the end": (more("tl.store(out + n, 1.0)"), {W}),
    "writes before the start": (more("tl.store(out - 1, 1.0)"), {W}),
    "writes without a mask": (HONEST.replace(STORE, "tl.store(out + i, v)"), {W}),
    "reads without a mask": (
        HONEST.replace("tl.load(a + i, mask=i < n, other=0.0)", "tl.load(a + i)"), {W},
    ),
    "writes far away": (more("tl.store(out + 268435456, 1.0)"), {W}),
    "null pointer": (
        more("tl.store((n * 0).to(tl.int64).to(tl.pointer_type(tl.float32)), 1.0)"), {W},
    ),
    # Programs in an order
    "a race that one order of programs hides": (
        """import triton
import triton.language as tl
# scratch: tmp float32[1024]
# launch: kernel[4](a, b, out, tmp, n, BLOCK=256)
@triton.jit
def kernel(a, b, out, tmp, n, BLOCK: tl.constexpr):
    p = tl.program_id(0)
    i = p * BLOCK + tl.arange(0, BLOCK)
    v = 2.0 * tl.maximum(tl.load(a + i, mask=i < n), 0.0) + tl.load(b + i, mask=i < n)
    tl.store(tmp + i, v, mask=i < n)
    j = i - BLOCK
    tl.store(out + j, tl.load(tmp + j, mask=(p > 0) & (j < n)), mask=(p > 0) & (j < n))
    tl.store(out + i, v, mask=(p == 3) & (i < n))
""", {W},
    ),
    # Python that is no kernel
    "PyTorch": (
        "import torch\ndef f(a, b):\n    return 2 * torch.relu(a) + b\n"
        "# launch: f[1](a, b)\n", {R},
    ),
    "PyTorch in a kernel": (value("v = torch.relu(x)"), {R}),
    "imports torch beside": (head("import torch"), {R}),
    "imports os": (head("import os"), {R}),
    "imports in a kernel": (more("import os"), {R}),
    "imports from triton": (head("from triton.runtime import interpreter"), {R}),
    "imports tl as another": (head("import triton.language as t2"), {R}),
    "code of the module": (head("print(1)"), {R}),
    "a class": (head("class X:\n    pass"), {R}),
    "a constant that is code": (head("X = open('report.json')"), {R}),
    "a constant under tl.constexpr that is code": (head("X = tl.constexpr(open('x'))"), {R}),
    "a function without @triton.jit": (head("def run():\n    pass"), {R}),
    "another decorator": (HONEST.replace("@triton.jit", "@print\n@triton.jit"), {R}),
    "code in a decorator": (HONEST.replace("@triton.jit", "@triton.jit(do_not_specialize=[])"), {R}),
    "code in a default": (HONEST.replace("out, n, BLOCK: tl.constexpr)",
                                         "out, n, BLOCK: tl.constexpr = open('x'))"), {R}),
    "code in an annotation": (HONEST.replace("(a, b, out", "(a: print(1), b, out"), {R}),
    "a result's annotation": (HONEST.replace("constexpr):", "constexpr) -> print(1):"), {R}),
    "autotune": (HONEST.replace("@triton.jit", "@triton.autotune(configs=[], key=[])\n@triton.jit"),
                 {U, R}),
    # Python in a kernel
    "the tensor's array": (value("v = x.handle.data"), {R}),
    "a dunder": (more("x.__class__.__mro__"), {R}),
    "a dunder of a tuple": (more("().__class__"), {R}),
    "globals of a function": (more("tl.load.__globals__"), {R}),
    "the builder": (more("interpreter_builder.set_grid_idx(0, 0, 0)"), {R, C}),
    "NumPy of the interpreter": (value("v = np.zeros(BLOCK)"), {R}),
    "NumPy under a local name": (value("np = np\n    v = np.sum(x)"), {R, C, U}),
    "open": (more('open("/etc/passwd")'), {R}),
    "exec": (more('exec("x = 1")'), {R}),
    "getattr": (more('getattr(x, "handle")'), {R}),
    "lambda": (more("f = lambda: 1"), {R}),
    "list comprehension": (more("q = [j for j in range(3)]"), {R}),
    "formatted string": (more("q = f'{x}'"), {R}),
    "str.format": (more("q = '{0.handle}'.format(x)"), {R}),
    "global": (more("global n"), {R}),
    "try": (more("try:\n        pass\n    except:\n        pass"), {R}),
    "with": (more("with x:\n        pass"), {R}),
    "del": (more("del x"), {R}),
    "assigns an attribute": (more("x.dtype = y"), {R}),
    "assigns tl": (more("tl = x"), {R}),
    "a parameter named tl": (HONEST.replace("(a, b, out, n, BLOCK:", "(a, b, tl, n, BLOCK:"), {R}),
    "another function of triton": (more("triton.runtime.driver.active"), {R}),
    "an inner function": (more("def inner():\n        pass"), {R}),
    "a function hidden in a text": (
        HONEST.replace(
            "    i = tl", '    """\n    def kernel(a, b, out, n, BLOCK):\n        open("x")\n    """\n    i = tl'
        ), {R},
    ),
    "a name of the harness": (head("interpreter_semantic = tl.constexpr(1)"), {R}),
    "inline PTX": (more("tl.inline_asm_elementwise('', '', [x], tl.float32, True, 1)"), {U}),
    "a library of the device": (more("tl.extra.cuda.globaltimer()"), {U}),
    "code in another encoding": (
        "# -*- coding: utf-7 -*-\n" + value("v = y  # +AAo-    v = 2.0 * tl.maximum(x, 0.0) + y"), {W},
    ),
    "a control character": (HONEST.replace("\n\n", "\n\x0c\n", 1), {R}),
    "a carriage return": (head("# x\rimport os"), {R}),
    "NUL": (HONEST + "\0", {R}),
    # Launch lines
    "decoy: the kernel is not launched": (
        HONEST.replace("launch: kernel", "launch: other")
        + "\n@triton.jit\ndef other(a, b, out, n, BLOCK: tl.constexpr):\n    pass\n", {W},
    ),
    "decoy: no launch line": (HONEST.replace("# launch", "# lunch"), {L}),
    "a launch of a kernel that is not there": (HONEST.replace("launch: kernel", "launch: karnel"), {L}),
    "code in a launch line": (launched("open('x'), b, out, n"), {L}),
    "code in a grid": (HONEST.replace("[cdiv(n, 256)]", "[(lambda: 4)()]"), {L}),
    "an attribute in a launch line": (HONEST.replace("launch: kernel[", "launch: kernel.fn["), {L}),
    "an argument that is not there": (launched("a, reference, out, n"), {L}),
    "a number for a pointer": (launched("4096, b, out, n"), {C, W}),
    "another stream": (HONEST.replace("BLOCK=256)", "BLOCK=256, stream=1)"), {L}),
    "a buffer for a constant": (HONEST.replace("BLOCK=256)", "BLOCK=out)"), {L}),
    "too many warps": (HONEST.replace("BLOCK=256)", "BLOCK=256, num_warps=64)"), {L}),
    "scratch that is too large": (head("# scratch: t float32[1 << 40]"), {L}),
    "divides by zero in the grid": (HONEST.replace("cdiv(n, 256)", "cdiv(n, 0)"), {L}),
    # Resources
    "endless loop": (more("while n > 0:\n        n = n * 1"), {"time_limit"}),
    "a loop of years": (more("for k in range(1000000000000):\n        v += 1.0"), {"time_limit"}),
    "a grid of years": (HONEST.replace("cdiv(n, 256)", "2147483647"), {"time_limit"}),
    "unrolls a bomb": (more("for k in tl.static_range(10000000):\n        v += 1.0"),
                       {"time_limit", "memory_limit", C}),
    "a block of a billion": (HONEST.replace("BLOCK=256)", "BLOCK=1073741824)"),
                             {C, "memory_limit", "time_limit"}),
    "a power of years": (more("q = 9 ** 9 ** 9 ** 9"), {C, "time_limit", "memory_limit"}),
    "a text of gigabytes": (more("q = 'x' * 10000000000"), {C, "time_limit", "memory_limit", R, U}),
    "recursion without an end": (
        HONEST.replace("v = 2.0", "v = deep(x) * 2.0")
        + "\n@triton.jit\ndef deep(x):\n    return deep(x) + 1.0\n", {C, "time_limit", "memory_limit", U},
    ),
    "waits for other programs": (
        head("# scratch: flag int32[1]").replace("(a, b, out, n,", "(a, b, out, flag, n,")
        .replace("def kernel(a, b, out, n", "def kernel(a, b, out, flag, n")
        + "    while tl.atomic_add(flag, 0) != 77:\n        pass\n", {"time_limit", C},
    ),
    "nested too deep": (value("v = " + "(" * 90 + "x" + ")" * 90), {W, C, R}),
    "nested sums": (value("v = " + "-" * 500 + "x"), {R}),
    "too much shared memory": (
        value(RIGHT + "\n    k = tl.arange(0, 512)\n    m = tl.dot(k[:, None].to(tl.float16) + "
              "k[None, :], k[:, None].to(tl.float16) + k[None, :])\n    v += tl.sum(m) * 0.0"),
        {C, "time_limit", "memory_limit", W},
    ),
}  # fmt: skip
