"""From scored groups to new weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ludus.core.registry import Registry, Row

if TYPE_CHECKING:
    from ludus.train.algorithm import Algorithm

ALGORITHMS: Registry[Algorithm] = Registry(
    "algorithm",
    {
        "grpo": Row("ludus.train.algorithms:grpo", "train", "rewards normalised in their group"),
        "dr_grpo": Row("ludus.train.algorithms:dr_grpo", "train", "GRPO without its two biases"),
        "dapo": Row("ludus.train.algorithms:dapo", "train", "clip-higher, token mean, signal only"),
        "gspo": Row("ludus.train.algorithms:gspo", "train", "GRPO with one ratio a trajectory"),
        "gspo_token": Row("ludus.train.algorithms:gspo_token", "train", "GSPO, advantages a turn"),
        "cispo": Row("ludus.train.algorithms:cispo", "train", "REINFORCE with capped ratios"),
        "turn_grpo": Row("ludus.train.algorithms:turn_grpo", "train", "GRPO over turns' returns"),
        "ppo": Row("ludus.train.algorithms:ppo", "train", "a critic, and GAE"),
        "reinforce_pp": Row(
            "ludus.train.algorithms:reinforce_pp", "train", "returns, normalised over the step"
        ),
        "reinforce_pp_baseline": Row(
            "ludus.train.algorithms:reinforce_pp_baseline", "train", "against the group, as well"
        ),
        "rloo": Row("ludus.train.algorithms:rloo", "train", "REINFORCE, leave-one-out baseline"),
        "sft": Row("ludus.train.algorithms:sft", "train", "cross-entropy on demonstrations"),
    },
)
