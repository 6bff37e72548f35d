"""Costs of the sampler: seconds of a pass, a sequence, a token of its context, a prompt token.

Least squares of relative errors over the last MAX_PASSES passes, with coefficients of at least 0:

    seconds of a pass = pass_s + row_s * sequences + context_s * tokens of their contexts
                        + prefill_token_s * prompt tokens computed

Errors are relative, so that passes of few sequences, the shortest ones, count as much as others: a
run that waits for its environments has mostly these. `ludus plan --cluster` predicts other batches
from the costs.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from scipy.optimize import nnls

MAX_PASSES = 4096
"""Older passes are forgotten."""

MIN_PASSES = 16
"""Fewer passes give no costs."""

SHORTEST_S = 1e-9
"""Of a pass: a clock may stand still."""

COSTS = ("time/pass_s", "time/pass_row_s", "time/pass_context_s", "time/prefill_token_s")
"""Metrics of the costs."""


class PassTimes:
    """Times of passes, and their number."""

    def __init__(self) -> None:
        self._passes: deque[tuple[int, int, int, float]] = deque(maxlen=MAX_PASSES)
        self._number = 0

    def add(self, rows: int, context: int, prefill: int, seconds: float) -> None:
        """Note a pass over `rows` sequences, with `context` tokens in all, that computed `prefill`
        prompt tokens."""
        self._passes.append((rows, context, prefill, max(seconds, SHORTEST_S)))
        self._number += 1

    def fit(self) -> dict[str, float]:
        """Returns the costs as metrics, and the number of passes since the last call.

        No costs from fewer than MIN_PASSES passes.
        """
        number, self._number = self._number, 0
        counted = {"time/passes": float(number)}
        if len(self._passes) < MIN_PASSES:
            return counted
        table = np.array(self._passes)
        inputs = np.column_stack([np.ones(len(table)), table[:, :3]]) / table[:, 3:]
        scale = inputs.max(axis=0)
        scale[scale == 0] = 1.0  # no prompt token was computed
        costs = nnls(inputs / scale, np.ones(len(table)))[0] / scale
        return {**counted, **dict(zip(COSTS, map(float, costs), strict=True))}
