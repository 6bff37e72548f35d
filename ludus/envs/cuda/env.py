"""Kernels: write a CUDA kernel that computes the same as a reference, and make it faster.

    user        Write a CUDA kernel that computes the same as this reference. ...
    assistant   ```cuda
                // launch: kernel<<<(n + 255) / 256, 256>>>(a, out, n)
                __global__ void kernel(const float *a, float *out, int n) { ... }
                ```
    user        wrong: trial 1 of 6: out[8] is 0.0, not 1.3
                Correct it. Answer with the whole kernel.
    assistant   ...

A turn's kernel is analysed, compiled and run in the sandbox (`kernels.verify`); what was found is
told. Turns belong to the role `generator` until a kernel is right, then to the `optimiser`: see
`StepResult.info`. Tasks are those of the readers of kernel problems.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ludus.core.errors import ConfigError, DataError, EnvError, ToolError, Unscorable
from ludus.core.seeds import derive_seed
from ludus.core.types import Message, Observation, StepResult, Task
from ludus.envs.actions import Guide
from ludus.envs.base import Env, NoExpert, set_limits
from ludus.envs.cuda.languages import LanguageName, SourceError, language_named
from ludus.envs.cuda.measure import efficiency_of, measured
from ludus.envs.cuda.messages import (
    FASTER,
    LEANER,
    MEND,
    OTHERWISE,
    kernel_of,
    message_of,
    report,
)
from ludus.envs.cuda.reward import KernelReward, Measured, Scored
from ludus.envs.cuda.workers import Settings, Worker, times_kernels, worker_of
from ludus.kernels.occupancy import check_compilable
from ludus.kernels.verify.problem import KernelProblem
from ludus.kernels.verify.result import Verified, VerifyStatus
from ludus.tasks.kernels.generated import KINDS, problem

GENERATOR, OPTIMISER = "generator", "optimiser"


@dataclass(frozen=True, slots=True)
class Attempt:
    """A turn: who wrote it, the kernel as written (None: there was none), what was found. `scored`
    is None where that says nothing of the kernel."""

    role: str
    kernel: str | None
    measured: Measured
    scored: Scored | None
    found: str


class Cuda(Env):
    """A kernel for a problem, in up to `rounds` turns.

    The episode ends early with a right kernel: where kernels are timed, of a speed-up of
    `stop_speedup`; else, of an efficiency of `stop_efficiency`.

    `info` of a reset or step has `role`, the role whose turn is next, and `conversation` where
    another role takes over: the messages that it begins with. A step's info also has `success`,
    `scores` and `explanation` of the episode so far.
    """

    blocking: ClassVar[bool] = False  # a worker's thread computes
    max_turns: ClassVar[int] = 1

    def __init__(
        self,
        language: Annotated[
            LanguageName,
            Field(description="cuda: CUDA C++ with launch lines; templates: a few templates."),
        ] = "cuda",
        rounds: Annotated[int, Field(ge=1, le=64, description="Most turns of an episode.")] = 1,
        stop_speedup: Annotated[
            float | None,
            Field(gt=0, description="A right kernel this much faster than eager PyTorch ends the "
            "episode; null: all rounds are played. Needs `timing: gpu`."),
        ] = None,
        stop_efficiency: Annotated[
            float | None,
            Field(ge=0, le=1, description="A right kernel of this efficiency ends the episode, "
            "where nothing is timed; null: any right kernel does."),
        ] = None,
        reward: Annotated[
            KernelReward, Field(description="The kind of reward, and its numbers.")
        ] = KernelReward(),  # noqa: B008 - frozen
        turn_rewards: Annotated[
            Literal["gains", "scores"],
            Field(description="gains: a turn earns what it adds to the best value so far, so an "
            "episode earns its best value. scores: each turn earns its own value (of `kind: "
            "kevin`), for algorithms with returns of turns, such as turn_grpo."),
        ] = "gains",
        unsupported: Annotated[
            Literal["exclude", "wrong"],
            Field(description="A kernel that the CPU does not run. exclude: its turn has no "
            "reward, and an episode of such turns alone is unscorable; wrong: it earns what a "
            "wrong kernel earns."),
        ] = "exclude",
        timing: Annotated[
            Literal["off", "auto", "gpu"],
            Field(description="gpu: time right kernels on this machine's GPU; auto: where there is "
            "one; off: never, so there are no speed-ups."),
        ] = "off",
        trust_references: Annotated[
            bool,
            Field(description="Run the tasks' references on the GPU, outside of the sandbox, for "
            "speed-ups: timing needs it. They are Python: read those of a data set first."),
        ] = False,
        architecture: Annotated[
            str, Field(description="GPU for which kernels are compiled.")
        ] = "sm_90",
        trials: Annotated[
            int, Field(ge=2, le=100, description="Trials on fresh inputs; one more follows.")
        ] = 5,
        run_s: Annotated[
            float,
            Field(gt=0, le=600, description="Processor seconds of building, and of running."),
        ] = 10.0,
        parallel: Annotated[
            int | None,
            Field(ge=1, le=1024, description="Kernels verified at once; null: 2 for each core."),
        ] = None,
        guide: Guide = True,
    ) -> None:  # fmt: skip
        self._language, self._reward, self.guide = language_named(language), reward, guide
        self._rounds, self._gains = rounds, turn_rewards == "gains"
        self._stop_speedup, self._stop_efficiency = stop_speedup, stop_efficiency
        self._excludes = unsupported == "exclude"
        check_compilable(architecture)
        if trust_references != (timing != "off"):
            raise ConfigError(
                "trust_references: nothing is timed: set timing: gpu"
                if trust_references
                else f"timing: {timing}: speed-ups need times of the references, which run on the "
                "GPU outside of the sandbox: set trust_references: true for tasks that you trust"
            )
        self._timed = timing != "off" and times_kernels(required=timing == "gpu")
        self._settings = Settings(architecture, trials, run_s, parallel, self._timed)
        self._refuse_without_effect(asked=timing != "off", always=timing == "gpu")
        low, high = reward.score_range(timed=self._timed, rounds=rounds)
        if not self._gains:
            high *= rounds
        set_limits(self, rounds, (low, high), reward.success_at(timed=self._timed))
        self._task: Task | None = None
        self._attempts: list[Attempt] = []

    def _refuse_without_effect(self, *, asked: bool, always: bool) -> None:
        """`asked`: kernels are timed, if not here then on a machine with a GPU; `always`: or the
        run ends. Errors: ConfigError."""
        self._reward.check(timed=self._timed, asked=asked, rounds=self._rounds)
        early = {"stop_speedup": self._stop_speedup, "stop_efficiency": self._stop_efficiency}
        given = [name for name, value in early.items() if value is not None]
        if given and self._rounds == 1:
            raise ConfigError(f"{given[0]}: an episode of one round has no earlier end: set rounds")
        if self._stop_efficiency is not None and always:
            raise ConfigError(
                "stop_efficiency: kernels are timed: set stop_speedup, or timing: off"
            )
        if not self._excludes and always:
            raise ConfigError("unsupported: what the CPU does not run runs on the GPU: remove it")
        if self._stop_speedup is not None and not asked:
            raise ConfigError("stop_speedup: nothing is timed: set timing: gpu, or stop_efficiency")
        if not self._gains and self._rounds == 1:
            raise ConfigError("turn_rewards: an episode of one round has one reward: set rounds")
        if not self._gains and self._reward.kind != "kevin":
            raise ConfigError(
                f"turn_rewards: scores of kind {self._reward.kind!r} add up, so failing for longer "
                "would earn more or less than failing once: set reward: {kind: kevin}, or gains"
            )

    @classmethod
    def works(cls, **args: Any) -> str:
        parallel = cls.at_once(**args)
        timing = {"gpu": ", timed on a GPU", "auto": ", timed on a GPU where there is one"}
        return f"{parallel} kernels at once in the sandbox{timing.get(args.get('timing', ''), '')}"

    @classmethod
    def at_once(cls, **args: Any) -> int:
        return args.get("parallel") or 2 * (os.cpu_count() or 1)

    async def reset(self, task: Task) -> Observation:
        self._task, self._attempts = None, []
        try:
            self._problem = KernelProblem.of(task)
            self._face = await self._worker.interface(self._problem, self._seed(task))
        except DataError as error:
            raise Unscorable(f"cuda: task {task.id}: {error}") from None
        self._task = task
        self._opening = self._language.opening(task, self._face, self.guide)
        message = Message(role="user", content=self._opening)
        return Observation(messages=[message], info={"role": GENERATOR})

    async def step(self, action: Message) -> StepResult:
        task = self._task
        if task is None:
            raise EnvError("cuda: the episode is over, or was never reset; call reset first")
        best = self._best
        self._attempts.append(attempt := await self._attempt(task, action.content))
        gained = attempt.scored.value if attempt.scored else None
        if gained is not None and best is not None and self._gains:
            gained = max(gained - best.value, 0.0)
        if done := len(self._attempts) == self._rounds or self._enough(attempt.measured):
            self._task = None
        if done and self._best is None:  # no turn says anything
            raise Unscorable(f"cuda: task {task.id}: {attempt.found.splitlines()[0]}")
        info: dict[str, Any]
        text, info = (attempt.found, {}) if done else self._go_on(attempt)
        reply = Message(role="user", content=text)
        return StepResult(
            messages=[reply], reward=gained, terminated=done, info=info | self._so_far()
        )

    async def _attempt(self, task: Task, message: str) -> Attempt:
        """Errors: Unscorable where no kernel can be tested; ToolError."""
        kernel, efficiency = None, None
        try:
            kernel = kernel_of(message, self._language)
            source = self._language.expand(kernel, self._face)
        except SourceError as error:
            found, numbers = f"no kernel: {error}", Measured(compiles=False, correct=False)
        else:
            verified = await self._verified(task, source)
            if verified.ok:
                parts = self._reward.parts
                efficiency = efficiency_of(source, verified, self._face, parts)
            found, numbers = report(verified, efficiency), measured(verified, efficiency)
            if verified.status is VerifyStatus.UNSUPPORTED and self._excludes:
                return Attempt(self._role, kernel, numbers, None, found)
        bases = [t.scored.base for t in self._attempts if t.scored and t.measured.correct]
        scored = self._reward.score(numbers, timed=self._timed, best=max(bases, default=None))
        return Attempt(self._role, kernel, numbers, scored, found)

    async def _verified(self, task: Task, source: str) -> Verified:
        """Errors: Unscorable, ToolError."""
        turn = len(self._attempts)  # a turn's report tells values: the next turn has other inputs
        seed = self._seed(task, source if self._language.tables else str(turn or ""))
        found = await self._worker.verify(source, self._problem, seed)
        if found.status is VerifyStatus.BAD_REFERENCE:
            raise Unscorable(f"cuda: task {task.id}: {found.status}: {found.message}")
        if found.ok and self._timed and found.speedups is None and not found.unbelieved:
            raise ToolError(
                f"cuda: task {task.id}: a right kernel has no speed-up: {found.message}"
            )
        return found

    @staticmethod
    def _seed(task: Task, source: str = "") -> int:
        """The seed of the inputs: no kernel can know them before it is written."""
        return derive_seed(0, task.id, source)

    def _enough(self, numbers: Measured) -> bool:
        """True for a kernel that needs no further turn."""
        if not numbers.correct:
            return False
        if self._timed:
            wanted = self._stop_speedup
            return wanted is not None and (numbers.speedup or 0.0) >= wanted
        return numbers.efficiency >= (self._stop_efficiency or 0.0)

    def _go_on(self, attempt: Attempt) -> tuple[str, dict[str, Any]]:
        """The text after a turn, and its info: whose turn is next."""
        wish = (FASTER if self._timed else LEANER) if attempt.measured.correct else MEND
        if attempt.scored is None:
            wish = OTHERWISE
        text, info = f"{attempt.found}\n{wish}", dict[str, Any](role=self._role)
        if self._role != attempt.role and attempt.kernel is not None:
            answer = message_of(attempt.kernel, self._language)
            talk = (("user", self._opening), ("assistant", answer), ("user", text))
            info["conversation"] = [{"role": role, "content": said} for role, said in talk]
        return text, info

    @property
    def _role(self) -> str:
        """The role whose turn is next."""
        right = any(attempt.measured.correct for attempt in self._attempts)
        return OPTIMISER if right else GENERATOR

    @property
    def _best(self) -> Scored | None:
        """The score of the best turn so far; None: no turn says anything yet."""
        scored = (attempt.scored for attempt in self._attempts if attempt.scored)
        return max(scored, key=lambda scored: scored.value, default=None)

    @property
    def _worker(self) -> Worker:
        return worker_of(self._settings)

    def _so_far(self) -> dict[str, Any]:
        return {
            "success": any(attempt.measured.correct for attempt in self._attempts),
            "scores": self.scores(),
            "explanation": self.explanation(),
        }

    def scores(self) -> dict[str, float]:
        """The parts of the best turn; the values of all turns that have one."""
        if (best := self._best) is None:
            return {}
        turns = enumerate(self._attempts, 1)
        values = {f"turn_{i}": a.scored.value for i, a in turns if a.scored}
        return {**best.parts, "best": best.value, **values}

    def explanation(self) -> str:
        lines = [
            f"turn {i} ({a.role}): {a.found.splitlines()[0]}\n"
            f"  {a.scored.explanation if a.scored else 'no value: this says nothing of the kernel'}"
            for i, a in enumerate(self._attempts, 1)
        ]
        return "\n".join(lines)

    async def close(self) -> None:
        self._task = None

    async def world(self, task: Task) -> str | None:
        return KernelProblem.of(task).reference

    def expert_action(self) -> str:
        kernels = self._language.expert(self._task) if self._task is not None else ()
        if not kernels:
            raise NoExpert("cuda: generated problems have an expert, while they are played")
        number = min(len(self._attempts), len(kernels) - 1)
        return message_of(kernels[number], self._language)

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
