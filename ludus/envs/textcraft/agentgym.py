"""TextCraft in AgentGym's words (`texts: agentgym`).

    Crafting commands:
    craft 4 oak planks using 1 oak logs
    craft 6 oak slab using 3 oak planks

    Goal: craft oak slab.

Actions are parsed and answered as there: `Got 1 oak log`, `Crafted 4 minecraft:oak_planks`. Unlike
in ludus' own words, the number of crafted items may be left out or wrong, and the items of a tag
cannot be mixed. The recipes are ludus'. Tests compare the replies with AgentGym's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from ludus.envs.textcraft.recipes import Recipe, Table

Inventory = dict[str, int]
"""Items and their numbers, in the order in which they were first held."""


class Outcome(NamedTuple):
    """The reply to an action, what is held after it, and the crafted item, if any."""

    reply: str
    inventory: Inventory
    crafted: str | None = None


def opening(commands: Sequence[str], goal: str) -> str:
    """The first observation."""
    listed = "\n".join(commands)
    return f"Crafting commands:\n{listed}\n\nGoal: craft {goal}."


def act(table: Table, inventory: Inventory, text: str) -> Outcome:
    """Carry out an action. A reply to an impossible action leaves the inventory as it was."""
    if match := re.match(r"craft (.*) using (.*)", text):
        return _craft(table, inventory, match[1], match[2])
    if match := re.match(r"get ([0-9]+) (.*)", text):
        return _get(table, inventory, match[2], int(match[1]))
    if text.startswith("inventory"):
        held = "".join(f"[{item}] ({count}) " for item, count in inventory.items())
        return Outcome(f"Inventory: {held or 'You are not carrying anything.'}", inventory)
    return Outcome(f"Could not execute {text}", inventory)


def _get(table: Table, inventory: Inventory, item: str, count: int) -> Outcome:
    if item in table.recipes or item in table.tags or item not in table.items:
        return Outcome(f"Could not find {item}", inventory)
    held = {**inventory, item: inventory.get(item, 0) + count}
    return Outcome(f"Got {count} {item}", held)


def _craft(table: Table, inventory: Inventory, made: str, used: str) -> Outcome:
    counted = re.match(r"([0-9]+) (.*)", made)
    number, item = (int(counted[1]), counted[2]) if counted else (1, made)
    given: list[tuple[str, int]] = []
    for part in used.split(","):
        match = re.match(r"([0-9]+) (.*)", part.strip())
        if match is None:
            return Outcome(f"Wrong item format: {part.strip()}", inventory)
        given.append((match[2], int(match[1])))
    if any(name in table.tags or inventory.get(name, -1) < count for name, count in given):
        named = "None" if item in table.tags else _id(item)
        return Outcome(f"Could not find enough items to craft {named}", inventory)
    recipe = next((r for r in table.recipes.get(item, ()) if _fits(table, r, given)), None)
    if recipe is None:
        tag, single = (repr(_id(item)), None) if item in table.tags else (None, repr(_id(item)))
        asked = f"ItemTagWithCount(item_tag=ItemTag(tag={tag}, item_id={single}), count={number})"
        return Outcome(f"Could not find a valid recipe for {asked}", inventory)
    held = dict(inventory)
    for name, count in given:
        held[name] -= count
        if not held[name]:
            del held[name]
    held[item] = held.get(item, 0) + recipe.count
    return Outcome(f"Crafted {recipe.count} {_id(item)}", held, item)


def _fits(table: Table, recipe: Recipe, given: Sequence[tuple[str, int]]) -> bool:
    """True if each ingredient is one given item, in its exact number, and no more is given."""
    left = list(given)
    for name, count in recipe.ingredients:
        found = next((pair for pair in left if pair[0] in table.choices(name)), None)
        if found is None or found[1] != count:
            return False
        left.remove(found)
    return not left


def _id(item: str) -> str:
    """Minecraft's identifier of an item."""
    return "minecraft:" + item.replace(" ", "_")
