"""Checks of the policies of a configuration: before a run exists, and before a back end starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ludus.config.policies import FixedEndpointConfig
from ludus.config.schema import ModelConfig, RunConfig
from ludus.core.errors import ConfigError
from ludus.core.types import Spec
from ludus.models.chat.tokenizers import load_tokenizer
from ludus.models.vocabulary import fingerprint
from ludus.store.folders import RunFolder
from ludus.train.checkpoint.listing import list_checkpoints

START = "start"
"""`policies.NAME.weights` of the run's `model` as it began."""


def check_policies(config: RunConfig) -> None:
    """Check the policies before a run is created. Reads no weights.

    Errors: ConfigError for weights that do not exist, an endpoint without its key, and a model with
    another context or tokenizer than the run's.
    """
    for name, settings in config.policies.items():
        if isinstance(settings.model, ModelConfig):
            check_trained(f"policies.{name}.model", settings.model, config.model)
        if settings.endpoint is not None:
            checked_key(f"policies.{name}.endpoint", settings.endpoint)
        if settings.weights not in (None, START):
            _locate(f"policies.{name}.weights", settings.weights, config)


def check_tokenizers(config: RunConfig, tokenizer: Any) -> None:
    """Errors: ConfigError for fixed weights with another tokenizer than the run's."""
    for name, settings in config.policies.items():
        if settings.weights not in (None, START):
            where = f"policies.{name}.weights"
            folder = _locate(where, settings.weights, config)
            path = Path(settings.weights).expanduser() if folder is None else folder.tokenizer
            if path.exists():
                require_same_tokenizer(where, load_tokenizer(str(path)), tokenizer)


def check_trained(where: str, settings: ModelConfig, own: ModelConfig) -> None:
    """Errors: ConfigError for another model that trains, and does not fit the run's."""
    if settings.context_length < own.context_length:
        raise ConfigError(
            f"{where}.context_length: {settings.context_length} is below that of `model`, "
            f"{own.context_length}: all roles have the same limit"
        )
    given, used = (_plain(t) for t in (settings.tokenizer, own.tokenizer or own.path))
    if settings.path is None and given != used:
        raise ConfigError(
            f"{where}.tokenizer: {given!r} is another tokenizer than that of `model`, {used!r}: "
            "policies that train have the same one"
        )


def _plain(tokenizer: str | Spec | None) -> Any:
    """A tokenizer's name; with its arguments, if it has any."""
    if isinstance(tokenizer, Spec):
        return tokenizer.model_dump() if tokenizer.args else tokenizer.name
    return tokenizer


def checked_key(where: str, settings: FixedEndpointConfig) -> str | None:
    """Returns the key of an endpoint. Errors: ConfigError for no URL, and without the key."""
    from ludus.models.endpoint.client import check_url

    check_url(settings.base_url, f"{where}.base_url")
    key = settings.api_key and os.environ.get(settings.api_key[1:])
    if settings.api_key is not None and not key:
        raise ConfigError(f"{where}.api_key: {settings.api_key} is not set in the environment")
    return key


def _locate(where: str, weights: str, config: RunConfig) -> RunFolder | None:
    """Returns the run of fixed weights; None for a Hugging Face folder. Errors: ConfigError."""
    from ludus.services.model.policy import locate

    try:
        folder, name = locate(weights, config.runs_dir)
        if folder is not None and name is None and not list_checkpoints(folder.checkpoints):
            raise ConfigError(f"run {folder.id} has no checkpoint yet")
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return folder


def require_tokenizer(where: str, path: str | None, own: Any) -> None:
    """Errors: ConfigError for a pretrained model with another tokenizer than the run's."""
    if path is not None:
        require_same_tokenizer(f"{where}.path", load_tokenizer(path), own)


def require_same_tokenizer(where: str, tokenizer: Any, own: Any) -> None:
    """Errors: ConfigError for a tokenizer with other ids than the run's."""
    if fingerprint(tokenizer) != fingerprint(own):
        raise ConfigError(
            f"{where}: it has another tokenizer than the run's `model`, so its ids would be other "
            "tokens: serve it with `ludus serve model`, and name its `endpoint`"
        )
