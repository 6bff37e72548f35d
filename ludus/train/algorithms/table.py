"""The table of algorithms: one row each, with the differences between rows in sight.

Each row is a value with the paper's settings, and a function of the same name with the arguments
that a configuration may set. `base.Algorithm` describes a row; `terms` has the arguments shared by
all rows of reinforcement learning.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from ludus.core.errors import ConfigError
from ludus.train.algorithms.advantages import (
    group_centred,
    group_normalised,
    has_signal,
    leave_one_out,
    ones,
)
from ludus.train.algorithms.aggregates import (
    advantage_mean,
    constant_length,
    token_mean,
    trajectory_mean,
    trajectory_sum,
)
from ludus.train.algorithms.ambiguity import ScaledByTrust, Trust, clipped_by_trust
from ludus.train.algorithms.anchors import AnchorStates
from ludus.train.algorithms.base import Algorithm, Overlong
from ludus.train.algorithms.credit import Gae, Outcome, TokenReturns, TurnReturns, Unit, Whitened
from ludus.train.algorithms.losses import (
    capped_reinforce,
    clipped,
    cross_entropy,
    reinforce,
    trajectory_clipped,
    with_value_loss,
)
from ludus.train.algorithms.terms import shared

__all__ = ["Algorithm"]

GRPO = Algorithm(
    "grpo",
    advantages=Outcome(group_normalised),
    loss=clipped(0.2, 0.2),
    aggregate=trajectory_mean,
    source="DeepSeekMath, Shao et al. 2024, arXiv:2402.03300",
)

DR_GRPO = Algorithm(
    "dr_grpo",
    advantages=Outcome(group_centred),
    loss=clipped(0.2, 0.2),
    aggregate=constant_length(1024),
    source="Understanding R1-Zero-Like Training, Liu et al. 2025, arXiv:2503.20783",
)

DAPO = Algorithm(
    "dapo",
    advantages=Outcome(group_normalised),
    loss=clipped(0.2, 0.28),
    aggregate=token_mean,
    keep=has_signal,
    max_rounds=4,
    source="DAPO, Yu et al. 2025, arXiv:2503.14476",
)

GSPO = Algorithm(
    "gspo",
    advantages=Outcome(group_normalised),
    loss=trajectory_clipped(3e-4, 4e-4),
    aggregate=trajectory_mean,
    source="Group Sequence Policy Optimization, Zheng et al. 2025, arXiv:2507.18071",
)

GSPO_TOKEN = Algorithm(
    "gspo_token",
    advantages=TurnReturns(1.0),
    loss=trajectory_clipped(3e-4, 4e-4),
    aggregate=trajectory_mean,
    source="GSPO-token, Zheng et al. 2025, arXiv:2507.18071, section 4.3",
)

CISPO = Algorithm(
    "cispo",
    advantages=Outcome(group_normalised),
    loss=capped_reinforce(5.0),
    aggregate=token_mean,
    source="MiniMax-M1, 2025, arXiv:2506.13585",
)

TURN_GRPO = Algorithm(
    "turn_grpo",
    advantages=TurnReturns(0.4),
    loss=clipped(0.2, 0.28),
    aggregate=trajectory_mean,
    source="Kevin, Baronio et al. 2025, arXiv:2507.11948",
)

GIGPO = Algorithm(
    "gigpo",
    advantages=AnchorStates(group_normalised, gamma=0.95, weight=1.0),
    loss=clipped(0.2, 0.2),
    aggregate=token_mean,
    source="Group-in-Group Policy Optimization, Feng et al. 2025, arXiv:2505.10978",
)

RLOO = Algorithm(
    "rloo",
    advantages=Outcome(leave_one_out),
    loss=reinforce,
    aggregate=trajectory_sum,
    source="Back to Basics, Ahmadian et al. 2024, arXiv:2402.14740; Kool et al. 2019",
)

REINFORCE_PP = Algorithm(
    "reinforce_pp",
    advantages=Whitened(TokenReturns()),
    loss=clipped(0.2, 0.2),
    aggregate=token_mean,
    compares=False,
    source="REINFORCE++, Hu et al. 2025, arXiv:2501.03262",
)

REINFORCE_PP_BASELINE = Algorithm(
    "reinforce_pp_baseline",
    advantages=Whitened(Outcome(group_centred)),
    loss=clipped(0.2, 0.2),
    aggregate=token_mean,
    source="REINFORCE++ with a group's mean as baseline, Hu et al. 2025, arXiv:2501.03262",
)

ADPO = Algorithm(
    "adpo",
    advantages=ScaledByTrust(Outcome(group_normalised)),
    loss=clipped_by_trust(0.2, 0.2, 0.1, Trust()),
    aggregate=token_mean,
    needs_consistency=True,
    source="Agent0, Xia et al. 2025, arXiv:2511.16043, section 3.3",
)

PPO = Algorithm(
    "ppo",
    advantages=Whitened(Gae()),
    loss=with_value_loss(clipped(0.2, 0.2), 0.5, 0.2),
    aggregate=token_mean,
    compares=False,
    regularised=True,  # by the critic's loss
    critic_lr=1e-3,
    source="PPO, Schulman et al. 2017, arXiv:1707.06347; GAE, 2016, arXiv:1506.02438",
)

SFT = Algorithm(
    "sft",
    advantages=Outcome(ones),
    loss=cross_entropy,
    aggregate=token_mean,
    compares=False,
    scored=False,
    source="maximum likelihood",
)

ROWS = [
    GRPO, DR_GRPO, DAPO, GSPO, GSPO_TOKEN, CISPO, TURN_GRPO, GIGPO, RLOO, REINFORCE_PP,
    REINFORCE_PP_BASELINE, ADPO, PPO, SFT,
]  # fmt: skip
"""All rows, with the papers' settings."""


