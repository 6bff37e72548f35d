"""From scored groups to new weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ludus.core.registry import Registry, Row

if TYPE_CHECKING:
    from ludus.train.algorithms import Algorithm

ALGORITHMS: Registry[Algorithm] = Registry(
    "algorithm",
    {
        "grpo": Row("ludus.train.algorithms:grpo", "train", "rewards normalised in their group"),
        "dr_grpo": Row("ludus.train.algorithms:dr_grpo", "train", "GRPO without its two biases"),
        "dapo": Row("ludus.train.algorithms:dapo", "train", "clip-higher, token mean, signal only"),
        "rloo": Row("ludus.train.algorithms:rloo", "train", "REINFORCE, leave-one-out baseline"),
        "sft": Row("ludus.train.algorithms:sft", "train", "cross-entropy on demonstrations"),
    },
)
