"""Kernels: write a CUDA kernel that computes the same as a reference.

    user        Write a CUDA kernel that computes the same as this reference. ...
    assistant   ```cuda
                // launch: kernel<<<(n + 255) / 256, 256>>>(a, out, n)
                __global__ void kernel(const float *a, float *out, int n) { ... }
                ```
    user        passed: the values of all 6 trials are right

The kernel is analysed, compiled and run in the sandbox (`kernels.verify`). Tasks are those of the
readers `generated_kernels`, `kernelbench` and `cuda_engineer_archive`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field

from ludus.core.errors import DataError, EnvError, Unscorable
from ludus.core.seeds import derive_seed
from ludus.core.types import Message, Observation, StepResult, Task
from ludus.envs.actions import Guide
from ludus.envs.base import Env, NoExpert, set_limits
from ludus.envs.cuda.languages import LanguageName, SourceError, language_named
from ludus.envs.cuda.messages import kernel_of, message_of
from ludus.envs.cuda.reward import KernelReward, Measured
from ludus.envs.cuda.workers import Settings, worker_of
from ludus.kernels.verify.problem import KernelProblem
from ludus.kernels.verify.result import Verified, VerifyStatus
from ludus.tasks.kernels.generated import KINDS, problem

NOT_OURS = {VerifyStatus.UNSUPPORTED, VerifyStatus.BAD_REFERENCE}
"""Ends that say nothing of the kernel: no reward can be computed."""


class Cuda(Env):
    """A kernel for a problem; the reward is that of its named parts."""

    blocking: ClassVar[bool] = False  # a worker's thread computes
    max_turns: ClassVar[int] = 1

    def __init__(
        self,
        language: Annotated[
            LanguageName,
            Field(
                description="cuda: CUDA C++ with launch lines; templates: a restricted language."
            ),
        ] = "cuda",
        reward: Annotated[
            KernelReward, Field(description="The kind of reward, and its numbers.")
        ] = KernelReward(),  # noqa: B008 - frozen
        architecture: Annotated[
            str, Field(description="GPU for which kernels are compiled.")
        ] = "sm_90",
        trials: Annotated[
            int, Field(ge=2, le=100, description="Trials on fresh inputs; one more follows.")
        ] = 5,
        guide: Guide = True,
    ) -> None:
        self._language, self._reward, self.guide = language_named(language), reward, guide
        self._settings = Settings(architecture, trials)
        self._timed = False
        reward.check(timed=self._timed)
        low_high = reward.score_range(timed=self._timed)
        set_limits(self, 1, low_high, reward.success_at(timed=self._timed))
        self._task: Task | None = None
        self._parts: dict[str, float] = {}

    async def reset(self, task: Task) -> Observation:
        self._task, self._parts = None, {}
        self._problem = KernelProblem.of(task)
        try:
            face = await worker_of(self._settings).interface(self._problem, 0)
        except DataError as error:
            raise Unscorable(f"cuda: task {task.id}: {error}") from None
        self._face, self._task = face, task
        text = self._language.opening(task, face, self.guide)
        return Observation(messages=[Message(role="user", content=text)])

    async def step(self, action: Message) -> StepResult:
        if self._task is None:
            raise EnvError("cuda: the episode is over, or was never reset; call reset first")
        task, self._task = self._task, None
        try:
            source = self._language.expand(kernel_of(action.content, self._language), self._problem)
        except SourceError as error:
            measured, text = Measured(compiles=False, correct=False), f"no kernel: {error}"
        else:
            verified = await self._verified(task, source)
            measured = _measured(verified)
            text = f"{verified.status}: {verified.message}"
        scored = self._reward.score(measured, timed=self._timed)
        self._parts = dict(scored.parts)
        reply = Message(role="user", content=text)
        return StepResult(messages=[reply], reward=scored.value, terminated=True)

    async def _verified(self, task: Task, source: str) -> Verified:
        """Errors: Unscorable where the end says nothing of the kernel; ToolError."""
        seed = derive_seed(0, task.id, source)  # no kernel can know its inputs
        found = await worker_of(self._settings).verify(source, self._problem, seed)
        if found.status in NOT_OURS:
            raise Unscorable(f"cuda: task {task.id}: {found.status}: {found.message}")
        return found

    async def close(self) -> None:
        self._task = None

    async def world(self, task: Task) -> str | None:
        return KernelProblem.of(task).reference

    def scores(self) -> dict[str, float]:
        return dict(self._parts)

    def expert_action(self) -> str:
        kernels = self._language.expert(self._task) if self._task is not None else ()
        if not kernels:
            raise NoExpert("cuda: generated problems have an expert, while they are played")
        return message_of(kernels[0], self._language)

    @classmethod
    def tiers(cls) -> Sequence[str]:
        return tuple(dict.fromkeys(tier for tier, _ in KINDS.values()))

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        """A generated problem. The kinds of the tier take turns."""
        if tier is not None:
            cls.check_tier(tier)
        kinds = [kind for kind, (own, _) in KINDS.items() if tier in (None, own)]
        return problem(kinds[seed % len(kinds)], seed)


def _measured(verified: Verified) -> Measured:
    """The numbers of a verification."""
    compiled = verified.compiled is not None and verified.compiled.ok
    return Measured(
        compiles=compiled and verified.status is not VerifyStatus.BAD_LAUNCH,
        correct=verified.ok,
        speedup=verified.speedups.over_eager if verified.speedups else None,
        efficiency=1.0,
        quality=1.0,
        decoy=verified.status is VerifyStatus.REFUSED,
    )
