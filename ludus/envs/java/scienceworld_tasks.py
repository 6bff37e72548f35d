"""The 30 tasks of ScienceWorld: variations, splits, and AgentGym's numbering."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Split = Literal["train", "dev", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True, slots=True)
class Kind:
    """A task. `gold_steps` is the length of variation 0's gold path."""

    number: str
    name: str
    num_variations: int
    gold_steps: int

    def variations(self, split: Split) -> range:
        """The variations of a split, cut as in the engine: half, a quarter, the rest."""
        quarter = self.num_variations // 4
        cuts = {"train": (0, 2), "dev": (2, 3), "test": (3, None)}[split]
        first, last = cuts[0] * quarter, cuts[1]
        return range(first, self.num_variations if last is None else last * quarter)


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("1-1", "boil", 30, 39),
        Kind("1-2", "melt", 30, 34),
        Kind("1-3", "freeze", 30, 26),
        Kind("1-4", "change-the-state-of-matter-of", 30, 26),
        Kind("2-1", "use-thermometer", 540, 22),
        Kind("2-2", "measure-melting-point-known-substance", 436, 26),
        Kind("2-3", "measure-melting-point-unknown-substance", 300, 32),
        Kind("3-1", "power-component", 20, 11),
        Kind("3-2", "power-component-renewable-vs-nonrenewable-energy", 20, 26),
        Kind("3-3", "test-conductivity", 900, 17),
        Kind("3-4", "test-conductivity-of-unknown-substances", 600, 17),
        Kind("4-1", "find-living-thing", 300, 10),
        Kind("4-2", "find-non-living-thing", 300, 5),
        Kind("4-3", "find-plant", 300, 10),
        Kind("4-4", "find-animal", 300, 10),
        Kind("5-1", "grow-plant", 126, 63),
        Kind("5-2", "grow-fruit", 126, 77),
        Kind("6-1", "chemistry-mix", 32, 23),
        Kind("6-2", "chemistry-mix-paint-secondary-color", 36, 21),
        Kind("6-3", "chemistry-mix-paint-tertiary-color", 36, 29),
        Kind("7-1", "lifespan-longest-lived", 125, 6),
        Kind("7-2", "lifespan-shortest-lived", 125, 6),
        Kind("7-3", "lifespan-longest-lived-then-shortest-lived", 125, 7),
        Kind("8-1", "identify-life-stages-1", 14, 41),
        Kind("8-2", "identify-life-stages-2", 10, 16),
        Kind("9-1", "inclined-plane-determine-angle", 168, 55),
        Kind("9-2", "inclined-plane-friction-named-surfaces", 1386, 51),
        Kind("9-3", "inclined-plane-friction-unnamed-surfaces", 162, 178),
        Kind("10-1", "mendelian-genetics-known-plant", 120, 143),
        Kind("10-2", "mendelian-genetics-unknown-plant", 480, 145),
    )
}

EASIEST_FIRST: Sequence[str] = sorted(KINDS, key=lambda name: KINDS[name].gold_steps)

NOT_IN_AGENTGYM = {"5-1", "5-2", "9-1", "9-2", "9-3", "10-1", "10-2"}


def agentgym_task(index: int) -> tuple[str, int]:
    """(task, variation) of a `data_idx` of AgentGym's SciWorld: 4,639 indices in 23 tasks.

    Errors: IndexError.
    """
    left = index
    for kind in KINDS.values():
        if kind.number in NOT_IN_AGENTGYM:
            continue
        if 0 <= left < kind.num_variations:
            return kind.name, left
        left -= kind.num_variations
    raise IndexError(f"there is no index {index}; AgentGym has 0 to {num_agentgym_tasks() - 1}")


def num_agentgym_tasks() -> int:
    """Number of indices of AgentGym's SciWorld."""
    return sum(k.num_variations for k in KINDS.values() if k.number not in NOT_IN_AGENTGYM)
