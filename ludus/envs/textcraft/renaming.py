"""TextCraft with other words and counts: drawn by a task's seed, words as a permutation.

    craft 4 oak planks using 1 oak logs             craft 3 oak planks using 2 oak logs
    craft 1 iron sword using 1 stick, 2 iron ingot  craft 6 bell melon using 5 rail, 1 bell disc
    goal: craft iron sword                          goal: craft bell melon

Recipes keep their structure, but nothing can be known by heart: a policy that succeeds reads the
commands. Words of tags and of the items that stand for them keep their meaning (`oak logs`), for
no command says which items a tag has.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cache

from ludus.envs.textcraft.recipes import Plan, Recipe, load_table

WORD = re.compile(r"[a-z]+")

GRAMMAR = frozenset({"a", "of", "on", "the"})
"""Words of items' names that mean little."""


MADE = (1, 2, 3, 4, 6, 8, 16)
USED = tuple(range(1, 10))
"""Counts of the table's recipes: of what they make, and of an ingredient."""

MAX_DRAWS = 100


class Names:
    """A permutation of words: `shown` translates the game's texts, `real` the agent's actions."""

    def __init__(self, words: Mapping[str, str]) -> None:
        self._shown = dict(words)
        self._real = {other: word for word, other in words.items()}

    def shown(self, text: str) -> str:
        return _translated(text, self._shown)

    def real(self, text: str) -> str:
        return _translated(text, self._real)


def draw_names(rng: random.Random, crafted: Collection[str]) -> Names:
    """Draw a permutation under which no crafted item has the name of a held-out goal."""
    words, heldout = _free_words(), load_table().heldout
    while True:
        names = Names(dict(zip(words, rng.sample(words, len(words)), strict=True)))
        if not any(names.shown(item) in heldout for item in crafted):
            return names


def draw_counts(rng: random.Random, plan: Plan, goal: str) -> Plan:
    """The plan with other counts in its recipes. It takes no more actions than with the real ones,
    which remain where no draw is as short."""
    limit = len(plan.actions(goal, Counter()))
    for _ in range(MAX_DRAWS):
        recipes = {
            item: Recipe(
                item,
                rng.choice(MADE),
                tuple((name, rng.choice(USED)) for name, _ in recipe.ingredients),
            )
            for item, recipe in plan.recipes.items()
        }
        drawn = Plan(recipes, plan.members)
        if len(drawn.actions(goal, Counter())) <= limit:
            return drawn
    return plan


@cache
def _free_words() -> Sequence[str]:
    """The words of items' names that can be permuted."""
    table = load_table()
    families = {tag: table.members(tag) for tag in table.tags}
    fixed = [*families, *(items[0] for items in families.values() if not table.depths[items[0]])]
    kept = GRAMMAR.union(*map(WORD.findall, fixed))
    return sorted({word for item in table.items for word in WORD.findall(item)} - kept)


def _translated(text: str, words: Mapping[str, str]) -> str:
    return WORD.sub(lambda match: words.get(match[0], match[0]), text)
