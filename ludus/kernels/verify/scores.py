"""Scores of many verifications."""

from __future__ import annotations

from collections.abc import Sequence

from ludus.kernels.verify.result import Verified


def fast_p(results: Sequence[Verified], p: float) -> float:
    """KernelBench's fast_p: the share of problems whose kernel is correct, and more than `p` times
    as fast as eager PyTorch. A kernel that was not timed counts for no `p` of 0 or above; a
    negative `p` gives the share that is correct.

    Errors: ValueError without results.
    """
    if not results:
        raise ValueError("fast_p needs at least one result")

    def counts(result: Verified) -> bool:
        if not result.ok:
            return False
        return p < 0 or (result.speedups is not None and result.speedups.over_eager > p)

    return sum(map(counts, results)) / len(results)
