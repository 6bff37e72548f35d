"""ScienceWorld: thirty tasks of elementary science in a small simulated world (Wang et al., EMNLP
2022, arXiv:2203.07540), on the authors' engine.

    user        Your task is to find a(n) non-living thing. First, focus on the thing. Then, move it
                to the orange box in the living room.

                This room is called the hallway. In it, you see: ...
    assistant   open door to kitchen
    user        The door is now open.

An action that the engine cannot read costs a step and is told to the model. Where a name fits
several things, the engine asks, and the answer is a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from scienceworld.constants import JAR_PATH

from ludus.core.errors import ConfigError, EnvError, did_you_mean
from ludus.core.types import Message, Observation, StepResult, Task, ToolCall, ToolSpec
from ludus.envs.actions import action_text, answer, call_text, printable, tool_spec
from ludus.envs.base import Env, NoExpert
from ludus.envs.java.machine import Engine, find_java
from ludus.envs.java.pool import Pool, Session, pool_of
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

COMMANDS: dict[str, str] = {
    "look_around": "look around",
    "look_at": "look at {thing}",
    "look_in": "look in {thing}",
    "go_to": "go to {place}",
    "teleport_to": "teleport to {place}",
    "open": "open {thing}",
    "close": "close {thing}",
    "pick_up": "pick up {thing}",
    "put_down": "put down {thing}",
    "move": "move {thing} to {place}",
    "focus_on": "focus on {thing}",
    "activate": "activate {thing}",
    "deactivate": "deactivate {thing}",
    "use_on": "use {thing} on {other}",
    "use": "use {thing}",
    "connect": "connect {thing} to {other}",
    "disconnect": "disconnect {thing}",
    "pour": "pour {thing} in {place}",
    "dunk": "dunk {thing} in {place}",
    "mix": "mix {thing}",
    "read": "read {thing}",
    "eat": "eat {thing}",
    "flush": "flush {thing}",
    "inventory": "inventory",
    "task": "task",
    "wait_once": "wait1",
    "wait": "wait",
    "choose": "{number}",
}
"""The tools, and the engine's commands. A command is of the first tool that it fits."""

ALIASES = {
    "drop {thing}": "put_down",
    "examine {thing}": "look_at",
    "pour {thing} into {place}": "pour",
    "dunk {thing} into {place}": "dunk",
}
"""Other words that gold paths use, and their tools."""

DESCRIPTIONS = {
    "go_to": "Go to a place next to this one, through an open door.",
    "focus_on": "Tell what the task is about; the wrong thing ends the episode as lost.",
    "wait_once": "Let one step of time pass.",
    "wait": "Let ten steps of time pass.",
    "choose": "Answer the question which of several things is meant, by its number.",
}

GUIDE = """You act in a small world to carry out a task of elementary science. Answer with one \
command a turn: {commands}, or a number, when asked which of several things you mean. Words in \
capitals stand for what the observations name. To focus on the wrong thing loses."""


