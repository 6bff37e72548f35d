"""ScienceWorld: 30 elementary science tasks in a small simulated world, on the authors' engine
(Wang et al., EMNLP 2022, arXiv:2203.07540).

    user        Your task is to find a(n) non-living thing. First, focus on the thing. Then, move it
                to the orange box in the living room.

                This room is called the hallway. In it, you see: ...
    assistant   open door to kitchen
    user        The door is now open.

An action that the engine cannot parse costs a step and is answered with an error. If a name is
ambiguous, the engine asks, and the next action is a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from scienceworld.constants import JAR_PATH

from ludus.core.errors import ConfigError, EnvError, did_you_mean
from ludus.core.types import Message, Observation, StepResult, Task, ToolCall, ToolSpec
from ludus.envs.actions import (
    Guide,
    MaxSteps,
    Texts,
    action_text,
    answer,
    printable,
)
from ludus.envs.base import NoExpert
from ludus.envs.java.machine import Engine, find_java
from ludus.envs.java.pool import JvmEnv, NumJvms, Pool, pool_of
from ludus.envs.java.scienceworld_commands import (
    COMMANDS,
    command_tool,
    read_command,
    shown,
    write_command,
)
from ludus.envs.java.scienceworld_tasks import EASIEST_FIRST, KINDS, SPLITS, Split, agentgym_task

ENGINE = Engine(
    name="scienceworld",
    jar=JAR_PATH,
    interface="scienceworld.runtime.pythonapi.PythonInterface",
    counters=(("util.UniqueIdentifier$", "count"),),
)

SIMPLIFICATIONS = (
    "teleportAction",
    "selfWateringFlowerPots",
    "openContainers",
    "openDoors",
    "noElectricalAction",
)

VIEWS: dict[str, Callable[[Any], Any]] = {
    "action_hint": lambda engine: {
        "possible_actions": [str(text) for text in engine.getPossibleActions()],
        "possible_objects": [str(text) for text in engine.getPossibleObjects()],
    },
    "goals": lambda engine: {"goals": str(engine.getGoalProgressStr())},
}
"""AgentGym's views of an episode, by its names of them."""

GUIDE = """You act in a small world to carry out a task of elementary science. Answer with one \
command a turn: {commands}, or a number, when asked which of several things you mean. Words in \
capitals stand for what the observations name. To focus on the wrong thing loses."""


