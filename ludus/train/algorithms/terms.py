"""Arguments of all rows of reinforcement learning: terms besides the row's loss.

`shared` adds them to a row's arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Annotated, Any, Literal

from pydantic import Field

from ludus.core.errors import ConfigError
from ludus.train.algorithms.base import Algorithm, EntropyFloor, Importance, ReferenceKl
from ludus.train.algorithms.losses import KlKind, with_entropy_bonus, with_reference_kl

Entropy = Annotated[
    float,
    Field(ge=0, description="Weight of the entropy bonus; above 0, every sampled token trains."),
]
EntropyTarget = Annotated[
    float | None,
    Field(
        gt=0,
        allow_inf_nan=False,  # JSON has neither: a run's configuration would say null
        description="Entropy in nats a token at which the bonus is 0; below it, the bonus grows, "
        "to `entropy_bonus` at an entropy of 0. Null: the bonus is constant.",
    ),
]
KlCoefficient = Annotated[
    float, Field(ge=0, description="Weight of the divergence from a frozen reference; 0: none.")
]
Kind = Annotated[KlKind, Field(description="Estimator of the divergence.")]
KlIn = Annotated[
    Literal["loss", "reward"],
    Field(description="Add the divergence to the loss, or subtract it from the reward."),
]
ReferenceModel = Annotated[
    str | None,
    Field(
        description="Folder or hub name of the reference; null: the policy at the stage's start; "
        "with LoRA, the model without adapters."
    ),
]
Cap = Annotated[
    float,
    Field(
        ge=0,
        description="Cap of the importance weight, learner's over sampler's probability; 0: off.",
    ),
]
Level = Annotated[
    Literal["token", "trajectory"], Field(description="Unit of the importance weight.")
]


def with_terms(
    row: Algorithm,
    *,
    entropy_bonus: Entropy = 0.0,
    entropy_target: EntropyTarget = None,
    kl_coefficient: KlCoefficient = 0.0,
    kl_kind: Kind = "k3",
    kl_in: KlIn = "loss",
    kl_reference: ReferenceModel = None,
    importance_cap: Cap = 0.0,
    importance_level: Level = "token",
) -> Algorithm:
    """Returns `row` with the given terms. Errors: ConfigError for a term without effect."""
    if kl_coefficient:
        kl = ReferenceKl(kl_coefficient, kl_kind, kl_in, kl_reference)
        row = replace(row, reference=kl)
        if kl_in == "loss":
            loss = with_reference_kl(row.loss, kl_coefficient, kl_kind)
            row = replace(row, loss=loss, regularised=True)
    if entropy_target is not None:
        if not entropy_bonus:
            raise ConfigError("entropy_target has no effect without an entropy_bonus above 0")
        row = replace(row, entropy_floor=EntropyFloor(entropy_bonus, entropy_target))
    elif entropy_bonus:
        loss = with_entropy_bonus(row.loss, entropy_bonus)
        row = replace(row, loss=loss, regularised=True)
    if importance_cap:
        row = replace(row, importance=Importance(importance_cap, importance_level))
    return row


def shared(build: Callable[..., Algorithm]) -> Callable[..., Algorithm]:
    """Add the arguments of `with_terms` to a row's factory."""
    terms = {
        name: parameter
        for name, parameter in inspect.signature(with_terms).parameters.items()
        if name != "row"
    }

    @wraps(build)
    def row(**args: Any) -> Algorithm:
        own = {name: value for name, value in args.items() if name not in terms}
        return with_terms(build(**own), **{n: v for n, v in args.items() if n in terms})

    own = inspect.signature(build)
    keywords = [p.replace(kind=p.KEYWORD_ONLY) for p in own.parameters.values()]
    row.__signature__ = own.replace(  # type: ignore[attr-defined]
        parameters=[*keywords, *terms.values()]
    )
    hints = inspect.get_annotations(with_terms, eval_str=True)
    row.__annotations__ = {
        **inspect.get_annotations(build, eval_str=True),
        **{name: hints[name] for name in terms},
    }
    return row
