"""Roles of an agent's episode, and the policies that play them besides the run's `model`."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from ludus.config.sections import EvaluateConfig, ModelConfig, Section

POLICY = "policy"
"""Name of the policy of the run's `model`."""

NAME = r"[a-z][a-z0-9_]{0,39}"
Name = Annotated[str, StringConstraints(pattern=f"^{NAME}$")]


def _chosen(value: Any) -> Any:
    """Errors: ValueError for neither a policy's name, nor names with weights."""
    shares = value.values() if isinstance(value, dict) else ()
    right = bool(value) and all(
        isinstance(share, int | float) and not isinstance(share, bool) and 0 < share <= 1e6
        for share in shares
    )
    if isinstance(value, dict):
        right = right and all(isinstance(name, str) for name in value)
    elif not isinstance(value, str):
        right = False
    if not right:
        raise ValueError(
            f"has to be a policy's name, or names with weights above 0, like {{policy: 0.8, old: "
            f"0.2}}, not {value!r:.80}"
        )
    return value


Roles = dict[str, Annotated[str | dict[str, float], BeforeValidator(_chosen)]]
"""The policy of each role; or several, with the weights by which one is drawn for each group."""

RESERVED = {POLICY, "expert"}


class PastConfig(Section):
    """Older versions of the run's policy: a league. Each group plays against one of them."""

    every: int = Field(20, ge=1, description="Steps between two versions that join.")
    most: int = Field(
        4, ge=1, le=64, description="Versions to keep in memory; the oldest leaves first."
    )


class FixedEndpointConfig(Section):
    """A model behind an OpenAI-compatible server, which does not train."""

    base_url: str = Field(description="URL up to and including /v1.")
    model: str = Field(min_length=1, description="Name of the model.")
    api_key: str | None = Field(
        None,
        pattern=r"^\$[A-Za-z_][A-Za-z0-9_]*$",
        description="$NAME: the environment variable with the key.",
    )


class PolicyConfig(Section):
    """A policy besides the run's `model`. Set exactly one of the keys."""

    model: ModelConfig | Literal["same"] | None = Field(
        None,
        description="A model that trains too; `same`: as the run's `model`, with other initial "
        "weights if it begins from scratch. With `lora` on the same `path`, both share the base.",
    )
    weights: str | None = Field(
        None,
        min_length=1,
        description="Fixed weights: `start` (the run's `model` as it began), RUN, RUN/CHECKPOINT, "
        "or a Hugging Face folder with the same tokenizer.",
    )
    past: PastConfig | None = Field(None, description="Older versions of the run's policy.")
    endpoint: FixedEndpointConfig | None = Field(None, description="A served model, fixed.")

    @model_validator(mode="after")
    def _one_kind(self) -> PolicyConfig:
        kinds = {
            "model": self.model,
            "weights": self.weights,
            "past": self.past,
            "endpoint": self.endpoint,
        }
        given = [name for name, value in kinds.items() if value is not None]
        if len(given) != 1:
            raise ValueError(
                f"set exactly one of {', '.join(f'`{name}`' for name in kinds)}"
                + (f", not {' and '.join(given)}" if given else "")
            )
        return self


def check_roles(
    roles: Roles,
    policies: dict[Name, PolicyConfig],
    evaluate: EvaluateConfig,
    *,
    has_agent: bool,
    max_staleness: int,
) -> None:
    """Errors: ValueError for roles and policies that do not fit together."""
    if (roles or policies or evaluate.roles) and not has_agent:
        raise ValueError("`roles` and `policies` need an `agent`, which plays the roles")
    if not roles:
        for key, given in {"policies": policies, "evaluate.roles": evaluate.roles}.items():
            if given:
                raise ValueError(f"`{key}` needs `roles`: the names of the agent's roles")
        return
    if strange := [name for name in roles if not re.fullmatch(NAME, name)]:
        raise ValueError(
            f"`roles`: {strange[0]!r:.60} is no name: small letters, digits and _, a letter first"
        )
    if wrong := sorted(RESERVED & {*policies}):
        raise ValueError(f"`policies.{wrong[0]}`: this name is taken; choose another")
    if wrong := sorted(RESERVED & {*roles}):
        raise ValueError(f"`roles.{wrong[0]}`: this name is taken; choose another")
    known, trained = {POLICY, *policies}, _names(roles)
    both: dict[str, Roles] = {"roles": roles, "evaluate.roles": evaluate.roles or {}}
    for key, given in both.items():
        for role, chosen in given.items():
            if wrong := sorted(_names({role: chosen}) - known):
                told = f"`{key}.{role}`: no policy {wrong[0]!r}; there are {sorted(known)}"
                raise ValueError(told)
    if POLICY not in trained:
        raise ValueError(f"`roles`: none is played by `{POLICY}`, the run's `model`")
    if evaluate.roles is not None and {*evaluate.roles} != {*roles}:
        raise ValueError(f"`evaluate.roles` has to name the roles {sorted(roles)}, and no others")
    if unused := sorted({*policies} - trained - _names(evaluate.roles or {})):
        raise ValueError(f"`policies.{unused[0]}`: no role has this policy")
    for name, settings in policies.items():
        if settings.model is not None and name not in trained:
            raise ValueError(f"`policies.{name}` trains, but no role of `roles` has it")
        if settings.past is not None and max_staleness:
            raise ValueError(
                f"`policies.{name}.past` needs `rl.max_staleness: 0`: versions join between steps"
            )


def _names(roles: Roles) -> set[str]:
    """The policies of roles."""
    return {
        name
        for chosen in roles.values()
        for name in ([chosen] if isinstance(chosen, str) else chosen)
    }