ClipLow = Annotated[float, Field(gt=0, le=1, description="Lower clip of the ratio: 1 minus this.")]
ClipHigh = Annotated[float, Field(gt=0, description="Upper clip of the ratio: 1 plus this.")]
Length = Annotated[
    float, Field(gt=0, description="The constant, e.g. the maximum sampled tokens of an episode.")
]
MaxRounds = Annotated[
    int,
    Field(
        ge=1,
        description="Maximum rounds of sampling per step, to reach "
        "`rl.groups_per_step` groups with signal.",
    ),
]
OverlongLength = Annotated[
    int,
    Field(ge=0, description="Sampled tokens of an episode at which the length penalty reaches 1."),
]
OverlongMargin = Annotated[
    int, Field(ge=0, description="Tokens over which the penalty grows from 0 to 1; 0: no penalty.")
]
Gamma = Annotated[float, Field(ge=0, le=1, description="Discount of later rewards, per turn.")]
Average = Annotated[
    Literal["token", "trajectory"],
    Field(description="Mean over all tokens, or of each trajectory's mean, as in GRPO."),
]
MEANS = {"token": token_mean, "trajectory": trajectory_mean}
WhitenOver = Annotated[
    Unit,
    Field(description="Normalise advantages over all tokens, or with equal weight per rollout."),
]


@shared
def grpo(clip_low: ClipLow = 0.2, clip_high: ClipHigh = 0.2) -> Algorithm:
    """GRPO: group-normalised advantages, clipped loss, trajectory mean. No KL by default."""
    return replace(GRPO, loss=clipped(clip_low, clip_high))


@shared
def dr_grpo(clip_low: ClipLow = 0.2, clip_high: ClipHigh = 0.2, length: Length = 1024) -> Algorithm:
    """Dr. GRPO: GRPO without division by the std and by the trajectory's length."""
    return replace(DR_GRPO, loss=clipped(clip_low, clip_high), aggregate=constant_length(length))


