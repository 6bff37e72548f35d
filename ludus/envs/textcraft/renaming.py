"""TextCraft with other words: a task's seed permutes the words of which items' names consist.

    craft 4 oak planks using 1 oak logs             craft 4 oak planks using 1 oak logs
    craft 1 iron sword using 1 stick, 2 iron ingot  craft 1 bell melon using 1 rail, 2 bell disc
    goal: craft iron sword                          goal: craft bell melon

Recipes keep their structure, but nothing can be known by heart: a policy that succeeds reads the
commands. Words of tags and of the items that stand for them keep their meaning (`oak logs`), for
no command says which items a tag has.
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache

from ludus.envs.textcraft.recipes import load_table

WORD = re.compile(r"[a-z]+")

GRAMMAR = frozenset({"a", "of", "on", "the"})
"""Words of items' names that mean little."""


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
