"""TextCraft: craft a goal item from a list of recipes (Prasad et al., 2023, arXiv:2311.05772).

    user        commands:
                craft 4 oak planks using 1 oak logs
                craft 6 oak slab using 3 oak planks
                craft 1 hopper using 5 iron ingot, 1 chest
                goal: craft oak slab
    assistant   get 1 oak log
    user        got 1 oak log.
    assistant   craft 4 oak planks using 1 oak log
    user        crafted 4 oak planks.
    assistant   craft 6 oak slab using 3 oak planks
    user        crafted 6 oak slab. goal reached.

The commands contain the recipes that the goal needs, and distractors. `oak logs` is a tag: any of
its items can be used (oak log, stripped oak wood, ...). `get` works only for items that cannot be
crafted. The recipes are Minecraft 1.16's, with 549 goals of depth 1 to 4 (144, 278, 116, 11; the
original TextCraft has 544: 125, 291, 117, 11).
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ludus.core.errors import ConfigError, EnvError, did_you_mean
from ludus.core.types import Message, Observation, StepResult, Task, ToolCall, ToolSpec
from ludus.envs.actions import Guide, MaxSteps, Texts, action_text, answer, call_text, tool_spec
from ludus.envs.base import Env, NoExpert
from ludus.envs.textcraft import agentgym
from ludus.envs.textcraft.recipes import Plan, Recipe, Table, load_table
from ludus.envs.textcraft.renaming import Names, draw_counts, draw_names

MAX_GET = 999
"""Maximum number of items of a `get`."""

COUNTED = re.compile(r"(\d{1,4}) (\S.*)")

GUIDE = """You craft items. Answer with one action a turn: "get 2 oak log" (only what cannot be \
crafted), "craft 4 oak planks using 1 oak log" (exactly as a command says; where it names a family \
such as oak logs or planks, use an item of it), or "inventory"."""


class TextCraft(Env):
    """A crafting goal. Reward 1 when it is crafted, else 0; the goal's depth is the tier.

    `StepResult.info` has `success` and `depth`. A task's data is `{"goal": item, "seed": n}`; the
    seed draws the shown recipes (if there are alternatives), the distractors and the order. With
    `"renamed": true` it also permutes the words of the items' names, and draws the recipes' counts.
    """

    agentgym: ClassVar[str | None] = "textcraft"
    blocking: ClassVar[bool] = False  # a step takes microseconds, less than a thread switch
    cheap_reset: ClassVar[bool] = True
    several_processes: ClassVar[bool] = True
    score_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    success_at: ClassVar[float] = 1.0
    max_turns: ClassVar[int] = 30

    def __init__(
        self,
        num_distractors: Annotated[
            int, Field(ge=0, le=500, description="Maximum number of commands not needed.")
        ] = 10,
        max_steps: MaxSteps = None,
        texts: Texts = "ludus",
        guide: Guide = False,
    ) -> None:
        self.num_distractors, self.max_steps, self.guide = num_distractors, max_steps, guide
        self.texts = texts
        self._table = load_table()
        self._goal: str | None = None
        self._done = False

    async def reset(self, task: Task) -> Observation:
        goal, seed = task.data.get("goal"), task.data.get("seed", 0)
        if not isinstance(goal, str) or goal not in self._table.recipes:
            near = did_you_mean(str(goal), self._table.recipes)
            raise EnvError(f"textcraft: task {task.id!r}: {goal!r} is not a goal{near}")
        self._goal, self._done, self._num_steps = goal, False, 0
        self._inventory: Counter[str] = Counter()
        # A string seed goes through SHA-512, so it does not depend on PYTHONHASHSEED.
        rng = random.Random(f"textcraft/{goal}/{seed}")
        self._plan = make_plan(self._table, goal, rng)
        self._names, self._renamed = Names({}), bool(task.data.get("renamed"))
        if self._renamed:
            if self.texts == "agentgym":
                where = f"textcraft: task {task.id!r}"
                raise EnvError(f"{where}: texts: agentgym has no renamed tasks; use depth-N/train")
            drawn = random.Random(f"textcraft/renamed/{goal}/{seed}")
            self._names = draw_names(drawn, self._plan.recipes)
            self._plan = draw_counts(drawn, self._plan, goal)
        commands = self._commands(rng)
        text = "\n".join(["commands:", *commands, f"goal: craft {goal}"])
        if self.texts == "agentgym":
            text = agentgym.opening(commands, goal)
        text = self._names.shown(text)
        return Observation(
            messages=[Message(role="user", content=f"{GUIDE}\n\n{text}" if self.guide else text)],
            info={"goal": self._names.shown(goal), "depth": self._table.depths[goal]},
        )

    def _commands(self, rng: random.Random) -> list[str]:
        """The plan's recipes and the distractors, shuffled."""
        needed = list(self._plan.recipes.values())
        others = [
            recipe
            for item in sorted(self._table.recipes)
            for recipe in self._table.recipes[item]
            if item not in self._plan.recipes
        ]
        commands = needed + rng.sample(others, min(self.num_distractors, len(others)))
        rng.shuffle(commands)
        return [str(recipe) for recipe in commands]

    async def step(self, action: Message) -> StepResult:
        if self._goal is None or self._done:
            raise EnvError("textcraft: the episode is over, or was never reset; call reset first")
        self._num_steps += 1
        reply, crafted = self._act(self._names.real(action_text(self, action)))
        success = crafted == self._goal
        truncated = not success and self._num_steps == self.max_steps
        self._done = success or truncated
        ending = " goal reached." if success else " out of steps." if truncated else ""
        if self.texts == "agentgym":
            ending = ""
        return StepResult(
            messages=answer(action, f"{self._names.shown(reply)}{ending}"),
            reward=float(success),
            terminated=success,
            truncated=truncated,
            info={"success": success, "depth": self._table.depths[self._goal]},
        )

    async def close(self) -> None:
        self._goal, self._done = None, True

    def _act(self, text: str) -> tuple[str, str | None]:
        """Returns the reply to an action, and the crafted item, if any."""
        if self.texts == "agentgym":
            outcome = agentgym.act(self._table, dict(self._inventory), text)
            self._inventory = Counter(outcome.inventory)
            return outcome.reply, outcome.crafted
        if text == "inventory":
            held = [f"{count} {item}" for item, count in sorted(self._inventory.items()) if count]
            return f"inventory: {', '.join(held) or 'nothing'}.", None
        if counted := COUNTED.fullmatch(text.removeprefix("get ")):
            if text.startswith("get "):
                return self._get(counted[2], int(counted[1])), None
        elif text.startswith("craft ") and " using " in text:
            made, _, used = text.removeprefix("craft ").partition(" using ")
            parts = [COUNTED.fullmatch(part.strip()) for part in [made, *used.split(",")]]
            if all(parts):
                (count, item), *ingredients = [(int(p[1]), p[2]) for p in parts if p]
                given: Counter[str] = Counter()
                for number, name in ingredients:
                    given[name] += number
                return self._craft(item, count, given)
        return "no such action. use get, craft or inventory.", None

    def _get(self, item: str, count: int) -> str:
        if item in self._table.tags:
            return f"{item} is one of {', '.join(self._table.tags[item])}."
        if item not in self._table.items:
            return f"there is no {item}."
        if item in self._table.recipes:
            return f"{item} has to be crafted."
        if not 1 <= count <= MAX_GET:
            return f"get 1 to {MAX_GET}."
        self._inventory[item] += count
        return f"got {count} {item}."

    def _craft(self, item: str, count: int, given: Counter[str]) -> tuple[str, str | None]:
        if item not in self._table.items:
            return f"there is no {item}.", None
        if item not in self._table.recipes:
            return f"{item} cannot be crafted. get it.", None
        for tag in sorted(given.keys() & self._table.tags.keys()):
            return f"{tag} is one of {', '.join(self._table.tags[tag])}.", None
        planned = self._plan.recipes.get(item)
        ways = [planned] if planned and self._renamed else self._table.recipes[item]
        if not any(fits(self._table, way, count, given) for way in ways):
            return f"there is no such recipe for {item}.", None
        missing = [name for name, needed in given.items() if self._inventory[name] < needed]
        if missing:
            have = ", ".join(f"{self._inventory[name]} {name}" for name in missing)
            return f"not enough. you have {have}.", None
        self._inventory -= given
        self._inventory[item] += count
        return f"crafted {count} {item}.", item

    def tools(self) -> Sequence[ToolSpec]:
        item = {"type": "string", "description": "The item's name."}
        count = {"type": "integer", "minimum": 1, "description": "How many."}
        used = {
            "type": "object",
            "additionalProperties": {"type": "integer", "minimum": 1},
            "description": 'What is used up, e.g. {"oak log": 1}.',
        }
        return [
            tool_spec("get", "Get items that cannot be crafted.", item=item, count=count),
            tool_spec("craft", "Carry out a recipe.", item=item, count=count, ingredients=used),
            tool_spec("inventory", "See what you have."),
        ]

    def text_of(self, call: ToolCall) -> str:
        if call.name == "inventory":
            call_text(call, {})
            return "inventory"
        if call.name == "get":
            item, count = call_text(call, {"item": str, "count": int})
            return f"get {count} {item}"
        if call.name == "craft":
            item, count, _ = call_text(call, {"item": str, "count": int, "ingredients": dict})
            used = ", ".join(f"{n} {name}" for name, n in call.arguments["ingredients"].items())
            return f"craft {count} {item} using {used}"
        raise ValueError("there is no such tool; there are get, craft and inventory")

    def call_of(self, action: str) -> ToolCall:
        verb, _, rest = action.partition(" ")
        if verb == "inventory":
            return ToolCall(name="inventory")
        made, _, used = rest.partition(" using ")
        arguments: dict[str, Any] = _count_item(made)
        if verb == "craft":
            parts = [_count_item(part) for part in used.split(", ")]
            arguments["ingredients"] = {part["item"]: part["count"] for part in parts}
        return ToolCall(name=verb, arguments=arguments)

    def expert_action(self) -> str:
        if self._goal is None or self._done:
            raise NoExpert("textcraft: no episode is being played")
        return self._names.shown(self._plan.actions(self._goal, self._inventory)[0])

    @classmethod
    def tiers(cls) -> Sequence[str]:
        return [f"depth-{depth}" for depth in load_table().goals]

    @classmethod
    def check_tier(cls, tier: str) -> None:
        _goals(tier)

    @classmethod
    def num_goals(cls, tier: str) -> int:
        """Number of goals of a tier. Seeds below it have distinct goals; seeds above repeat them
        with other distractors, so a held-out set of new goals needs seeds below it."""
        return len(_goals(tier))

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        """The tier's goal number `seed % num_goals(tier)`; no tier: goals of all depths.

        `depth-2/heldout` has a part of `depth-2`'s goals, `depth-2/train` the others, and
        `depth-2/renamed` these with other words and counts. `depth-2:40` has the first 40 goals of
        `depth-2`; goals are in pseudo-random order.
        """
        goals = _goals(tier)
        goal = goals[seed % len(goals)]
        renamed = {"renamed": True} if "/renamed" in (tier or "") else {}
        return Task(
            id=f"textcraft/{tier or 'all'}/{seed}",
            data={"goal": goal, "seed": seed, **renamed},
            tier=f"depth-{load_table().depths[goal]}",
            source="textcraft",
        )