@shared
def dapo(
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.28,
    max_rounds: MaxRounds = 4,
    overlong_length: OverlongLength = 0,
    overlong_margin: OverlongMargin = 0,
) -> Algorithm:
    """DAPO: a higher upper clip, token mean, groups with signal only, length penalty.

    A step samples further groups in place of groups without signal, in up to `max_rounds` rounds,
    then trains on the groups it has. Errors: ConfigError for a margin above the length.
    """
    if overlong_margin > overlong_length:
        raise ConfigError(
            f"rl.algorithm.args.overlong_margin = {overlong_margin} must be at most "
            f"overlong_length = {overlong_length}"
        )
    overlong = Overlong(overlong_length, overlong_margin) if overlong_margin else None
    loss = clipped(clip_low, clip_high)
    return replace(DAPO, loss=loss, max_rounds=max_rounds, overlong=overlong)


@shared
def gspo(clip_low: ClipLow = 3e-4, clip_high: ClipHigh = 4e-4) -> Algorithm:
    """GSPO: GRPO with one ratio per trajectory, the geometric mean over its tokens."""
    return replace(GSPO, loss=trajectory_clipped(clip_low, clip_high))


@shared
def gspo_token(
    clip_low: ClipLow = 3e-4, clip_high: ClipHigh = 4e-4, gamma: Gamma = 1.0
) -> Algorithm:
    """GSPO with one advantage per turn, from the rewards from that turn on."""
    loss = trajectory_clipped(clip_low, clip_high)
    return replace(GSPO_TOKEN, loss=loss, advantages=TurnReturns(gamma))


@shared
def cispo(
    cap: Annotated[float, Field(gt=0, description="Upper bound of the ratio.")] = 5.0,
) -> Algorithm:
    """CISPO: REINFORCE with capped ratios, so every token has a gradient."""
    return replace(CISPO, loss=capped_reinforce(cap))


@shared
def turn_grpo(clip_low: ClipLow = 0.2, clip_high: ClipHigh = 0.28, gamma: Gamma = 0.4) -> Algorithm:
    """GRPO over turns: each turn's advantage comes from the discounted rewards from it on."""
    return replace(TURN_GRPO, loss=clipped(clip_low, clip_high), advantages=TurnReturns(gamma))


@shared
def gigpo(
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.2,
    gamma: Gamma = 0.95,
    turn_weight: Annotated[
        float, Field(gt=0, description="Weight of the turns' advantages beside the episode's.")
    ] = 1.0,
    divide_by_std: Annotated[
        bool, Field(description="Divide advantages by the std, as GRPO; false: as Dr. GRPO.")
    ] = True,
    average: Average = "token",
) -> Algorithm:
    """GiGPO: GRPO, and turns from the same observation compared within the group."""
    compare = group_normalised if divide_by_std else group_centred
    return replace(
        GIGPO,
        advantages=AnchorStates(compare, gamma, turn_weight),
        loss=clipped(clip_low, clip_high),
        aggregate=MEANS[average],
    )


@shared
def rloo() -> Algorithm:
    """RLOO: REINFORCE on whole trajectories, with the mean of the others as baseline."""
    return RLOO


@shared
def reinforce_pp(
    clip_low: ClipLow = 0.2, clip_high: ClipHigh = 0.2, whiten_over: WhitenOver = "token"
) -> Algorithm:
    """REINFORCE++: no group and no critic; rewards to go, normalised over the whole step."""
    advantages = Whitened(TokenReturns(), whiten_over)
    return replace(REINFORCE_PP, loss=clipped(clip_low, clip_high), advantages=advantages)


@shared
def reinforce_pp_baseline(
    clip_low: ClipLow = 0.2, clip_high: ClipHigh = 0.2, whiten_over: WhitenOver = "token"
) -> Algorithm:
    """REINFORCE++ with the group's mean subtracted from the rewards first."""
    advantages = Whitened(Outcome(group_centred), whiten_over)
    return replace(REINFORCE_PP_BASELINE, loss=clipped(clip_low, clip_high), advantages=advantages)


