"""BabyAI: instructions in a partially observed grid world, described in words (Chevalier-Boisvert
et al., ICLR 2019, arXiv:1810.08272). All levels are minigrid's.

An episode of GoToLocal, with primitive actions:

    user        mission: go to the red ball.
                blue box 1 left, red ball 2 forward 1 right. wall 4 forward.
    assistant   go forward
    user        red ball 1 forward 1 right. wall 3 forward.

Distances are in steps, relative to the agent's position and direction; nearest objects come first.
An action without effect is answered with `nothing changed.` and the view. An unknown action also
costs a step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ludus.core.errors import EnvError
from ludus.core.types import Message, Observation, StepResult, Task
from ludus.envs.actions import Guide, OneTool, Texts, act_tool, action_text, answer
from ludus.envs.babyai.agentgym import (
    COMPLETED,
    View,
    goal_text,
    image_of,
    opening_of,
    render,
    view_of,
)
from ludus.envs.babyai.expert import Expert
from ludus.envs.babyai.macros import Macros
from ludus.envs.babyai.world import (
    LEVELS,
    Seen,
    can_toggle,
    cell_at,
    describe_object,
    describe_world,
    heading,
    look,
    make_level,
    short_name,
    walls,
)
from ludus.envs.base import NoExpert

PRIMITIVES = {
    "turn left": 0,
    "turn right": 1,
    "go forward": 2,
    "pick up": 3,
    "drop": 4,
    "toggle": 5,
}
"""Names of minigrid's actions, in minigrid's order."""

ALIASES = {"move forward": "go forward", "forward": "go forward", "pickup": "pick up"}

GUIDE = """You are in a grid world and see what lies ahead of you. Distances are in steps: "red \
ball 2 forward 1 left" is 2 steps ahead and 1 step to your left. Answer with one action a turn: \
turn left, turn right, go forward, pick up, drop (what is directly in front of you), or toggle \
(open or close the door, or open the box, in front of you; a locked door needs the key of its \
color in your hands)."""

MACRO_GUIDE = """ You may also: go to OBJECT, which walks until you face it; go through DOOR, if \
it is open; toggle and go through DOOR. Name objects as the list of actions does."""


class BabyAI(OneTool):
    """A BabyAI level; `level` in a task's data overrides the configured level.

    Reward: at success 1 - 0.9 * steps / max_steps, else 0; so any positive reward is a success.
    Steps are minigrid's, including those within a macro action. `StepResult.info` has `success`,
    `num_steps` and `level`. `texts: agentgym` also sets AgentGym's actions (see `agentgym`).
    """

    agentgym: ClassVar[str | None] = "babyai"
    blocking: ClassVar[bool] = False  # a step takes microseconds, less than a thread switch
    cheap_reset: ClassVar[bool] = True
    several_processes: ClassVar[bool] = True
    success_at: ClassVar[float] = 1e-6

    def __init__(
        self,
        level: Annotated[
            str, Field(description="GoToLocal, ...; for tasks that name no level.")
        ] = "GoToLocal",
        actions: Annotated[
            Literal["primitive", "macro"],
            Field(description="macro adds `go to red ball 1` and `go through red door 1`."),
        ] = "primitive",
        max_steps: Annotated[
            int | None, Field(ge=1, description="minigrid steps per episode; null: the level's.")
        ] = None,
        texts: Texts = "ludus",
        guide: Guide = False,
    ) -> None:
        self.level = short_name(level)
        self.actions, self.max_steps, self.guide = actions, max_steps, guide
        self.texts = texts
        words = PRIMITIVES if (actions, texts) == ("primitive", "ludus") else ()
        self.tool = act_tool(words)
        self._world: Any = None
        self._done = False

    async def world(self, task: Task) -> str:
        """The mission and the whole grid: the agent sees only a part of it."""
        return describe_world(make_level(*self._place(task)))

    def _place(self, task: Task) -> tuple[str, int]:
        if "seed" not in task.data:
            raise EnvError(f"babyai: task {task.id!r} has no data.seed")
        return short_name(str(task.data.get("level", self.level))), task.data["seed"]

    async def reset(self, task: Task) -> Observation:
        self._level, self._seed = self._place(task)
        self._world = make_level(self._level, self._seed)
        if self.max_steps is not None:
            self._world.max_steps = self.max_steps
        self._taken: list[int] = []
        self._success = self._done = False
        self._expert: Expert | None = None
        self._macros, mission = None, str(self._world.mission)
        self._seen: View | None = None
        if self.texts == "agentgym":
            self._seen = opening_of(self._world)
            mission = goal_text(mission)
            text = f"Your goal: {mission}\n{self._seen.description}{self._seen.available}"
        else:
            self._macros = Macros(self._world) if self.actions == "macro" else None
            text = f"mission: {mission}.\n{self._view()}"
        if self.guide:
            text = f"{GUIDE}{MACRO_GUIDE if self._macros else ''}\n\n{text}"
        return Observation(
            messages=[Message(role="user", content=text)],
            info={
                "level": self._level,
                "mission": mission,
                "max_steps": int(self._world.max_steps),
            },
        )

    async def step(self, action: Message) -> StepResult:
        if self._world is None or self._done:
            raise EnvError("babyai: the episode is over, or was never reset; call reset first")
        text = action_text(self, action)
        if self._seen is not None:
            reward, remark = self._act_in_agentgym(text, self._seen)
        else:
            reward, remark = self._act(ALIASES.get(text, text))
        truncated = not self._success and self._world.step_count >= self._world.max_steps
        self._done = self._done or truncated
        if self._seen is not None:
            reply = f"{remark}{self._seen.available}"
        elif self._success:
            reply = "success."
        elif self._done:
            reply = "out of steps." if truncated else "failed."
        else:
            reply = f"{remark}{self._view()}"
        return StepResult(
            messages=answer(action, reply),
            reward=reward,
            terminated=self._done and not truncated,
            truncated=truncated,
            info={
                "success": self._success,
                "num_steps": int(self._world.step_count),
                "level": self._level,
            },
        )

    async def close(self) -> None:
        self._world, self._done = None, True

    def _act(self, text: str) -> tuple[float, str]:
        """Carry out an action. Returns its reward and a remark to put before the view."""
        if text in PRIMITIVES:
            reward, changed = self._primitive(PRIMITIVES[text])
            return reward, "" if changed else "nothing changed. "
        plan: list[int] | str = "no such action. "
        if self._macros is not None:
            plan = self._macros.plan(text)
        if isinstance(plan, str):
            self._world.step_count += 1
            return 0.0, plan
        reward, changed = 0.0, True
        for primitive in plan:
            reward, changed = self._primitive(primitive)
            if self._done or not changed:
                break
        return reward, "" if changed else "stopped on the way. "

    def _act_in_agentgym(self, text: str, view: View) -> tuple[float, str]:
        """Carry out one of AgentGym's actions. Returns its reward and the text before the list of
        actions. What is impossible takes no step, as there."""
        plan = view.plan(text)
        if isinstance(plan, str):
            return 0.0, plan
        reward, image = 0.0, view.image
        for primitive in plan:  # on past a success: AgentGym judges after the last step
            reward, _ = self._primitive(primitive)
            before, image = image, image_of(self._world)
            if image == before:
                break
        over = self._success or (self._done and self._world.step_count < self._world.max_steps)
        self._done = self._success  # a failed mission goes on there
        self._seen = view_of(self._world)
        return reward, self._seen.description + (COMPLETED if over else "")

    def _primitive(self, primitive: int) -> tuple[float, bool]:
        """Take a minigrid step. Returns its reward, and whether it changed anything."""
        before = self._state()
        _, reward, terminated, truncated, _ = self._world.step(primitive)
        self._taken.append(primitive)
        self._success = bool(terminated and reward > 0)
        self._done = bool(terminated or truncated)
        if self._macros is not None:
            self._macros.see(look(self._world))
        return (float(reward) if self._success else 0.0), before != self._state()

    def _state(self) -> tuple[Any, ...]:
        """The state that an action can change: the agent, its load, and the cell ahead."""
        world = self._world
        x, y = int(world.agent_pos[0]), int(world.agent_pos[1])
        ahead = cell_at(world, (x + heading(world)[0], y + heading(world)[1]))
        is_open = ahead is not None and ahead.type == "door" and ahead.is_open
        return x, y, world.agent_dir, id(world.carrying), id(ahead), is_open

    def _view(self) -> str:
        cells = look(self._world)
        name = describe_object
        if self._macros is not None:
            self._macros.see(cells)
            name = self._macros.name
        things = [c for c in cells if c.kind not in ("", "wall")]
        text = ", ".join(f"{name(c.content)} {c.place}" for c in things) or "nothing"
        if edges := walls(cells):
            text += ". " + ", ".join(f"wall {c.place}" for c in edges)
        if self._world.carrying is not None:
            text += f". carrying {name(self._world.carrying)}"
        if self._macros is not None:
            text += f".\nactions: {', '.join(self._available(cells))}"
        return text + "."

    def _available(self, cells: list[Seen]) -> list[str]:
        """Actions with an effect, in macro mode: primitives, then macros, nearest object first."""
        assert self._macros is not None
        ahead = next((c for c in cells if (c.forward, c.side) == (1, 0)), None)
        content = ahead.content if ahead is not None else None
        carrying = self._world.carrying is not None
        possible = {
            "turn left": True,
            "turn right": True,
            "go forward": content is None or content.can_overlap(),
            "pick up": content is not None and content.can_pickup() and not carrying,
            "drop": content is None and carrying,
            "toggle": can_toggle(self._world, content),
        }
        return [name for name, yes in possible.items() if yes] + self._macros.available(cells)

    def expert_action(self) -> str:
        if self._world is None or self._done:
            raise NoExpert("babyai: no episode is being played")
        if self._expert is None:
            self._expert = Expert(self._level, self._seed)
        advice = self._expert.action(self._taken)
        if self._seen is not None:
            if named := self._seen.advised(self._expert, advice):
                return named
            raise NoExpert(f"babyai: {self._level}, seed {self._seed}: AgentGym lacks the action")
        if self._macros is not None and (macro := self._macros.advised(self._expert, advice)):
            return macro
        words = [text for text, action in PRIMITIVES.items() if action == advice]
        if not words:
            raise NoExpert(f"babyai: {self._level}, seed {self._seed}: the bot believes it is done")
        return words[0]

    def inspect(self, what: str) -> Any:
        if what != "render" or self._world is None:
            return super().inspect(what)
        return render(self._world)

    @classmethod
    def tiers(cls) -> Sequence[str]:
        """All levels in minigrid's order. Last come the two that cannot be won from most seeds:
        they ask for two doors, and are lost when any door but the second is opened."""
        return sorted(LEVELS, key=lambda level: bool(re.fullmatch(r"OpenDoorsOrder.*Debug", level)))

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        """The task of a level and a seed, without an env spec: one env plays all levels."""
        level = short_name(tier or "GoToLocal")
        return Task(
            id=f"babyai/{level}/{seed}",
            data={"level": level, "seed": seed},
            tier=level,
            source="babyai",
        )
