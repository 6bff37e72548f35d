"""Parses the options of `ludus generate-data` and `ludus augment` into their requests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast, get_args

from ludus.config.schema import RolloutConfig
from ludus.core.errors import ConfigError, DataError, did_you_mean
from ludus.core.types import Spec
from ludus.data.augmentation.request import AugmentRequest, Model, Solver, read_seeds
from ludus.data.expert import Format
from ludus.data.generation import EndpointModel, GenerationRequest, TaskSelection
from ludus.data.rollouts import KEY
from ludus.models.endpoint.client import check_url
from ludus.rollout.requests import parse_ids

Source = Literal["expert", "model", "mixed"]

SOLVER_KEY = "LUDUS_SOLVER_API_KEY"
"""The environment variable of the key of a solver at an endpoint of its own."""


def text_of(path: Path | None) -> str | None:
    """A file's text. Errors: DataError."""
    if path is None:
        return None
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None


def generation(envs: Sequence[Spec], **options: Any) -> GenerationRequest:
    """Returns the request that the options describe. Errors: ConfigError, DataError."""
    source = _one_of("--source", options["source"], get_args(Source))
    form = _one_of("--format", options["format"], get_args(Format))
    task_ids = parse_ids(options["ids"])
    if bool(task_ids) + bool(options["items"]) + bool(options["tiers"]) > 1:
        raise ConfigError("--ids, --items and --tier exclude each other: give one of them")
    rollout = RolloutConfig(
        format=cast(Format, form),
        system_prompt=text_of(options["system_prompt"]),
        max_turns=options["max_round"],
        max_tokens_per_turn=options["max_tokens"],
        temperature=options["temperature"],
        concurrency=options["concurrency"],
    )
    selection = TaskSelection(
        options["num_tasks"], options["first_seed"], options["tiers"], task_ids, options["items"]
    )
    return GenerationRequest(
        envs=envs,
        source=cast(Source, source),
        selection=selection,
        rollout=rollout,
        model=None if source == "expert" else _model(options),
        keep=options["keep"],
        min_score=options["min_score"],
        seed=options["seed"],
        workers=options["workers"],
    )


def augmentation(seeds: Path, judge: Spec, **options: Any) -> AugmentRequest:
    """Returns the request of the options of `ludus augment`. Errors: ConfigError, DataError."""
    url = check_url(options["base_url"], "--base-url")
    sampling = options["temperature"], options["max_tokens"]
    model = Model(options["model"], url, os.environ.get(KEY), *sampling)
    solver = None
    if options["attempts"]:
        own = options["solver_base_url"]
        solver_url = check_url(own, "--solver-base-url") if own else url
        key = os.environ.get(SOLVER_KEY if own else KEY)
        solver = Solver(
            Model(options["solver_model"] or model.name, solver_url, key, *sampling),
            options["attempts"],
            text_of(options["solver_prompt"]),
            options["min_solved"],
            options["max_solved"],
        )
    else:
        for name in ("solver_model", "solver_base_url", "solver_prompt"):
            if options[name] is not None:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{option} needs --attempts: the solver's attempts at a task")
    return AugmentRequest(
        seeds=read_seeds(seeds, options["prompt"], options["answer"], options["num_seeds"]),
        model=model,
        judge=judge,
        solver=solver,
        instructions=text_of(options["instructions"]),
        **{
            name: options[name]
            for name in ("num_tasks", "max_requests", "shots", "max_similarity", "seed")
        },
        concurrency=options["concurrency"],
    )


def _model(options: dict[str, Any]) -> EndpointModel:
    if not options["model"] or not options["base_url"]:
        raise ConfigError(f"--source {options['source']} needs --model and --base-url")
    key = os.environ.get(KEY)
    return EndpointModel(options["model"], check_url(options["base_url"]), key, options["samples"])


def _one_of(option: str, value: str, known: Sequence[str]) -> str:
    if value not in known:
        raise ConfigError(f"{option}: {value!r} is unknown{did_you_mean(value, known)}")
    return value