def _goals(tier: str | None) -> Sequence[str]:
    """The goals of a tier; `depth-2:40` are the first 40 of `depth-2`."""
    by_tier = {f"depth-{depth}": goals for depth, goals in load_table().goals.items()}
    if tier is None:
        return [goal for goals in by_tier.values() for goal in goals]
    heldout = load_table().heldout
    for name, goals in tuple(by_tier.items()):
        by_tier[f"{name}/heldout"] = tuple(goal for goal in goals if goal in heldout)
        by_tier[f"{name}/train"] = tuple(goal for goal in goals if goal not in heldout)
        by_tier[f"{name}/renamed"] = by_tier[f"{name}/train"]
    name, colon, number = tier.partition(":")
    if name not in by_tier:
        raise ConfigError(f"{tier!r} is not a tier of textcraft{did_you_mean(name, by_tier)}")
    goals = by_tier[name]
    if not colon:
        return goals
    if not number.isdecimal() or not 1 <= int(number) <= len(goals):
        raise ConfigError(
            f"{tier!r} is not a tier of textcraft: the number after the colon must be 1 to "
            f"{len(goals)}, the tier's goals"
        )
    return goals[: int(number)]


def _count_item(text: str) -> dict[str, Any]:
    counted = COUNTED.fullmatch(text.strip())
    if counted is None:
        raise ValueError(f"{text!r} is not a number and an item")
    return {"item": counted[2], "count": int(counted[1])}


