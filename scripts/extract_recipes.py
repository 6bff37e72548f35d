"""Write ludus/envs/textcraft/recipes.json, TextCraft's recipes, from the package minecraft-data.

    pip install --no-deps minecraft-data==3.20.0 && python scripts/extract_recipes.py

The package lists one recipe for each choice of materials. Here those choices become tag families
(Minecraft's own item tags): 8 chests of one kind of planks each are one chest of `planks`. Items
that are only the unpacked form of something made of them (ingots from blocks, blocks from ingots)
are declared raw; of the few recipes that lead back to themselves (a block cut into slabs, slabs
made into a block) those from the deeper item are left out, so that the table has no cycles.

minecraft-data is (c) 2021 N. Vito Gamberini and contributors, MIT licence.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

VERSION = "1.16.2"
WOODS = ("oak", "spruce", "birch", "jungle", "acacia", "dark_oak")
STEMS = ("crimson", "warped")
COLORS = (
    *("white", "orange", "magenta", "light_blue", "yellow", "lime", "pink", "gray"),
    *("light_gray", "cyan", "purple", "blue", "brown", "green", "red", "black"),
)


def _wood_tags() -> dict[str, set[str]]:
    tags = {f"{w}_logs": {f"{w}_log", f"{w}_wood"} for w in WOODS}
    tags |= {f"{s}_stems": {f"{s}_stem", f"{s}_hyphae"} for s in STEMS}
    tags = {tag: items | {f"stripped_{item}" for item in items} for tag, items in tags.items()}
    return tags | {"logs": set().union(*tags.values())}


TAGS: dict[str, set[str]] = {
    **_wood_tags(),
    "planks": {f"{w}_planks" for w in WOODS + STEMS},
    "wooden_slabs": {f"{w}_slab" for w in WOODS + STEMS},
    "wool": {f"{color}_wool" for color in COLORS},
    "coals": {"coal", "charcoal"},
    "stone_materials": {"cobblestone", "blackstone"},
    "soul_fire_base_blocks": {"soul_sand", "soul_soil"},
}
"""Minecraft 1.16's item tags, as far as crafting uses them (its two stone tags are the same)."""

RAW = {
    *("iron_ingot", "gold_ingot", "netherite_ingot", "diamond", "emerald", "coal", "redstone"),
    *("lapis_lazuli", "slime_ball", "honey_bottle", "wheat", "dried_kelp", "bone_meal"),
}
"""Craftable only from what is crafted from them, or (bone meal, netherite) as good as that."""

