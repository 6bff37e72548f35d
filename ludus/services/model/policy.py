"""Loads the policy to serve: a run's checkpoint, or a Hugging Face folder.

    a run's id or folder           the run's newest checkpoint
    .../checkpoints/rl-000100      that checkpoint
    a folder with a config.json    loaded with `from_pretrained`

Each becomes a plain model (adapters merged) with tokenizer and chat template, so that weights from
any source can replace those of another.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError
from transformers import AutoConfig

from ludus.config.messages import option_faults
from ludus.config.schema import ModelConfig
from ludus.core.errors import CheckpointError, ConfigError
from ludus.models.build import build_model, merge_lora
from ludus.models.chat.parsing import Thinking
from ludus.models.chat.renderer import Renderer
from ludus.models.chat.tokenizers import load_tokenizer
from ludus.store.folders import RunFolder
from ludus.store.settings import run_config
from ludus.train.checkpoint.policy import (
    find_checkpoint,
    find_run_checkpoint,
    restore_policy,
    run_tokenizer,
)

DEFAULT_MAX_CONTEXT = 8192
"""Maximum context length of a Hugging Face model, unless the user sets one."""

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class ModelOverrides:
    """The user's settings; None keeps the setting of the run or the folder."""

    device: str | None = None
    dtype: Dtype | None = None
    context_length: int | None = None
    chat_template: str | None = None
    thinking: Thinking | None = None


@dataclass(frozen=True)
class Policy:
    """A model to serve. `version` is the run's policy version; 0 for a folder. `folder` is the
    Hugging Face folder; None for a run's checkpoint."""

    name: str
    origin: str
    model: Any
    tokenizer: Any
    settings: ModelConfig
    version: int
    folder: Path | None = None

    def renderer(self, tools: Any = ()) -> Renderer:
        """A renderer for conversations with these tools. Errors: ConfigError."""
        return Renderer(self.tokenizer, self.settings.chat_template, tools, self.settings.thinking)


def load_policy(checkpoint: str, runs_dir: str, overrides: ModelOverrides) -> Policy:
    """Load a run, `RUN/CHECKPOINT`, a checkpoint's folder, or a Hugging Face folder.

    Errors: ConfigError if the name is none of these; CheckpointError if the files are damaged.
    """
    path = Path(checkpoint).expanduser()
    folder, name = locate(checkpoint, runs_dir)
    if folder is None:
        return _of_folder(path, overrides)
    if _is_checkpoint(path):
        return _of_run(folder, path.resolve(), overrides)
    return _of_run(folder, find_checkpoint(folder, name).path, overrides)


def locate(checkpoint: str, runs_dir: str) -> tuple[RunFolder | None, str | None]:
    """Returns the run that `load_policy` would read, and the checkpoint's name (None: the newest);
    no run for a Hugging Face folder. Reads no weights.

    Errors: ConfigError if the name is neither.
    """
    path = Path(checkpoint).expanduser()
    if _is_checkpoint(path):
        return RunFolder(path.parent.parent.resolve()), path.name
    if (path / "config.json").is_file():
        return None, None
    if path.is_dir() and not (path / "config.yaml").is_file():
        raise ConfigError(
            f"{checkpoint} is neither a run, nor a checkpoint in a run's folder, nor a Hugging "
            "Face folder (which has a config.json)"
        )
    try:
        return find_run_checkpoint(runs_dir, checkpoint)
    except ConfigError as error:
        raise ConfigError(f"{checkpoint} is not a folder, and {error}") from None


def _is_checkpoint(path: Path) -> bool:
    return (path / "manifest.json").is_file() and (path.parent.parent / "config.yaml").is_file()


def _of_run(folder: RunFolder, path: Path, overrides: ModelOverrides) -> Policy:
    tokenizer = run_tokenizer(folder)
    config = run_config(folder)
    settings = _with_overrides(config.model, overrides)
    model, version = restore_policy(settings, tokenizer, config.seed, path)
    origin = f"{folder.id}/{path.name}"
    return Policy(folder.id, origin, merge_lora(model), tokenizer, settings, version)


def _of_folder(path: Path, overrides: ModelOverrides) -> Policy:
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise ConfigError(f"{path}: its config.json describes no model: {reason}") from None
    positions = getattr(config.get_text_config(), "max_position_embeddings", DEFAULT_MAX_CONTEXT)
    half = getattr(config, "dtype", None) == torch.bfloat16
    length, dtype = min(positions, DEFAULT_MAX_CONTEXT), "bfloat16" if half else "float32"
    settings = _with_overrides(
        ModelConfig(path=str(path), context_length=length, dtype=dtype), overrides
    )
    tokenizer = load_tokenizer(str(path))
    model = build_model(settings, tokenizer, 0)
    place = path.resolve()
    return Policy(place.name, str(path), model, tokenizer, settings, version=0, folder=place)


def _with_overrides(config: ModelConfig, overrides: ModelOverrides) -> ModelConfig:
    given = {key: value for key, value in vars(overrides).items() if value is not None}
    try:
        return ModelConfig(**{**config.model_dump(), **given})
    except ValidationError as error:
        raise ConfigError(option_faults(error, ModelConfig)) from None


def fitting_weights(served: Policy, offered: Policy) -> dict[str, torch.Tensor]:
    """The weights of `offered`, checked against `served`.

    Errors: CheckpointError if tokenizers or tensor shapes differ, or a weight is not finite.
    """
    if offered.tokenizer.get_vocab() != served.tokenizer.get_vocab():
        raise CheckpointError(f"{offered.origin} has another tokenizer than {served.origin}")
    given, held = offered.model.state_dict(), served.model.state_dict()
    wrong = [
        f"{name}: {_shape(given.get(name))} offered, {_shape(held.get(name))} served"
        for name in dict.fromkeys([*held, *given])
        if _shape(given.get(name)) != _shape(held.get(name))
    ]
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"{offered.origin} is another model than {served.origin}: {'; '.join(wrong[:3])}{more}"
        )
    if bad := [name for name, tensor in given.items() if not bool(tensor.isfinite().all())]:
        raise CheckpointError(f"{offered.origin}: {bad[0]} is not finite")
    return dict(given)


def _shape(tensor: torch.Tensor | None) -> str:
    return "absent" if tensor is None else "x".join(map(str, tensor.shape)) or "scalar"
