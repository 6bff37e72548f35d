"""Several policies: the errors of one name it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ludus.backends.several import SeveralPolicies
from ludus.core.errors import TrainingError
from ludus.train.algorithms.table import GRPO


def backend(error: str, *, elsewhere: bool) -> Any:
    async def train(samples: Any, algorithm: Any) -> dict[str, float]:
        if error:
            raise TrainingError(error)
        return {"train/optimizer_steps": 1.0}

    store = SimpleNamespace(folder=None, others=())
    return SimpleNamespace(train=train, trains_elsewhere=elsewhere, checkpoints=store)


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize(
    ("own", "rivals", "told"),
    [
        ("no loss", "", "^no loss$"),
        ("", "no loss", "^policies.rival: no loss$"),
        ("", "rank 0 (policies.rival) died", r"^rank 0 \(policies.rival\) died$"),
    ],
)
async def test_an_error_names_the_policy(
    own: str, rivals: str, told: str, *, elsewhere: bool
) -> None:
    both = (backend(error, elsewhere=elsewhere) for error in (own, rivals))
    several = SeveralPolicies(next(both), {"rival": next(both)})
    with pytest.raises(TrainingError, match=told):
        await several.train([], GRPO)