@shared
def adpo(
    scale_advantages: Annotated[
        bool, Field(description="Multiply advantages by s(p), from `min_scale` to 1.")
    ] = True,
    dynamic_clip: Annotated[
        bool, Field(description="Widen the upper clip by up to `clip_extra`, for low p.")
    ] = True,
    min_scale: Annotated[float, Field(gt=0, le=1, description="s(p) for p up to `p_low`.")] = 0.6,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.2,
    clip_extra: Annotated[
        float, Field(gt=0, description="Added to `clip_high` for p up to `p_low`.")
    ] = 0.1,
    p_low: Annotated[
        float, Field(ge=0, lt=1, description="Consistency p up to which a label has no trust.")
    ] = 0.3,
    p_high: Annotated[
        float, Field(gt=0, le=1, description="Consistency p from which a label is trusted fully.")
    ] = 0.8,
    average: Average = "token",
) -> Algorithm:
    """ADPO: GRPO with a scale of advantages and an upper clip that depend on the label's certainty.

    p is `Task.consistency`. Without `scale_advantages` and `dynamic_clip`, and with `average:
    trajectory`, it is GRPO. Errors: ConfigError for `p_low` not below `p_high`, or a key without
    effect.
    """
    if not p_low < p_high:
        raise ConfigError(f"p_low = {p_low} must be below p_high = {p_high}")
    unused = {"min_scale": (scale_advantages, min_scale, 0.6)}
    unused["clip_extra"] = (dynamic_clip, clip_extra, 0.1)
    for key, (used, value, default) in unused.items():
        if not used and value != default:
            switch = "scale_advantages" if key == "min_scale" else "dynamic_clip"
            raise ConfigError(f"{key} = {value} has no effect with `{switch}: false`: remove it")
    trust = Trust(p_low, p_high)
    credit = Outcome(group_normalised)
    return replace(
        ADPO,
        advantages=ScaledByTrust(credit, trust, min_scale if scale_advantages else 1.0)
        if scale_advantages or dynamic_clip
        else credit,
        loss=clipped_by_trust(clip_low, clip_high, clip_extra, trust)
        if dynamic_clip
        else clipped(clip_low, clip_high),
        aggregate=MEANS[average],
        needs_consistency=scale_advantages or dynamic_clip,
    )


@shared
def ppo(
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.2,
    gamma: Annotated[float, Field(ge=0, le=1, description="Discount per step.")] = 1.0,
    lam: Annotated[
        float,
        Field(
            ge=0, le=1, description="Lambda of GAE: 1 uses returns only, 0 the critic's next value."
        ),
    ] = 0.95,
    level: Annotated[
        Literal["token", "turn"], Field(description="The time step of GAE.")
    ] = "token",
    value_coefficient: Annotated[
        float, Field(gt=0, description="Weight of the critic's loss.")
    ] = 0.5,
    bootstrap: Annotated[
        bool,
        Field(
            description="After an episode that a limit of tokens or turns cut, take the critic's "
            "value: the limit is no part of the task. False: 0."
        ),
    ] = False,
    critic_lr: Annotated[float, Field(gt=0, description="Learning rate of the critic.")] = 1e-3,
    value_clip: Annotated[
        float, Field(gt=0, description="Maximum change of the critic's values by an update.")
    ] = 0.2,
    whiten_over: WhitenOver = "token",
) -> Algorithm:
    """PPO: a critic on the policy's trunk, generalised advantage estimates, clipped losses."""
    return replace(
        PPO,
        advantages=Whitened(Gae(gamma, lam, level, bootstrap), whiten_over),
        loss=with_value_loss(clipped(clip_low, clip_high), value_coefficient, value_clip),
        critic_lr=critic_lr,
    )


def sft(
    observation_weight: Annotated[
        float,
        Field(ge=0, le=1, description="Weight of tokens that the expert did not write; 1 hurts."),
    ] = 0.0,
) -> Algorithm:
    """Cross-entropy on demonstrations, averaged over tokens."""
    if not observation_weight:
        return SFT
    return replace(SFT, aggregate=advantage_mean, observation_weight=observation_weight)