class ScienceWorld(JvmEnv):
    """A task and variation of ScienceWorld, given by the task's data.

    Reward: the step's increase of the engine's score (0 to 100), divided by 100. Focusing on the
    wrong thing scores -100 in the engine and ends the episode; here it cancels the reward earned so
    far, so an episode's reward is 0 to 1. A policy that often focuses on the wrong thing can learn
    from this to never focus; `reward: success` avoids it, with 1 for the complete task and 0
    otherwise. `StepResult.info` has `success`, `score` (the engine's), `task`, `variation` and
    `num_steps`.
    """

    agentgym: ClassVar[str | None] = "scienceworld"
    success_at: ClassVar[float] = 0.999  # the sum of hundredths, rounded
    max_turns: ClassVar[int] = 30

    def __init__(
        self,
        simplifications: Annotated[
            list[str],
            Field(description=f"Any of {', '.join(SIMPLIFICATIONS)}; or easy, the engine's set."),
        ] = [],  # noqa: B006 - read only
        reward: Annotated[
            Literal["score", "success"],
            Field(description="score: points when earned; success: 1 at the end of the task."),
        ] = "score",
        max_steps: MaxSteps = None,
        texts: Texts = "ludus",
        guide: Guide = False,
        num_jvms: NumJvms = 4,
        heap_mb: Annotated[
            int, Field(ge=128, description="Maximum size of a JVM's heap, in MiB.")
        ] = 512,
    ) -> None:
        names = (*SIMPLIFICATIONS, "easy")
        if wrong := [name for name in simplifications if name not in names]:
            near = did_you_mean(wrong[0], names)
            raise ConfigError(f"{wrong[0]!r} is not a simplification of scienceworld{near}")
        find_java("scienceworld")
        self.simplifications = ",".join(simplifications)
        self.reward, self.max_steps, self.guide = reward, max_steps, guide
        self._tidy: Callable[[str], str] = _tidy if texts == "ludus" else str
        engine = replace(ENGINE, variant=self.simplifications)
        self._pool = pool_of(engine, num_jvms, heap_mb)

    async def reset(self, task: Task) -> Observation:
        await self.close()
        self._kind, self._variation = _named(task)
        self._taken = []
        self._total = 0
        description, look = self._open(lambda session: session.run(self._load))
        text = f"{description}\n\n{look}"
        if self._tidy is str:  # AgentGym's client joins the two so
            text = f"{description}\n{look}"
        if self.guide:
            commands = [shown(tool.name) for tool in self.tools() if tool.name != "choose"]
            text = f"{GUIDE.format(commands=', '.join(commands))}\n\n{text}"
        return Observation(
            messages=[Message(role="user", content=text)],
            info={
                "task": self._kind,
                "variation": self._variation,
                "task_description": description,
            },
        )

    def _load(self, engine: Any) -> tuple[str, str]:
        """Build the world. Returns the task's description and the first look, which takes a step of
        the world's time, as in the authors' `reset`."""
        if error := engine.load(self._kind, self._variation, self.simplifications, False):
            raise EnvError(f"scienceworld: {self._kind} {self._variation}: {error}")
        # Free the variations of all tasks, 10 MB that `load` creates and no step needs.
        getattr(engine, "taskMaker_$eq")(None)
        return self._tidy(engine.getTaskDescription()), self._tidy(engine.step("look around"))

    async def step(self, action: Message) -> StepResult:
        if self._session is None:
            raise EnvError(
                "scienceworld: the episode is over, or was never reset; call reset first"
            )
        text = printable(action_text(self, action))
        reply, score, completed = self._session.run(lambda engine: _take(engine, text, self._tidy))
        self._taken.append(text)
        success = score >= 100
        total = max(score, 0) if self.reward == "score" else 100 * success
        reward, self._total = (total - self._total) / 100, total
        terminated = completed or score < 0
        truncated = not terminated and len(self._taken) == self.max_steps
        ending = "" if not truncated else "\nout of steps."
        if terminated:
            ending = "\nThe task is completed." if success else "\nThe task has failed."
            if score < 0:
                ending = "\nThat was the wrong thing to focus on. The task has failed."
        if self._tidy is str:
            ending = ""
        if terminated or truncated:
            await self.close()
        return StepResult(
            messages=answer(action, f"{reply}{ending}"),
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            info={
                "success": success,
                "score": score,
                "task": self._kind,
                "variation": self._variation,
                "num_steps": len(self._taken),
            },
        )

    def tools(self) -> Sequence[ToolSpec]:
        teleports = _teleports(self.simplifications)
        return [command_tool(name) for name in COMMANDS if name != "teleport_to" or teleports]

    def text_of(self, call: ToolCall) -> str:
        return write_command(call)

    def call_of(self, action: str) -> ToolCall:
        return read_command(action)

    def expert_action(self) -> str:
        """The next action of the engine's gold path. Errors: NoExpert after leaving that path.

        If teleporting is allowed, it replaces walks between rooms, unless the shorter path misses
        the goal: growing or cooling may need the time.
        """
        if self._session is None:
            raise NoExpert("scienceworld: no episode is being played")
        return self._next_of(gold_path(self._pool, self._kind, self._variation))

    def inspect(self, what: str) -> Any:
        if what not in VIEWS or self._session is None:
            return super().inspect(what)
        return self._session.run(VIEWS[what])

    @classmethod
    def tiers(cls) -> Sequence[str]:
        """The tasks by the length of their gold path. `find-plant` has the training variations,
        `find-plant/dev` and `find-plant/test` the held-out variations."""
        find_java("scienceworld")
        return [
            name if split == "train" else f"{name}/{split}"
            for split in SPLITS
            for name in EASIEST_FIRST
        ]

    @classmethod
    def num_variations(cls, tier: str) -> int:
        """Number of variations of a tier; seeds from this number on repeat them."""
        return len(_variations(tier)[1])

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        """The tier's variation number `seed % num_variations(tier)`; no tier: tasks take turns."""
        chosen = tier or EASIEST_FIRST[seed % len(EASIEST_FIRST)]
        name, variations = _variations(chosen)
        number = seed if tier else seed // len(EASIEST_FIRST)
        return Task(
            id=f"scienceworld/{tier or 'all'}/{seed}",
            data={"task": name, "variation": variations[number % len(variations)]},
            tier=chosen,
            source="scienceworld",
        )

    @classmethod
    def agentgym_task(cls, index: int) -> Task:
        """The task with AgentGym's index, 0 to 4638. Errors: IndexError."""
        name, variation = agentgym_task(index)
        return Task(
            id=f"sciworld_{index}",
            data={"task": name, "variation": variation},
            tier=name,
            source="agentgym",
        )