class ScienceWorld(Env):
    """One task and variation of ScienceWorld, or several: the task's data names them.

    Reward: what the step added to the engine's score, which is 0 to 100, divided by 100. Focusing
    on the wrong thing scores -100 in the engine and ends the episode; here it takes back what was
    earned, so that an episode's reward is 0 to 1. A policy that is likely to focus on the wrong
    thing learns from that to focus on nothing; with `reward: success` it gets 1 for the whole task
    and 0 for a part. `StepResult.info` has `success`, `score` (the
    engine's own), `task`, `variation` and `num_steps`.
    """

    agentgym: ClassVar[str | None] = "scienceworld"
    score_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    success_at: ClassVar[float] = 0.999  # the sum of hundredths, rounded
    max_turns: ClassVar[int] = 30

    def __init__(
        self,
        simplifications: Annotated[
            list[str],
            Field(description=f"Of {', '.join(SIMPLIFICATIONS)}; or easy, a set that fits."),
        ] = [],  # noqa: B006 - read only
        reward: Annotated[
            Literal["score", "success"],
            Field(description="Points as they are earned; or 1 at the end of the whole task."),
        ] = "score",
        max_steps: Annotated[
            int | None, Field(ge=1, description="Actions in an episode; null: no limit.")
        ] = None,
        guide: Annotated[
            bool, Field(description="Open with an explanation, for a model that reads English.")
        ] = False,
        num_jvms: Annotated[
            int, Field(ge=1, le=64, description="JVMs of a process; one plays many episodes.")
        ] = 2,
        heap_mb: Annotated[
            int, Field(ge=128, description="Most memory of a JVM's heap, in MiB.")
        ] = 512,
    ) -> None:
        known = (*SIMPLIFICATIONS, "easy")
        if wrong := [name for name in simplifications if name not in known]:
            raise ConfigError(
                f"{wrong[0]!r} is not a simplification of scienceworld"
                f"{did_you_mean(wrong[0], known)}"
            )
        find_java("scienceworld")
        self.simplifications = ",".join(simplifications)
        self.reward, self.max_steps, self.guide = reward, max_steps, guide
        engine = replace(ENGINE, variant=self.simplifications)
        self._pool = pool_of(engine, num_jvms, heap_mb)
        self._session: Session | None = None

    async def reset(self, task: Task) -> Observation:
        await self.close()
        self._kind, self._variation = _named(task)
        self._taken: list[str] = []
        self._total = 0
        session = self._pool.open()
        try:
            description, look = session.run(self._load)
        except BaseException:
            session.close()
            raise
        self._session = session
        text = f"{description}\n\n{look}"
        if self.guide:
            commands = [_shown(tool.name) for tool in self.tools() if tool.name != "choose"]
            text = f"{GUIDE.format(commands=', '.join(commands))}\n\n{text}"
        return Observation(
            messages=[Message(role="user", content=text)],
            info={"task": self._kind, "variation": self._variation},
        )

    def _load(self, engine: Any) -> tuple[str, str]:
        """Build the world: the task's description, and the first look (a step of the world's time,
        as in the authors' `reset`)."""
        if error := engine.load(self._kind, self._variation, self.simplifications, False):
            raise EnvError(f"scienceworld: {self._kind} {self._variation}: {error}")
        # All variations of all tasks, which `load` makes anew: 10 MB that no step needs.
        getattr(engine, "taskMaker_$eq")(None)
        return _tidy(engine.getTaskDescription()), _tidy(engine.step("look around"))

    async def step(self, action: Message) -> StepResult:
        if self._session is None:
            raise EnvError(
                "scienceworld: the episode is over, or was never reset; call reset first"
            )
        text = printable(action_text(self, action))
        reply, score, completed = self._session.run(lambda engine: _take(engine, text))
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

    async def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def tools(self) -> Sequence[ToolSpec]:
        teleports = _teleports(self.simplifications)
        return [_tool(name) for name in COMMANDS if name != "teleport_to" or teleports]

    def text_of(self, call: ToolCall) -> str:
        return write_command(call)

    def call_of(self, action: str) -> ToolCall:
        return read_command(action)

    def expert_action(self) -> str:
        """The next action of the engine's own gold path; NoExpert where another one was taken.

        Where teleporting is allowed, it takes the place of the walks from room to room, if that
        leads to the goal as well: what grows or cools may need the time.
        """
        if self._session is None:
            raise NoExpert("scienceworld: no episode is being played")
        path = gold_path(self._pool, self._kind, self._variation)
        done = len(self._taken)
        if list(path[:done]) != self._taken or done == len(path):
            raise NoExpert("scienceworld: there is a gold path from the start of a task only")
        return path[done]

    @classmethod
    def tiers(cls) -> Sequence[str]:
        """The tasks by the length of their gold path; a task has its variations for training, and
        as `find-plant/dev` and `find-plant/test` those that the authors hold out."""
        find_java("scienceworld")
        return [
            name if split == "train" else f"{name}/{split}"
            for split in SPLITS
            for name in EASIEST_FIRST
        ]

    @classmethod
    def num_variations(cls, tier: str) -> int:
        """Variations of a tier. Seeds below this number have one each; seeds above repeat them."""
        return len(_variations(tier)[1])

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        """The tier's variation number `seed % num_variations(tier)`; no tier: of all tasks."""
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
        """The task that AgentGym numbers `index`, 0 to 4638. Errors: IndexError."""
        name, variation = agentgym_task(index)
        return Task(
            id=f"sciworld_{index}",
            data={"task": name, "variation": variation},
            tier=name,
            source="agentgym",
        )


