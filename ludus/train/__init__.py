"""From scored groups to new weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ludus.models  # noqa: F401 - its settings, before torch and peft are imported
from ludus.config.registry import Registry, Row

if TYPE_CHECKING:
    from ludus.train.algorithms.base import Algorithm

_ROWS = {
    "grpo": "rewards normalised in their group",
    "dr_grpo": "GRPO without its two biases",
    "dapo": "clip-higher, token mean, signal only",
    "gspo": "GRPO with one ratio per trajectory",
    "gspo_token": "GSPO with one advantage per turn",
    "cispo": "REINFORCE with capped ratios",
    "turn_grpo": "GRPO over the returns of turns",
    "gigpo": "GRPO, and turns from the same observation compared",
    "ppo": "a critic and GAE",
    "reinforce_pp": "returns normalised over the step",
    "reinforce_pp_baseline": "REINFORCE++ with the group's mean as baseline",
    "adpo": "GRPO that trusts uncertain labels less",
    "rloo": "REINFORCE, leave-one-out baseline",
    "sft": "cross-entropy on demonstrations",
}

ALGORITHMS: Registry[Algorithm] = Registry(
    "algorithm",
    {
        name: Row(f"ludus.train.algorithms.table:{name}", "train", doc)
        for name, doc in _ROWS.items()
    },
    needs=("screen", "credit", "loss", "aggregate"),
)