def _named(task: Task) -> tuple[str, int]:
    """Returns task and variation of a task's data. Errors: EnvError."""
    name, variation = task.data.get("task"), task.data.get("variation")
    if not isinstance(name, str) or name not in KINDS:
        near = did_you_mean(str(name), KINDS)
        raise EnvError(f"scienceworld: task {task.id!r}: data.task {name!r} is not a task{near}")
    last = KINDS[name].num_variations - 1
    if type(variation) is not int or not 0 <= variation <= last:
        raise EnvError(
            f"scienceworld: task {task.id!r}: data.variation {variation!r} is not a variation of "
            f"{name}: 0 to {last}"
        )
    return name, variation


def _variations(tier: str) -> tuple[str, range]:
    name, slash, split = tier.partition("/")
    splits: dict[str, Split] = {split: split for split in SPLITS}
    if name not in KINDS or (slash and split not in splits):
        near = did_you_mean(name, KINDS) if name not in KINDS else did_you_mean(split, SPLITS)
        raise ConfigError(f"{tier!r} is not a tier of scienceworld{near}")
    return name, KINDS[name].variations(splits[split] if slash else "train")


def _take(engine: Any, text: str, tidy: Callable[[str], str]) -> tuple[str, int, bool]:
    """Take a step. Returns observation, score so far (-100 to 100), whether the task has ended."""
    reply = tidy(engine.step(text))
    return reply, round(100 * engine.getScore()), bool(engine.getCompleted())


def _tidy(text: str) -> str:
    """Strip the trailing spaces of the engine's lists."""
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def _teleports(simplifications: str) -> bool:
    return not {"teleportAction", "easy"}.isdisjoint(simplifications.split(","))


def teleported(path: Iterable[str]) -> list[str]:
    """Replace each walk of `open door to` and `go to` steps by one `teleport to`."""
    shorter: list[str] = []
    for walks, steps in groupby(path, lambda step: step.startswith(("open door to ", "go to "))):
        run = list(steps)
        rooms = [step.removeprefix("go to ") for step in run if step.startswith("go to ")]
        shorter += [f"teleport to {rooms[-1]}"] if walks and rooms else run
    return shorter


@lru_cache(maxsize=4096)
def gold_path(pool: Pool, kind: str, variation: int) -> tuple[str, ...]:
    """The engine's solution in the words of COMMANDS, computed in a separate JVM; this takes
    seconds for some tasks. Errors: EnvError.
    """
    simplifications = pool.engine.variant

    def search(engine: Any) -> tuple[str, ...]:
        engine.load(kind, variation, simplifications, True)
        steps = [" ".join(str(step).lower().split()) for step in engine.getGoldActionSequence()]
        path = [write_command(read_command(step)) for step in steps]
        if _teleports(simplifications):
            engine.load(kind, variation, simplifications, False)
            shorter = teleported(path)
            for step in ["look around", *shorter]:
                engine.step(step)
            if engine.getScore() >= 1:
                path = shorter
        getattr(engine, "taskMaker_$eq")(None)
        return tuple(path)

    session = pool.experts().open()
    try:
        return session.run(search)
    finally:
        session.close()
