"""TextCraft's recipe table: recipes, depths and goals.

The table is `recipes.json`, written by scripts/extract_recipes.py. An ingredient is an item
(`stick`) or a tag, a set of interchangeable items (`planks`: oak planks, ...).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files


@dataclass(frozen=True)
class Recipe:
    """Makes `count` of `item` from `ingredients`, as (item or tag, count)."""

    item: str
    count: int
    ingredients: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        used = ", ".join(f"{count} {name}" for name, count in self.ingredients)
        return f"craft {self.count} {self.item} using {used}"


@dataclass(frozen=True)
class Table:
    """All recipes by the crafted item, and the items of each tag."""

    recipes: Mapping[str, tuple[Recipe, ...]]
    tags: Mapping[str, tuple[str, ...]]

    @cached_property
    def items(self) -> frozenset[str]:
        """All items: crafted, used, or in a tag."""
        used = {
            name for ways in self.recipes.values() for way in ways for name, _ in way.ingredients
        }
        members = {item for family in self.tags.values() for item in family}
        return frozenset((used - set(self.tags)) | members | set(self.recipes))

    def choices(self, name: str) -> tuple[str, ...]:
        """The items that can be used for an ingredient."""
        return self.tags.get(name, (name,))

    @cached_property
    def depths(self) -> Mapping[str, int]:
        """Crafting steps from raw items, by the shallowest recipe; raw items have depth 0."""
        depths = {item: 0 for item in self.items if item not in self.recipes}

        def depth_of(recipe: Recipe) -> int | None:
            ingredient_depths = []
            for name, _ in recipe.ingredients:
                known = [depths[item] for item in self.choices(name) if item in depths]
                if not known:
                    return None
                ingredient_depths.append(min(known))
            return 1 + max(ingredient_depths)

        changed = True
        while changed:
            changed = False
            for item in sorted(self.recipes):
                known = [d for d in map(depth_of, self.recipes[item]) if d is not None]
                if known and min(known) < depths.get(item, len(self.items)):
                    depths[item], changed = min(known), True
        return depths

    def depth_of(self, recipe: Recipe) -> int:
        """One more than the depth of the recipe's deepest ingredient."""
        return 1 + max(
            min(self.depths[item] for item in self.choices(name)) for name, _ in recipe.ingredients
        )

    def members(self, tag: str) -> list[str]:
        """The items that plans use for a tag: its shallowest crafted items, or one raw item."""
        least = min(self.depths[item] for item in self.tags[tag])
        items = [item for item in self.tags[tag] if self.depths[item] == least]
        return items if least else [min(items, key=lambda item: (len(item), item))]

    @cached_property
    def goals(self) -> Mapping[int, tuple[str, ...]]:
        """Craftable items by depth, in a fixed pseudo-random order."""
        by_depth: dict[int, list[str]] = defaultdict(list)
        for item in sorted(self.recipes, key=lambda item: hashlib.sha256(item.encode()).digest()):
            by_depth[self.depths[item]].append(item)
        return {depth: tuple(by_depth[depth]) for depth in sorted(by_depth)}

    @cached_property
    def heldout(self) -> frozenset[str]:
        """Half of each depth's goals that no recipe uses: no other goal's episode crafts them."""
        recipes = [recipe for ways in self.recipes.values() for recipe in ways]
        used = {name for recipe in recipes for name, _ in recipe.ingredients}
        needed = {item for name in used for item in self.choices(name)}
        unused = ([goal for goal in goals if goal not in needed] for goals in self.goals.values())
        return frozenset(goal for goals in unused for goal in goals[::2])


@cache
def load_table() -> Table:
    """The packaged table."""
    text = files("ludus.envs.textcraft").joinpath("recipes.json").read_text(encoding="utf-8")
    data = json.loads(text)
    recipes: dict[str, list[Recipe]] = defaultdict(list)
    for item, count, ingredients in data["recipes"]:
        recipes[item].append(Recipe(item, count, tuple(ingredients.items())))
    return Table(
        recipes={item: tuple(ways) for item, ways in recipes.items()},
        tags={tag: tuple(members) for tag, members in data["tags"].items()},
    )


@dataclass(frozen=True)
class Plan:
    """A plan for a goal: a recipe for each crafted item, and the item used for each tag."""

    recipes: Mapping[str, Recipe]
    members: Mapping[str, str]

    def actions(self, goal: str, inventory: Counter[str]) -> list[str]:
        """The remaining actions, by backward chaining; each raw item is gathered in one action.

        Each ingredient is made, then reserved, so that the next ingredient does not use it.
        """
        free = Counter(inventory)
        gathered: Counter[str] = Counter()
        steps: list[Recipe | str] = []  # recipes to craft, raw items to gather

        def provide(item: str, count: int) -> None:
            """Reserve `count` of `item`, making the missing ones."""
            while free[item] < count:
                recipe = self.recipes.get(item)
                if recipe is None:
                    if item not in gathered:
                        steps.append(item)
                    gathered[item] += count - free[item]
                    free[item] = count
                else:
                    made_of = [(self.members.get(n, n), k) for n, k in recipe.ingredients]
                    for name, needed in made_of:
                        provide(name, needed)
                    steps.append(Recipe(item, recipe.count, tuple(made_of)))
                    free[item] += recipe.count
            free[item] -= count

        provide(goal, inventory[goal] + 1)
        return [f"get {gathered[s]} {s}" if isinstance(s, str) else str(s) for s in steps]
