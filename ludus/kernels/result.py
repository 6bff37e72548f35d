"""The result of a compilation: errors with their places, or kernels with their resources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from ludus.kernels.cubin import read_cubin, readable
from ludus.kernels.diagnostics import Diagnostic, diagnostics_of, reported
from ludus.kernels.occupancy import MAX_THREADS_PER_BLOCK, Occupancy, occupancy


class CompileStatus(StrEnum):
    """End of a compilation. A limit or a crash says nothing about the code's correctness, but it
    has no cubin, and the same source ends so again."""

    OK = "ok"
    ERROR = "error"  # the compiler refused the source
    TIME_LIMIT = "time_limit"
    MEMORY_LIMIT = "memory_limit"
    OUTPUT_LIMIT = "output_limit"  # of the log, or of the cubin
    CRASHED = "crashed"  # the compiler ended by a signal


@dataclass(frozen=True, slots=True)
class KernelResources:
    """Resources of a compiled kernel.

    `registers` of a thread; bytes of static shared memory of a block, of a thread's stack frame,
    spilled stores and loads, of the module's `__constant__` variables, and of the parameters.
    `max_threads` of a block by `__launch_bounds__`, or None. `symbol` is the mangled name.
    """

    name: str
    symbol: str
    architecture: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    barriers: int
    constant_bytes: int
    parameter_bytes: int
    max_threads: int | None

    @property
    def spills(self) -> int:
        """Bytes of spilled stores and loads together."""
        return self.spill_store_bytes + self.spill_load_bytes

    def occupancy(
        self, threads: int, dynamic_shared_bytes: int = 0, architecture: str = ""
    ) -> Occupancy:
        """Theoretical occupancy with blocks of `threads`, on the architecture compiled for.

        Another `architecture` answers with this one's registers, so it is an estimate only.

        Errors: ConfigError for an unknown architecture or impossible numbers.
        """
        if self.max_threads is not None and threads > self.max_threads:
            bound = self.occupancy(self.max_threads)
            return replace(bound, blocks=0, warps=0, limited_by=("launch bounds",))
        shared = self.shared_bytes + dynamic_shared_bytes
        return occupancy(architecture or self.architecture, threads, self.registers, shared)

    def best_block(self, dynamic_shared_bytes: int = 0) -> int:
        """The smallest block size, a multiple of 32, with the highest theoretical occupancy."""
        sizes = range(32, (self.max_threads or MAX_THREADS_PER_BLOCK) + 1, 32)
        return max(
            sizes or [self.max_threads or 1],
            key=lambda size: (self.occupancy(size, dynamic_shared_bytes).warps, -size),
        )


@dataclass(frozen=True, slots=True)
class Compiled:
    """The result of a compilation.

    `seconds` of the compilation in the sandbox, that of the first time where `cached`. `log` is the
    compiler's, at most `output_bytes` of it. `compiler` such as `NVRTC 13.0.88`. `symbols` of the
    kernels whose names were asked for.
    """

    status: CompileStatus
    architecture: str
    compiler: str
    diagnostics: tuple[Diagnostic, ...] = ()
    kernels: tuple[KernelResources, ...] = ()
    cubin: bytes = b""
    log: str = ""
    seconds: float = 0.0
    cached: bool = False
    symbols: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True if there is a cubin."""
        return self.status is CompileStatus.OK

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        """The diagnostics that are errors."""
        return tuple(item for item in self.diagnostics if item.severity == "error")

    def kernel(self, name: str) -> KernelResources:
        """The kernel of a name, as the source has it or mangled. Errors: KeyError."""
        for item in self.kernels:
            if name in (item.name, item.symbol):
                return item
        raise KeyError(name)


def kernels_of(cubin: bytes, log: str, architecture: str) -> tuple[KernelResources, ...]:
    """The kernels of a cubin, in its order, with what ptxas reported in the log.

    Errors: DataError for bytes that are no cubin, or a kernel that the log lacks.
    """
    module, told = read_cubin(cubin), reported(log)
    return tuple(
        KernelResources(
            name=readable(item.symbol),
            symbol=item.symbol,
            architecture=architecture,
            registers=told[item.symbol].registers,
            shared_bytes=told[item.symbol].shared_bytes,
            stack_bytes=told[item.symbol].stack_bytes,
            spill_store_bytes=told[item.symbol].spill_store_bytes,
            spill_load_bytes=told[item.symbol].spill_load_bytes,
            barriers=told[item.symbol].barriers,
            constant_bytes=module.constant_bytes,
            parameter_bytes=item.parameter_bytes,
            max_threads=item.max_threads,
        )
        for item in module.kernels
        if item.symbol in told
    )


def failed(
    status: CompileStatus, architecture: str, compiler: str, message: str, log: str = ""
) -> Compiled:
    """A compilation without a cubin: the log's errors, or where it has none, the message."""
    found = diagnostics_of(log)
    if not any(item.severity == "error" for item in found):
        found.append(Diagnostic("error", message))
    return Compiled(status, architecture, compiler, tuple(found), log=log)
