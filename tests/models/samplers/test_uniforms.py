"""Random numbers of turns."""

from __future__ import annotations

import numpy as np
import pytest

from ludus.models.samplers import uniforms
from ludus.models.samplers.uniforms import fill_uniforms

SEEDS = [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**64 - 1, 2**64, 2**100 + 3]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(
    "seed", [*SEEDS, *map(int, np.random.default_rng(0).integers(2**63, size=50))]
)
def test_the_numbers_are_numpys(seed: int, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(uniforms, "_native", lambda: None)
    for width in (1, 2, 3, 4, 5, 8, 100):
        row = np.full(width, -1.0)
        fill_uniforms(seed, row)
        assert row.tolist() == np.random.Generator(np.random.Philox(seed)).random(width).tolist()


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="non-negative"):
        fill_uniforms(-1, np.zeros(3))
