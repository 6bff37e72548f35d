"""What ludus makes of a device's answers: values and times recorded, the process is a real one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from ludus.core.errors import ConfigError, ToolError
from ludus.kernels.benchmark.benchmarker import Benchmarker, Measured
from ludus.kernels.benchmark.process import Process
from ludus.kernels.benchmark.work import Parameter, Step, Work
from ludus.kernels.verify.compare import Tensor, Trial
from ludus.kernels.verify.problem import KernelProblem
from ludus.kernels.verify.result import Verified
from ludus.kernels.verify.scores import fast_p

FACTS = {
    "name": "NVIDIA H100 80GB HBM3", "architecture": "sm_90", "l2": 50 << 20, "memory": 80 << 30,
    "copied": 2.9e12,
}  # fmt: skip
STEADY = {
    "events": [0.01] * 10,
    "walls": [0.03] * 10,
    "eager": [0.02] * 10,
    "compiled": [0.015] * 10,
}
PROBLEM = KernelProblem("2 * relu(a) + b", "import torch", flops=2e6)
BUFFERS = tuple(Parameter(name) for name in ("a", "b", "out"))
WORK = Work((b"\x7fELF",), (Step(0, "kernel", (4, 1, 1), (256, 1, 1), 0, BUFFERS, 1),), {})


def trials(number: int = 4) -> list[Trial]:
    found = []
    for seed in range(number):
        draw = np.random.default_rng(seed)
        a, b = (draw.standard_normal(1000).astype(np.float32) for _ in range(2))
        out = 2 * np.maximum(a, 0) + b
        tensors = [
            Tensor(name, (1000,), "float32", value.tobytes())
            for name, value in (("a", a), ("b", b), ("out", out))
        ]
        found.append(Trial(tuple(tensors[:2]), {}, tensors[2]))
    return found


@asynccontextmanager
async def opened(
    monkeypatch: pytest.MonkeyPatch, trust: bool = True, **given: Any
) -> AsyncIterator[Benchmarker]:
    text = json.dumps({"facts": FACTS, **STEADY, **given})
    monkeypatch.setenv("LUDUS_TEST_RECORDED", text)
    module = "tests.kernels.benchmark.recorded"
    pair = Process(module), Process(module)
    async with Benchmarker(trust_references=trust, processes=pair) as benchmarker:
        yield benchmarker


async def measured(monkeypatch: pytest.MonkeyPatch, **given: Any) -> Measured:
    async with opened(monkeypatch, **given) as benchmarker:
        return await benchmarker.measure(WORK, PROBLEM, trials())


async def test_right_values_and_believable_times(monkeypatch: pytest.MonkeyPatch) -> None:
    found = await measured(monkeypatch)
    assert (found.status, found.passed, found.flags) == ("passed", 4, ())
    assert found.times is not None
    assert found.speedups is not None
    assert found.speedups.kernel_s == pytest.approx(1e-5)
    assert found.speedups.over_eager == pytest.approx(2.0)
    assert found.speedups.over_compile == pytest.approx(1.5)
    assert found.speedups.bandwidth == pytest.approx(12000 / 1e-5)
    assert found.speedups.bandwidth_share == pytest.approx(12000 / 1e-5 / 3.36e12)
    assert found.speedups.throughput == pytest.approx(2e11)
    assert "10.0 us on NVIDIA H100 80GB HBM3, 2.00 times as fast" in found.message


async def test_a_reference_that_is_not_trusted_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found = await measured(monkeypatch, trust=False)
    assert (found.status, found.speedups) == ("passed", None)
    assert found.times is not None
    assert "trust_references" in found.message


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("timed", "timed launch 10: out[0] is"),
        ("last", "trial 4 of 4, after the timing: out[0] is"),
        ("nan", "trial 2 of 4: out[0] is nan"),
    ],
)
async def test_wrong_values_have_no_times(
    monkeypatch: pytest.MonkeyPatch, wrong: str, text: str
) -> None:
    found = await measured(monkeypatch, wrong=wrong)
    assert (found.status, found.times, found.speedups) == ("wrong", None, None)
    assert text in found.message


@pytest.mark.parametrize(
    ("times", "text"),
    [
        ({"events": [0.0] * 10}, ""),
        ({"events": [0.001] * 10, "walls": [5.0] * 10}, "work outside of the timed stream"),
    ],
)
async def test_times_that_are_not_believed(
    monkeypatch: pytest.MonkeyPatch, times: dict[str, list[float]], text: str
) -> None:
    """12 kB in no time: below the resolution of events, so only large inputs can be impossible."""
    found = await measured(monkeypatch, **times)
    if text:
        assert (found.status, found.speedups) == ("passed", None)
        assert text in found.message
        assert text in found.unbelieved
    else:
        assert "not possible" in found.unbelieved
        assert found.speedups is None


async def test_a_speed_up_above_ten_is_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    found = await measured(monkeypatch, eager=[0.2] * 10)
    assert found.speedups is not None
    assert found.speedups.suspicious
    assert "20.0 times" in found.speedups.flags[0]


@pytest.mark.parametrize(
    ("answer", "status", "text"),
    [
        (
            ["error", "CUDA_ERROR_ILLEGAL_ADDRESS"],
            "crashed",
            "line 3: on the GPU: cuCtxSynchronize",
        ),
        (["error", "CUDA_ERROR_OUT_OF_MEMORY"], "memory_limit", "the GPU's memory is not enough"),
        (["wrong", ""], "wrong", "a write beside"),
    ],
)
async def test_errors_of_the_device(
    monkeypatch: pytest.MonkeyPatch, answer: list[str], status: str, text: str
) -> None:
    """The process is replaced after each: its context may be broken."""
    head = {"kind": answer[0], "name": answer[1], "call": "cuCtxSynchronize", "line": 3,
            "text": "a write beside the buffer `out`"}  # fmt: skip
    monkeypatch.setenv("LUDUS_TEST_RECORDED", "")
    async with opened(monkeypatch, answer=head) as benchmarker:
        for starts in (1, 2):
            found = await benchmarker.measure(WORK, PROBLEM, trials())
            assert found.status == status
            assert text in found.message
            assert benchmarker._worker.starts == starts


class Broken(Process):
    """A process that ends in one way, whatever it is asked."""

    def __init__(self, what: str, seconds: float = 60.0) -> None:
        super().__init__("tests.kernels.benchmark.dying")
        self._what, self._seconds = what, seconds

    async def ask(self, job: Any, blobs: Any, seconds: float) -> Any:
        return await super().ask({**job, "do": self._what}, blobs, self._seconds)


async def test_a_process_that_dies_is_a_crash_and_the_next_kernel_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with opened(monkeypatch) as benchmarker:
        await benchmarker.device()
        working, found = benchmarker._worker, []
        for broken in (Broken("abort"), Broken("hang", 1.0)):
            benchmarker._worker = broken
            found.append(await benchmarker.measure(WORK, PROBLEM, trials()))
            await broken.close()
        assert [item.status for item in found] == ["crashed", "time_limit"]
        assert found[0].message == "on the GPU: its process ended by signal 6"
        benchmarker._worker = working
        assert (await benchmarker.measure(WORK, PROBLEM, trials())).status == "passed"


async def test_answers_that_are_not_complete_are_our_own_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ToolError, match="outputs are not complete"):
        await measured(monkeypatch, blobs=3)
    with pytest.raises(ToolError, match="times are not complete"):
        await measured(monkeypatch, events=[])


async def test_without_a_gpu_it_says_what_is_missing() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    async with Benchmarker() as benchmarker:
        for _ in range(2):
            with pytest.raises(
                ConfigError, match=r"needs an NVIDIA GPU.*no NVIDIA driver|NO_DEVICE"
            ):
                await benchmarker.measure(WORK, PROBLEM, trials())


async def test_fast_p_counts_kernels_that_were_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = await measured(monkeypatch)
    results = [
        Verified(quick.status, "", speedups=quick.speedups),
        Verified(quick.status, ""),
        Verified((await measured(monkeypatch, wrong="nan")).status, ""),
    ]
    shares = [fast_p(results, p) for p in (-1, 0, 1, 1.99, 2.01)]
    assert shares == [2 / 3, 1 / 3, 1 / 3, 1 / 3, 0]
