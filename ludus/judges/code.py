"""Runs the code of an answer against tests, in the sandbox."""

from __future__ import annotations

import asyncio
import re
from typing import Annotated, Literal

from pydantic import Field

from ludus.core.once import Once
from ludus.core.types import Score, Spec, Task, Trajectory
from ludus.judges.base import final_answer
from ludus.judges.code_tests import Test, read_tests
from ludus.sandbox import SANDBOXES
from ludus.sandbox.base import Code, Limits, RunResult, RunStatus

JAIL = Spec(name="jail")
STOPPED = {RunStatus.TIME_LIMIT, RunStatus.MEMORY_LIMIT, RunStatus.OUTPUT_LIMIT}
MAX_CODE = 200_000
"""Limit of a program's length, in characters."""

UNSTEADY = re.compile(r"random|secrets|uuid|time|thread|process|hash|\bos\b|\bid\(|__import__")
"""A program with one of these may end otherwise the next time: its verdicts are not kept."""

_FENCE = re.compile(r"^[ \t]{0,3}```[ \t]*([\w+#.-]*)[^\n]*$", re.MULTILINE)


class CodeJudge:
    """Runs the last code block of the last message against the task's tests, in the sandbox.

    Tests are read from `task.answer` or `task.data`, in the forms of TACO and APPS, LiveCodeBench
    and HumanEval (see `code_tests`). The score is the share of tests that passed, or 1 only if all
    did (`all`). `all` stops at the first test that fails.

    The verdict of the same code in the same test is kept, unless a limit or a signal ended the run,
    or the code has the name of something that differs between runs, such as `random` or `time`.

    Parts: `passed` (share), `all`, `found` (the message has code).

    Errors: Unscorable if the task has no tests that can be read; ToolError, so that the episode is
    retried, where the sandbox itself fails: the code is not to blame.
    """

    def __init__(
        self,
        reward: Annotated[
            Literal["all", "share"], Field(description="1 if all tests pass, or their share.")
        ] = "all",
        run_s: Annotated[float, Field(gt=0, le=600, description="Seconds of one test.")] = 6.0,
        memory_mb: Annotated[int, Field(ge=16, description="Memory of one test, in MiB.")] = 512,
        max_tests: Annotated[
            int | None, Field(ge=1, description="Tests of a task to run; null: all.")
        ] = None,
        parallel: Annotated[
            int, Field(ge=1, le=1024, description="Tests at once, over all episodes.")
        ] = 8,
        sandbox: Annotated[Spec, Field(description="The sandbox that runs the code.")] = JAIL,
    ) -> None:
        self._reward, self._max_tests, self._parallel = reward, max_tests, parallel
        self._limits = Limits(run_s=run_s, memory_mb=memory_mb)
        self._sandbox = SANDBOXES.build(sandbox, "sandbox")
        self._verdicts = Once[str | None]()
        self._opened: asyncio.Task[object] | None = None
        self._slots = asyncio.Semaphore(parallel)

    async def __call__(self, task: Task, trajectory: Trajectory) -> Score:
        tests = read_tests(task)[: self._max_tests]
        code = last_code(final_answer(trajectory).content)
        if code is None or len(code) > MAX_CODE:
            told = "no code found" if code is None else f"{len(code):,} characters of code"
            return Score(value=0, parts={"passed": 0, "all": 0, "found": 0}, explanation=told)
        code = code.encode("utf-8", "replace").decode()  # lone surrogates
        await self._open()
        faults = await self._run(code, tests)
        passed = (len(tests) - len(faults)) / len(tests)
        if self._reward == "all" and faults:
            told = f"test {faults[0]}"
        else:
            told = f"{len(tests) - len(faults)} of {len(tests)} tests passed"
            told += f"; test {faults[0]}" if faults else ""
        whole = float(not faults)
        return Score(
            value=whole if self._reward == "all" else passed,
            parts={"passed": passed, "all": whole, "found": 1.0},
            explanation=told,
        )

    async def _open(self) -> None:
        opened = self._opened
        if opened is None or (opened.done() and (opened.cancelled() or opened.exception())):
            opened = self._opened = asyncio.ensure_future(self._sandbox.__aenter__())
        await asyncio.shield(opened)

    async def check(self) -> None:
        """Check that the sandbox answers. Errors: ToolError, ConfigError."""
        await self._open()
        await self.close()

    async def close(self) -> None:
        """Close the sandbox."""
        if self._opened is not None:
            self._opened = None
            await self._sandbox.__aexit__(None, None, None)

    async def _run(self, code: str, tests: list[Test]) -> list[str]:
        """Returns the faults in the order of the tests. Errors: ToolError."""

        async def run(test: Test) -> tuple[str | None, bool]:
            async with self._slots:
                program = Code(test.program(code), "python", test.given)
                result = await self._sandbox.run(program, self._limits)
            return _fault(result, test), steady and (result.exit_code or 0) >= 0 and (
                result.status not in STOPPED
            )

        async def fault(number: int, test: Test) -> str | None:
            told = await self._verdicts.of(test.digest(code), lambda: run(test))
            return f"{number} of {len(tests)}: {told}" if told else None

        steady = UNSTEADY.search(code) is None

        if self._reward == "share":
            told = await asyncio.gather(*(fault(i, test) for i, test in enumerate(tests, 1)))
            return [text for text in told if text]
        for number, test in enumerate(tests, 1):
            if text := await fault(number, test):
                return [text]
        return []


def _fault(result: RunResult, test: Test) -> str | None:
    """The fault of a test's run; None: it passed."""
    if result.status in STOPPED:
        return f"stopped, {result.status.value.replace('_', ' ')}"
    if result.status is not RunStatus.FINISHED:
        lines = result.stderr.strip().splitlines() or [f"exit code {result.exit_code}"]
        return lines[-1][:300]
    return test.fault(result.stdout)


def last_code(text: str) -> str | None:
    """The content of the last closed code block; None: there is none.

    A block of another language than Python (```json) does not count.
    """
    fences = list(_FENCE.finditer(text))
    blocks = [
        (opening[1].lower(), text[opening.end() + 1 : closing.start()])
        for opening, closing in zip(fences[::2], fences[1::2], strict=False)
    ]
    code = [body for language, body in blocks if language in ("", "python", "python3", "py")]
    return code[-1] if code and code[-1].strip() else None