def _pattern(command: str) -> re.Pattern[str]:
    """What reads a command's arguments back."""
    text = re.sub(r"\{(\w+)\}", r"(?P<\1>.+)", command)
    return re.compile(text.replace("(?P<number>.+)", r"(?P<number>0|[1-9]\d{0,2})"))


PATTERNS = [
    *((_pattern(command), name) for command, name in ALIASES.items()),
    *((_pattern(command), name) for name, command in COMMANDS.items()),
]


def read_command(action: str) -> ToolCall:
    """The tool call that a command stands for. Errors: ValueError."""
    for pattern, name in PATTERNS:
        if match := pattern.fullmatch(action):
            arguments: dict[str, Any] = match.groupdict()
            if name == "choose":
                arguments = {"number": int(arguments["number"])}
            return ToolCall(name=name, arguments=arguments)
    raise ValueError(f"{action!r} is no command of scienceworld")


def write_command(call: ToolCall) -> str:
    """The command that a tool call stands for. Errors: ValueError."""
    if call.name not in COMMANDS:
        raise ValueError(f"there is no such tool{did_you_mean(call.name, COMMANDS)}")
    names = re.findall(r"\{(\w+)\}", COMMANDS[call.name])
    values = call_text(call, {name: int if name == "number" else str for name in names})
    return COMMANDS[call.name].format(**dict(zip(names, values, strict=True)))


def _tool(name: str) -> ToolSpec:
    command = COMMANDS[name]
    properties: dict[str, Any] = {
        argument: {"type": "string", "description": "As the observations name it."}
        for argument in re.findall(r"\{(\w+)\}", command)
    }
    if name == "choose":
        properties = {"number": {"type": "integer", "minimum": 0}}
    description = DESCRIPTIONS.get(name, f"The command: {_shown(name)}.")
    return tool_spec(name, description, **properties)


def _shown(name: str) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: match[1].upper(), COMMANDS[name])


def _named(task: Task) -> tuple[str, int]:
    """The task and variation that a task's data names. Errors: EnvError."""
    name, variation = task.data.get("task"), task.data.get("variation")
    if not isinstance(name, str) or name not in KINDS:
        near = did_you_mean(str(name), KINDS)
        raise EnvError(f"scienceworld: task {task.id!r}: data.task {name!r} is not a task{near}")
    most = KINDS[name].num_variations - 1
    if type(variation) is not int or not 0 <= variation <= most:
        raise EnvError(
            f"scienceworld: task {task.id!r}: data.variation {variation!r} is not 0 to {most}, "
            f"which {name} has"
        )
    return name, variation


def _variations(tier: str) -> tuple[str, range]:
    name, slash, split = tier.partition("/")
    splits: dict[str, Split] = {split: split for split in SPLITS}
    if name not in KINDS or (slash and split not in splits):
        near = did_you_mean(name, KINDS) if name not in KINDS else did_you_mean(split, SPLITS)
        raise ConfigError(f"{tier!r} is not a tier of scienceworld{near}")
    return name, KINDS[name].variations(splits[split] if slash else "train")


def _take(engine: Any, text: str) -> tuple[str, int, bool]:
    """One step: the observation, the score so far (-100 to 100), whether the task has ended."""
    reply = _tidy(engine.step(text))
    return reply, round(100 * engine.getScore()), bool(engine.getCompleted())


def _tidy(text: str) -> str:
    """Without the trailing blanks that the engine's lists have."""
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def _teleports(simplifications: str) -> bool:
    return not {"teleportAction", "easy"}.isdisjoint(simplifications.split(","))


def teleported(path: Iterable[str]) -> list[str]:
    """A path whose walks, `open door to` and `go to` again and again, are one `teleport to`."""
    shorter: list[str] = []
    for walks, steps in groupby(path, lambda step: step.startswith(("open door to ", "go to "))):
        taken = list(steps)
        rooms = [step.removeprefix("go to ") for step in taken if step.startswith("go to ")]
        shorter += [f"teleport to {rooms[-1]}"] if walks and rooms else taken
    return shorter


@lru_cache(maxsize=4096)
def gold_path(pool: Pool, kind: str, variation: int) -> tuple[str, ...]:
    """The engine's own solution, in the words of COMMANDS. It is looked for in a world of its own,
    which takes seconds in some tasks.

    Errors: EnvError.
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

    session = pool.open()
    try:
        return session.run(search)
    finally:
        session.close()