Recipe = tuple[str, int, tuple[tuple[str, int], ...]]
"""Product, number, and ingredients: (ingredient or tag, number), in the table's order."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    target = Path(__file__).parents[1] / "ludus/envs/textcraft/recipes.json"
    parser.add_argument("--output", type=Path, default=target)
    output = parser.parse_args().output
    spec = importlib.util.find_spec("minecraft_data")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("extract_recipes: pip install --no-deps minecraft-data==3.20.0 first")
    data = Path(spec.submodule_search_locations[0]) / "data/data/pc" / VERSION
    recipes, depths = without_cycles(read_recipes(data))
    write_table(output, recipes)
    goals = Counter(depths[item] for item in {item for item, _, _ in recipes})
    print(f"{len(recipes)} recipes, {sum(goals.values())} goals, by depth {sorted(goals.items())}")


def read_recipes(data: Path) -> list[Recipe]:
    """All crafting recipes of a version, with choices of material folded into tags."""
    items = {item["id"]: item["name"] for item in json.loads((data / "items.json").read_text())}
    recipes: set[Recipe] = set()
    for key, variants in json.loads((data / "recipes.json").read_text()).items():
        for count, choices in _same_shape(variants, items).values():
            recipes |= {(items[int(key)], count, made_of) for made_of in _fold(choices)}
    return sorted(recipe for recipe in recipes if recipe[0] not in RAW)


def _same_shape(variants: list[Any], items: dict[int, str]) -> dict[Any, tuple[int, set[Any]]]:
    """Variants of one output, grouped by count and shape: group -> (count, ingredient rows)."""
    groups: dict[Any, tuple[int, set[Any]]] = {}
    for variant in variants:
        rows = variant.get("inShape") or [variant["ingredients"]]
        cells = [cell["id"] if isinstance(cell, dict) else cell for row in rows for cell in row]
        shape = (len(rows), tuple(cell is None for cell in cells))
        count = variant["result"]["count"]
        group = groups.setdefault((count, shape), (count, set()))
        group[1].add(tuple(items[int(cell)] for cell in cells if cell is not None))
    return groups


def _fold(rows: set[tuple[str, ...]]) -> set[tuple[tuple[str, int], ...]]:
    """Rows of ingredients that differ by the members of a tag only, as one recipe with the tag."""
    tag_of = {frozenset(members): tag for tag, members in TAGS.items()}
    ordered = sorted(rows)
    columns = list(zip(*ordered, strict=True))
    tags = [tag_of.get(frozenset(column)) for column in columns]
    folded = {tuple(tag or item for tag, item in zip(tags, row, strict=True)) for row in ordered}
    members = [len(set(column)) for column, tag in set(zip(columns, tags, strict=True)) if tag]
    if len(folded) * math.prod(members) != len(rows):
        raise SystemExit(f"not every combination of a tag's members is a recipe: {ordered[:3]}")
    return {tuple(Counter(row).items()) for row in folded}


def without_cycles(recipes: list[Recipe]) -> tuple[list[Recipe], dict[str, int]]:
    """The recipes that do not lead back to themselves, and the depths of all items.

    The depth of a raw item is 0, of a tag that of its shallowest member, of a product one more than
    its deepest ingredient, by its shallowest recipe.
    """
    by_item: dict[str, list[Recipe]] = defaultdict(list)
    for recipe in recipes:
        by_item[recipe[0]].append(recipe)
    names = {name for _, _, made_of in recipes for name, _ in made_of} - set(TAGS)
    names |= set().union(*TAGS.values())
    depths = {name: 0 for name in names if name not in by_item}

    def depth(name: str) -> float:
        if name in TAGS:
            return min(depths.get(member, float("inf")) for member in TAGS[name])
        return depths.get(name, float("inf"))

    changed = True
    while changed:
        changed = False
        for item, ways in by_item.items():
            best = min(1 + max(depth(name) for name, _ in made_of) for _, _, made_of in ways)
            if best < depth(item):
                depths[item], changed = int(best), True
    missing = sorted(set(by_item) - set(depths))
    if missing:
        raise SystemExit(f"cannot be made from raw items: {missing}")
    kept = [
        recipe
        for recipe in recipes
        if all(depth(name) < depth(recipe[0]) for name, _ in recipe[2])
        or recipe[0] not in _made_from(recipe, by_item)
    ]
    return kept, depths


def _made_from(recipe: Recipe, by_item: dict[str, list[Recipe]]) -> set[str]:
    """Every item that may be used up on the way to a recipe's ingredients, these included."""
    found: set[str] = set()
    names = [name for name, _ in recipe[2]]
    while names:
        name = names.pop()
        if name in TAGS:
            names += TAGS[name] - found
        elif name not in found:
            found.add(name)
            names += [used for _, _, made_of in by_item.get(name, []) for used, _ in made_of]
    return found


def write_table(path: Path, recipes: list[Recipe]) -> None:
    """One tag and one recipe a line; names with spaces in place of underscores."""

    def words(name: str) -> str:
        return name.replace("_", " ")

    tags = {words(tag): sorted(map(words, members)) for tag, members in sorted(TAGS.items())}
    lines = [
        [words(item), count, {words(name): n for name, n in made_of}]
        for item, count, made_of in recipes
    ]
    text = ",\n".join(f"    {json.dumps(tag)}: {json.dumps(tags[tag])}" for tag in tags)
    rows = ",\n".join(f"    {json.dumps(line)}" for line in lines)
    source = f"minecraft-data 3.20.0 (MIT), Minecraft {VERSION}; see scripts/extract_recipes.py"
    path.write_text(
        f'{{\n  "source": {json.dumps(source)},\n  "tags": {{\n{text}\n  }},\n'
        f'  "recipes": [\n{rows}\n  ]\n}}\n'
    )


if __name__ == "__main__":
    main()
