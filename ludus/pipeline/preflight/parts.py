"""Checks of model, device, tokenizer, template and sampler. Loads no weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ludus.backends.hosts import is_hosted
from ludus.config.schema import ModelConfig, RunConfig
from ludus.core.errors import ConfigError, LudusError
from ludus.core.types import Spec
from ludus.models import SAMPLERS, TOKENIZERS
from ludus.models.build import check_model
from ludus.models.chat.template import load_template
from ludus.models.chat.tokenizers import load_tokenizer
from ludus.pipeline.parts.policy_checks import check_tokenizers, require_tokenizer
from ludus.pipeline.parts.tokenizer import make_renderers
from ludus.store.folders import RunFolder
from ludus.train.kernels.bindings import kernels


def check_parts(config: RunConfig, folder: RunFolder | None = None) -> Any:
    """Check model, device, tokenizer, template and sampler of a configuration.

    A hub's model that is not cached: its configuration and its tokenizer are loaded, a few MB.

    Returns the tokenizer: the one in the run's folder, or the recipe's; None where one is to be
    trained. Errors: ConfigError, MissingDependency, CheckpointError.
    """
    here = config.backend.name == "local"
    model = config.model
    if here:
        check_sampler(config)
        check_learner(config)
    if model.chat_template is not None:
        load_template(model.chat_template)
    check_model(model, None, here=here)
    tokenizer = _tokenizer(model, folder)
    if tokenizer is not None:
        check_model(model, tokenizer, here=here)
        make_renderers(config, tokenizer)
        check_tokenizers(config, tokenizer)
    for name, policy in config.policies.items():
        if isinstance(policy.model, ModelConfig):
            _check_policy(f"policies.{name}.model", policy.model, tokenizer, here)
    return tokenizer


def check_sampler(config: RunConfig) -> None:
    """Errors: ConfigError where the sampler's engine is not installed."""
    if config.verify or is_hosted(config):
        return
    check = getattr(SAMPLERS.load(config.sampler.name), "check_available", None)
    if check is not None:
        args = SAMPLERS.check(config.sampler, "sampler")
        check(args.get("python"), config.rollout.deterministic)


def check_learner(config: RunConfig) -> None:
    """Errors: ConfigError where gradients cannot skip observations. `Forward` refuses models whose
    layers ludus' kernels do not compute."""
    if not config.learner.detach_observations:
        return
    model = config.model
    hindrances = {
        "`learner.compile: true` replaces": config.learner.compile,
        "`verify: true` does without": config.verify,
        "`model.lora` does without": model.lora is not None,
        f"`model.device: {model.device}` does without": model.device != "cpu",
        f"`model.dtype: {model.dtype}` does without": model.dtype != "float32",
        "this machine lacks (no C compiler, or LUDUS_NATIVE=0)": kernels(torch.float32) is None,
    }
    for hindrance, found in hindrances.items():
        if found:
            raise ConfigError(
                f"learner.detach_observations needs ludus' training kernels, which {hindrance}. "
                "Set it to false: gradients are then exact, and take longer"
            )


def _tokenizer(model: ModelConfig, folder: RunFolder | None) -> Any:
    if folder is not None and folder.tokenizer.exists():
        return load_tokenizer(str(folder.tokenizer))
    named = model.tokenizer
    if isinstance(named, Spec) or (named in TOKENIZERS.names() and not Path(str(named)).is_dir()):
        return None
    return load_tokenizer(named) if named else load_tokenizer(str(model.path), "model.path")


def _check_policy(where: str, model: ModelConfig, tokenizer: Any, here: bool) -> None:
    try:
        check_model(model, tokenizer, here=here)
        if tokenizer is not None:
            require_tokenizer(where, model.path, tokenizer)
    except LudusError as error:
        text = str(error)
        if not text.startswith("model."):
            raise
        raise ConfigError(f"{where}.{text.removeprefix('model.')}") from error
