"""ALFWorld: household tasks in text, on its own engine (Shridhar et al., ICLR 2021,
arXiv:2010.03768).

    user        You are in the middle of a room. Looking quickly around you, you see a cabinet 1,
                a countertop 1, and a fridge 1.
                Your task is to: put a cool apple in countertop.
    assistant   open fridge 1
    user        Nothing happens.
    assistant   go to fridge 1
    user        You arrive at fridge 1. The fridge 1 is closed.

The engine is TextWorld's, with the domain and the grammar of ALFWorld's package. Games are
downloaded if the user has them, else generated: see `games`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ludus.core.errors import EnvError
from ludus.core.types import Message, Observation, StepResult, Task, ToolCall, ToolSpec
from ludus.envs.actions import (
    Guide,
    MaxSteps,
    Texts,
    action_text,
    answer,
    command_text,
    parameters_of,
    pattern_of,
    tool_spec,
)
from ludus.envs.alfworld import games
from ludus.envs.alfworld.engine import Engine
from ludus.envs.alfworld.expert import SIGHT, Expert
from ludus.envs.base import Env, NoExpert

COMMANDS = {
    "go_to": ("go to {place}", "Walk to a place."),
    "open": ("open {place}", "Open what you stand before."),
    "close": ("close {place}", "Close what you stand before."),
    "take": ("take {thing} from {place}", "Take a thing in your hands, which have to be empty."),
    "move": ("move {thing} to {place}", "Put down what you hold, in or on a place."),
    "clean": ("clean {thing} with {place}", "Clean what you hold, at a sinkbasin."),
    "heat": ("heat {thing} with {place}", "Heat what you hold, at a microwave."),
    "cool": ("cool {thing} with {place}", "Cool what you hold, at a fridge."),
    "slice": ("slice {thing} with {knife}", "Slice a thing with the knife that you hold."),
    "use": ("use {thing}", "Switch on a lamp."),
    "examine": ("examine {thing}", "Look closely at a thing or a place."),
    "inventory": ("inventory", "See what you hold."),
    "look": ("look", "Look around."),
    "help": ("help", "Do nothing."),
}
"""Tool name to the command's form and its description."""

WORDS = {"thing": "A thing, such as apple 1.", "place": "Furniture, such as fridge 1."} | {
    "knife": "A knife, such as butterknife 1."
}
PUT = re.compile(r"put (.+?) (?:in/on|in|on|into|onto) (.+)")

OLDER_WORDS = (
    (re.compile(r"^You arrive at [^.]*\. "), ""),
    (re.compile(r"^You move the (.+) to the (.+)\.$"), r"You put the \1 in/on the \2."),
    (re.compile(r"^move (.+) to (.+)$"), r"put \1 in/on \2"),
)
"""The engine's words in those of AgentGym's server: ALFWorld 0.3.3, less the arrival."""

GUIDE = """You are in a room and have a task. Answer with one action a turn: go to PLACE, open \
PLACE, close PLACE, take THING from PLACE, move THING to PLACE, clean THING with PLACE, heat THING \
with PLACE, cool THING with PLACE, slice THING with KNIFE, use THING, examine THING, inventory, or \
look. Name things as they are listed, with their number. You can hold one thing. What lies in a \
closed place can be seen once you have gone there and opened it."""


