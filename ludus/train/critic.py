"""The critic: a linear map from the policy's hidden states to the expected future reward.

The critic shares the policy's trunk and needs no forward pass of its own. It is not part of the
model, so samplers and exports do not see it; checkpoints store it in their state. Shape suffixes:
P places, E hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Critic:
    """V = w h + b in float32, with its own optimizer (Adam, no weight decay).

    Initial values are 0, so the first advantages equal the returns.

    Args:
        lr: learning rate; the policy's is too small for a head trained from scratch.
    """

    def __init__(self, hidden_size: int, lr: float, device: torch.device) -> None:
        self.head = nn.Linear(hidden_size, 1, device=device, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.parameters = list(self.head.parameters())
        self.optimizer = torch.optim.Adam(self.parameters, lr=lr)

    def __call__(self, hidden_PE: Tensor) -> Tensor:
        """Values [P] of hidden states [P, E]."""
        values_P: Tensor = self.head(hidden_PE.float()).squeeze(-1)
        return values_P

    def state_dict(self) -> dict[str, Any]:
        """Weights and Adam moments as JSON; Python floats hold float32 exactly."""
        moments = [
            {name: value.tolist() for name, value in self.optimizer.state.get(p, {}).items()}
            for p in self.parameters
        ]
        return {"weights": [p.tolist() for p in self.parameters], "moments": moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of `state_dict`."""
        with torch.no_grad():
            for parameter, values in zip(self.parameters, state["weights"], strict=True):
                parameter.copy_(torch.tensor(values, dtype=torch.float32))
        for parameter, moments in zip(self.parameters, state["moments"], strict=True):
            self.optimizer.state[parameter] = {
                # Adam keeps its count of steps on the CPU.
                name: torch.tensor(
                    value, dtype=torch.float32, device="cpu" if name == "step" else parameter.device
                )
                for name, value in moments.items()
            }
