"""The arguments that every row of reinforcement learning has: terms beside its own loss.

They are defined once, here; `shared` adds them to a row's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Annotated, Any, Literal

from pydantic import Field

from ludus.train.algorithms.base import Algorithm, Importance, ReferenceKl
from ludus.train.algorithms.losses import KlKind, with_entropy_bonus, with_reference_kl

Entropy = Annotated[
    float,
    Field(ge=0, description="Weight of the entropy bonus; with one, every token sampled trains."),
]
KlCoefficient = Annotated[
    float, Field(ge=0, description="Weight of the divergence from a frozen reference; 0: none.")
]
Kind = Annotated[KlKind, Field(description="How the divergence is estimated.")]
KlIn = Annotated[
    Literal["loss", "reward"],
    Field(description="The divergence is a term of the loss, or taken off the reward."),
]
ReferenceModel = Annotated[
    str | None,
    Field(
        description="Folder or hub name of the reference; null: the policy as the stage begins, or "
        "with LoRA the model without its adapters."
    ),
]
Cap = Annotated[
    float,
    Field(
        ge=0,
        description="Weigh by the learner's probability over the sampler's, up to this; 0: off.",
    ),
]
Level = Annotated[
    Literal["token", "trajectory"], Field(description="What `importance_cap` is the ratio of.")
]


def with_terms(
    row: Algorithm,
    *,
    entropy_bonus: Entropy = 0.0,
    kl_coefficient: KlCoefficient = 0.0,
    kl_kind: Kind = "k3",
    kl_in: KlIn = "loss",
    kl_reference: ReferenceModel = None,
    importance_cap: Cap = 0.0,
    importance_level: Level = "token",
) -> Algorithm:
    """`row` with the terms asked for."""
    if kl_coefficient:
        kl = ReferenceKl(kl_coefficient, kl_kind, kl_in, kl_reference)
        row = replace(row, reference=kl)
        if kl_in == "loss":
            loss = with_reference_kl(row.loss, kl_coefficient, kl_kind)
            row = replace(row, loss=loss, regularised=True)
    if entropy_bonus:
        loss = with_entropy_bonus(row.loss, entropy_bonus)
        row = replace(row, loss=loss, regularised=True)
    if importance_cap:
        row = replace(row, importance=Importance(importance_cap, importance_level))
    return row


def shared(build: Callable[..., Algorithm]) -> Callable[..., Algorithm]:
    """Give a row's factory the arguments of `with_terms`, after its own."""
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