class ALFWorld(Env):
    """A household task. Reward 1 when it is done, else 0; the tier is the task type.

    `StepResult.info` has `success`, `type` and `available_actions`, the sorted commands that are
    possible now. The engine answers an unknown command with `Nothing happens.`
    """

    agentgym: ClassVar[str | None] = "alfworld"
    blocking: ClassVar[bool] = True  # a game's first reset translates its PDDL
    max_turns: ClassVar[int] = 30

    def __init__(
        self,
        expert: Annotated[
            Literal["full", "search"],
            Field(description="full reads the state; search uses only observations."),
        ] = "full",
        repeat_task: Annotated[
            bool, Field(description="Repeat the task in every observation, for a small model.")
        ] = False,
        max_steps: MaxSteps = None,
        texts: Texts = "ludus",
        guide: Guide = False,
    ) -> None:
        self.expert, self.max_steps, self.guide = expert, max_steps, guide
        self.texts = texts
        self._repeat_task = repeat_task
        self._engine: Engine | None = None
        self._done = False

    async def reset(self, task: Task) -> Observation:
        game = games.game_of(task)
        if self._engine is None:
            self._engine = Engine()
        self._done, self._num_steps = True, 0  # no episode, if the engine fails below
        text = self._engine.reset(game).partition("\n\n")[2].replace("\n\n", "\n")
        self._done = False
        self._task_text = text.rpartition("\n")[2]
        self._type = str(game["traj_data"]["task_type"])
        self._expert = Expert(game["traj_data"], search=self.expert == "search")
        self._see()
        available = self._available()
        if self.texts == "agentgym":  # as its client shows it
            text += f"\nAVAILABLE ACTIONS: {','.join(available)}"
        return Observation(
            messages=[Message(role="user", content=f"{GUIDE}\n\n{text}" if self.guide else text)],
            info={"type": self._type, "available_actions": available},
        )

    def _available(self) -> list[str]:
        """The sorted commands that are possible now."""
        assert self._engine is not None
        if self.texts == "ludus":
            return self._engine.commands
        return sorted(older_words(text) for text in self._engine.commands if text != "help")

    async def step(self, action: Message) -> StepResult:
        if self._engine is None or self._done:
            raise EnvError("alfworld: the episode is over, or was never reset; call reset first")
        self._num_steps += 1
        text = action_text(self, action)
        if self.texts == "agentgym":
            reply = older_words(self._engine.step("?" if text == "help" else command_of(text)))
        else:
            reply = self._engine.step(command_of(text))
        self._see()
        success = self._engine.won
        truncated = not success and self._num_steps == self.max_steps
        self._done = success or truncated
        if self._repeat_task and not self._done:
            reply += f"\n{self._task_text}"
        return StepResult(
            messages=answer(action, reply),
            reward=float(success),
            terminated=success,
            truncated=truncated,
            info={
                "success": success,
                "type": self._type,
                "available_actions": self._available(),
            },
        )

    async def close(self) -> None:
        self._done = True
        self._engine = None

    def _see(self) -> None:
        if self.expert == "search":
            assert self._engine is not None
            self._expert.see(self._engine.facts(*SIGHT))

    def tools(self) -> Sequence[ToolSpec]:
        schemas = {n: {"type": "string", "description": text} for n, text in WORDS.items()}
        return [
            tool_spec(name, description, **{n: schemas[n] for n in parameters_of(form)})
            for name, (form, description) in COMMANDS.items()
        ]

    def text_of(self, call: ToolCall) -> str:
        if call.name not in COMMANDS:
            raise ValueError(f"there is no such tool; there are {', '.join(COMMANDS)}")
        return command_text(COMMANDS[call.name][0], call)

    def call_of(self, action: str) -> ToolCall:
        for name, (form, _) in COMMANDS.items():
            if match := pattern_of(form).fullmatch(action):
                return ToolCall(name=name, arguments=match.groupdict())
        raise ValueError(f"{action!r} is not a command of ALFWorld")

    def expert_action(self) -> str:
        if self._engine is None or self._done:
            raise NoExpert("alfworld: no episode is being played")
        action = self._expert.action(self._engine.facts())
        return older_words(action) if self.texts == "agentgym" else action

    @classmethod
    def tiers(cls) -> Sequence[str]:
        return games.tiers()

    @classmethod
    def check_tier(cls, tier: str) -> None:
        games.task_of(tier, 0)

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        """The game of a tier and a seed: downloaded if there are downloaded games, else generated.

        A tier is `[unseen/]TYPE[:ROOM]`: a task type, on the training floor plans or on the unseen
        ones, in all rooms or in a kitchen, livingroom, bedroom or bathroom only.
        """
        return games.task_of(tier, seed)


def older_words(text: str) -> str:
    """A command or a reply of the engine in the words of ALFWorld 0.3.3, which AgentGym serves."""
    for pattern, words in OLDER_WORDS:
        text = pattern.sub(words, text)
    return text


def command_of(text: str) -> str:
    """Convert `put X in/on Y`, used up to version 0.3, to the engine's `move X to Y`."""
    match = PUT.fullmatch(text)
    return f"move {match[1]} to {match[2]}" if match else text
