"""Starting values by size of model, for models that are too large for short trials.

From scratch: measured here (docs/log.md). Pretrained: the values of the recipes named in `source`,
which are those of the papers; ludus has not run them on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Start:
    """A row of the table: models of up to `most` parameters.

    Rates are for all weights; `lora_factor` times as much for adapters (Schulman et al. 2025, "LoRA
    Without Regret": about 10 times the rate of full training, at any rank).
    """

    most: float
    name: str
    sft_lr: float
    rl_lr: float
    groups: int
    group_size: int
    kl: float
    source: str
    lora_factor: float = 10.0


STARTS = (
    Start(3e7, "from scratch, below 30 M", 2e-3, 3e-4, 32, 8, 0.0, "babyai-tiny and docs/log.md"),
    Start(1.2e9, "0.1 to 1.2 B", 1e-5, 1e-6, 16, 8, 1e-3, "AgentGym-RL; babyai-qwen3-0.6b"),
    Start(5e9, "1.2 to 5 B", 1e-5, 1e-6, 128, 16, 1e-2, "Agent0; math-tool-qwen3-4b"),
    Start(1e13, "above 5 B", 5e-6, 1e-6, 128, 16, 1e-2, "Agent0; coevolve-qwen3-8b"),
)


def start_of(num_parameters: float) -> Start:
    """The row of a model."""
    return next(row for row in STARTS if num_parameters <= row.most)
