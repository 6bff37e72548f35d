"""Costs of the sampler's passes: seconds of a pass, of a sequence, of a prompt token.

Least squares over the last MAX_PASSES passes, with coefficients of at least 0:

    seconds of a pass = pass_s + row_s * sequences + prefill_token_s * prompt tokens computed

`ludus plan --cluster` predicts other batches from them.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from scipy.optimize import nnls

MAX_PASSES = 4096
"""Older passes are forgotten."""

MIN_PASSES = 16
"""Fewer passes give no costs."""


class PassTimes:
    """Times of passes, and their number."""

    def __init__(self) -> None:
        self._passes: deque[tuple[int, int, float]] = deque(maxlen=MAX_PASSES)
        self._number = 0

    def add(self, rows: int, prefill: int, seconds: float) -> None:
        """Note a pass over `rows` sequences that computed `prefill` prompt tokens."""
        self._passes.append((rows, prefill, seconds))
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
        inputs = np.column_stack([np.ones(len(table)), table[:, :2]])
        scale = np.maximum(inputs.max(axis=0), 1.0)
        costs = nnls(inputs / scale, table[:, 2])[0] / scale
        names = ("time/pass_s", "time/pass_row_s", "time/prefill_token_s")
        return {**counted, **dict(zip(names, map(float, costs), strict=True))}
