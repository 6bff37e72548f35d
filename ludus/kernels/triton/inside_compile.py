"""Runs inside the jail: Triton's compiler for NVIDIA's GPUs, without a GPU.

The source of this file becomes the module `ludus_triton_compiler` of the jail. A program reads
`source.txt` (which ludus has read and allowed) and `jobs.json`, and writes `answer.json` and one
cubin for each job: `0.cubin`, `1.cubin`, ...
"""

from __future__ import annotations

import json
import linecache
import os
import re
import sys
import types
from typing import Any, NoReturn

MODULE, FILE = "ludus_triton_compiler", "kernel.py"
REFUSED = 41
LOG = "ptxas.log"


def load_module(source: str) -> Any:
    """The module of a source; Triton reads its text again, from here."""
    linecache.cache[FILE] = (len(source), None, source.splitlines(True), FILE)
    module: Any = types.ModuleType("kernel")
    sys.modules["kernel"] = module
    module.__file__ = FILE
    module.__loader__ = object()  # for a file that is not on the disk
    exec(compile(source, FILE, "exec"), module.__dict__)
    return module


def compiled(module: Any, job: dict[str, Any], capability: int) -> Any:
    """Compile a kernel for the types and values of a job."""
    import triton
    from triton.backends.compiler import GPUTarget

    function = getattr(module, job["kernel"])
    names = list(job["signature"])
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in job["aligned"]}
    source = triton.compiler.ASTSource(function, job["signature"], job["constants"], attributes)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=job["options"])


def _place(module: Any, error: BaseException) -> tuple[str, int | None, int | None]:
    """Message, line and column of the innermost error that has them."""
    found: tuple[str, int | None, int | None] | None = None
    at: BaseException | None = error
    while at is not None:
        node, text = getattr(at, "node", None), getattr(at, "src", None)
        if node is not None and hasattr(node, "lineno"):
            starts = [
                item.def_file_line_number if hasattr(item, "def_file_line_number")
                else item.starting_line_number
                for item in vars(module).values()
                if isinstance(getattr(item, "src", None), str) and item.src == text
            ]  # fmt: skip
            message = getattr(at, "error_message", None)
            if starts and (message or found is None):
                said = str(message or at.__cause__ or "it does not compile")
                found = said, starts[0] + node.lineno - 1, node.col_offset + 1
        at = at.__cause__
    if found is None:
        return f"{type(error).__name__}: {error}", None, None
    return found


def run() -> NoReturn:
    """Compile all jobs; see the head of this file."""
    _settings(os.getcwd())
    with open("source.txt", encoding="utf-8") as file:
        source = file.read()
    with open("jobs.json", encoding="utf-8") as file:
        given = json.load(file)
    out = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(out, 1)
    facts: list[dict[str, Any]] = []
    answer: dict[str, Any] = {"facts": facts}
    module: Any = None
    try:
        module = load_module(source)
        for number, job in enumerate(given["jobs"]):
            before = os.path.getsize(LOG)
            done = compiled(module, job, given["capability"])
            sys.stdout.flush()
            with open(LOG, "rb") as log:
                log.seek(before)
                said = re.sub(r"^ptxas-\w+ info", "ptxas info", log.read().decode(), flags=re.M)
            with open(f"{number}.cubin", "wb") as cubin:
                cubin.write(done.asm["cubin"])
            names = ("name", "num_warps", "num_ctas", "shared", "global_scratch_size",
                     "profile_scratch_size")  # fmt: skip
            values = {name: getattr(done.metadata, name, 0) for name in names}
            facts.append({**values, "log": said})
    except BaseException as error:
        if isinstance(error, MemoryError):
            raise
        message, line, column = _place(module, error)
        answer |= {"error": message[:2000], "line": line, "column": column}
    with open("answer.json", "w", encoding="utf-8") as file:
        json.dump(answer, file)
    os._exit(REFUSED if "error" in answer else 0)


def _settings(folder: str) -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.update(
        TRITON_CACHE_DIR=f"{folder}/.cache", TRITON_ALWAYS_COMPILE="1", TRITON_DUMP_PTXAS_LOG="1"
    )
    os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"


WARM_UP = """import triton
import triton.language as tl
@triton.jit
def warm_up(a, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(a + i, mask=i < n, other=0.0)
    tl.store(out + i, x / (tl.sum(x, 0) + tl.max(x, 0) + tl.exp(x)), mask=i < n)
"""


def prepare() -> None:
    """Load Triton, and compile up to PTX. Here no file can be written, so its steps are called one
    by one; they differ between versions, and without them the first kernels only take longer."""
    import triton
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget

    _settings("/tmp")
    module = load_module(WARM_UP)
    signature = {"a": "*fp32", "out": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    source = triton.compiler.ASTSource(module.warm_up, signature, {"BLOCK": 64}, {})
    target = GPUTarget("cuda", 90, 32)
    try:
        backend = triton.compiler.make_backend(target)
        backend.hash()  # asks ptxas for its version, once
        options = backend.parse_options({})
        stages: dict[str, Any] = {}
        backend.add_stages(stages, options, source.language)
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        codegen = backend.get_codegen_implementation(options)
        made = source.make_ir(target, options, codegen, backend.get_module_map(), context)
        metadata: dict[str, Any] = {"target": target, **options.__dict__}
        for name, stage in stages.items():
            if name != "cubin":
                made = stage(made, metadata)
        triton.runtime.cache.triton_key()  # a hash of all of Triton's files
    except Exception as error:
        os.write(2, f"triton: no warm start: {error!r}\n".encode())
    del sys.modules["kernel"]


if __name__ == MODULE:
    prepare()
