"""From scored groups to new weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ludus.config.registry import Registry, Row

if TYPE_CHECKING:
    from ludus.train.algorithms.base import Algorithm

ALGORITHMS: Registry[Algorithm] = Registry(
    "algorithm",
    {
        "grpo": Row(
            "ludus.train.algorithms.table:grpo", "train", "rewards normalised in their group"
        ),
        "dr_grpo": Row(
            "ludus.train.algorithms.table:dr_grpo", "train", "GRPO without its two biases"
        ),
        "dapo": Row(
            "ludus.train.algorithms.table:dapo", "train", "clip-higher, token mean, signal only"
        ),
        "gspo": Row(
            "ludus.train.algorithms.table:gspo", "train", "GRPO with one ratio per trajectory"
        ),
        "gspo_token": Row(
            "ludus.train.algorithms.table:gspo_token", "train", "GSPO with one advantage per turn"
        ),
        "cispo": Row("ludus.train.algorithms.table:cispo", "train", "REINFORCE with capped ratios"),
        "turn_grpo": Row(
            "ludus.train.algorithms.table:turn_grpo", "train", "GRPO over the returns of turns"
        ),
        "ppo": Row("ludus.train.algorithms.table:ppo", "train", "a critic and GAE"),
        "reinforce_pp": Row(
            "ludus.train.algorithms.table:reinforce_pp",
            "train",
            "returns normalised over the step",
        ),
        "reinforce_pp_baseline": Row(
            "ludus.train.algorithms.table:reinforce_pp_baseline",
            "train",
            "REINFORCE++ with the group's mean as baseline",
        ),
        "rloo": Row(
            "ludus.train.algorithms.table:rloo", "train", "REINFORCE, leave-one-out baseline"
        ),
        "sft": Row("ludus.train.algorithms.table:sft", "train", "cross-entropy on demonstrations"),
    },
)