def make_plan(table: Table, goal: str, rng: random.Random) -> Plan:
    """Draw one of the shallowest plans for the goal.

    A tag of crafted items is replaced by one of its shallowest items, drawn at random (its recipe
    is shown). A tag of raw items is always replaced by the same item.
    """
    recipes: dict[str, Recipe] = {}
    members: dict[str, str] = {}
    needed = [goal]
    while needed:
        item = needed.pop()
        if item in recipes or item not in table.recipes:
            continue
        shallowest = [r for r in table.recipes[item] if table.depth_of(r) == table.depths[item]]
        recipes[item] = rng.choice(shallowest)
        for name, _ in recipes[item].ingredients:
            if name in table.tags and name not in members:
                items = table.members(name)
                members[name] = rng.choice(items) if table.depths[items[0]] else items[0]
            needed.append(members.get(name, name))
    return Plan(recipes, members)


def fits(table: Table, recipe: Recipe, count: int, given: Counter[str]) -> bool:
    """True if `given` is exactly the recipe's ingredients; items of a tag may be mixed."""
    left = Counter(given)
    if recipe.count != count:
        return False
    for name, needed in recipe.ingredients:
        for item in table.choices(name):
            used = min(left[item], needed)
            left[item] -= used
            needed -= used
        if needed:
            return False
    return not any(left.values())
