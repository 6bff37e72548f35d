"""The curriculum agent's reward, from Agent0 (arXiv 2511.16043).

A proposed problem x is answered k times. With p, the share of the answers that agree with their
majority, and with B proposals in the batch:

    R_unc  = 1 - 2 |p - 0.5|
    R_tool = gamma * min(mean tool calls of an answer, C)                                C = 4
    R_rep  = lambda_rep * |cluster(x)| / B
    R_C    = R_format * max(0, lambda_unc R_unc + lambda_tool R_tool - R_rep)

Left out: the share of `gamma` in the published 0.6, which the paper gives as lambda_tool; here
gamma is 1, so that 0.6 is the weight of a tool call.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of the parts: lambda_unc, lambda_tool, gamma, C, lambda_rep."""

    uncertainty: float = 1.0
    tool: float = 0.6
    gamma: float = 1.0
    max_tool_calls: float = 4.0
    repetition: float = 1.0


def uncertainty(p: float) -> float:
    """R_unc: 1 where half of the answers agree, 0 where all do, or none."""
    return 1.0 - 2.0 * abs(p - 0.5)


def tool_bonus(mean_calls: float, gamma: float = 1.0, max_calls: float = 4.0) -> float:
    """R_tool: the executor's executed calls an answer, up to `max_calls`, times gamma."""
    return gamma * min(mean_calls, max_calls)


def repetition(size: int, batch: int, weight: float = 1.0) -> float:
    """R_rep: the share of a cluster in the batch, times lambda_rep."""
    return weight * size / batch


def proposal_reward(
    p: float, mean_calls: float, size: int, batch: int, weights: Weights | None = None
) -> float:
    """R_C of a proposal that parses (R_format = 1)."""
    w = weights or Weights()
    bonus = tool_bonus(mean_calls, w.gamma, w.max_tool_calls)
    earned = w.uncertainty * uncertainty(p) + w.tool * bonus
    return max(0.0, earned - repetition(size, batch, w.repetition))
