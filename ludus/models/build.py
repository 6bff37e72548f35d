"""Builds the model: from scratch or from a Hugging Face folder, optionally with LoRA."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from ludus.config.schema import LoraConfig, ModelConfig
from ludus.core.errors import CheckpointError, ConfigError, LudusError, did_you_mean
from ludus.core.modules import require
from ludus.models import ARCHITECTURES
from ludus.models.chat.tokenizers import load_error
from ludus.models.induction import check_induction_heads, set_induction_heads
from ludus.models.progress_bars import no_progress_bars
from ludus.models.quantisation import keep_packing, loading, unpacked_copy
from ludus.models.vocabulary import Vocabulary

HiddenSize = Annotated[int, Field(ge=8, description="Width of the residual stream.")]
NumLayers = Annotated[int, Field(ge=1, description="Transformer blocks.")]
NumHeads = Annotated[int, Field(ge=1, description="Query heads.")]
NumKVHeads = Annotated[int, Field(ge=1, description="Key and value heads; divides num_heads.")]
HeadDim = Annotated[int, Field(ge=2, multiple_of=2, description="Width of a head.")]
IntermediateSize = Annotated[int, Field(ge=8, description="Width of the gated MLP.")]
TieEmbeddings = Annotated[
    bool, Field(description="Share the matrix of input and output embeddings.")
]
RopeTheta = Annotated[
    float, Field(gt=0, allow_inf_nan=False, description="Base of the rotary frequencies.")
]
InitRange = Annotated[
    float | None,
    Field(
        gt=0,
        allow_inf_nan=False,
        description="Standard deviation of initial weights; null: hidden_size ** -0.5.",
    ),
]
InductionHeads = Annotated[
    bool, Field(description="Begin with heads that look words up in the prompt.")
]


def _architecture(config_class: type[PreTrainedConfig], doc: str) -> Callable[..., object]:
    """Returns a function from sizes to a transformers configuration."""

    def build(
        vocab_size: int,
        context_length: int,
        hidden_size: HiddenSize = 128,
        num_layers: NumLayers = 4,
        num_heads: NumHeads = 4,
        num_kv_heads: NumKVHeads = 2,
        head_dim: HeadDim = 32,
        intermediate_size: IntermediateSize = 384,
        tie_embeddings: TieEmbeddings = True,
        rope_theta: RopeTheta = 10_000.0,
        init_range: InitRange = None,
        induction_heads: InductionHeads = False,
    ) -> PreTrainedConfig:
        if num_heads % num_kv_heads:
            raise ConfigError(
                f"model.architecture.args.num_kv_heads: {num_kv_heads} does not divide "
                f"num_heads, {num_heads}"
            )
        shape = config_class(
            vocab_size=vocab_size,
            max_position_embeddings=context_length,
            hidden_size=hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=intermediate_size,
            tie_word_embeddings=tie_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
            # transformers' default of 0.02 suits a width of 2,500. At a width of 128, a model
            # trains on a plateau for hundreds of steps with it (numbers: docs/log.md).
            initializer_range=init_range or hidden_size**-0.5,
            attention_dropout=0.0,
            **({"induction_heads": True} if induction_heads else {}),
        )
        if induction_heads:
            check_induction_heads(shape)
        return shape

    build.__doc__ = doc
    return build


qwen3 = _architecture(
    Qwen3Config, "Qwen3 (Yang et al. 2025, arXiv:2505.09388): about 0.8 M parameters by default."
)
llama = _architecture(
    LlamaConfig, "Llama (Touvron et al. 2023, arXiv:2307.09288): about 0.8 M parameters by default."
)


def build_model(
    config: ModelConfig, tokenizer: PreTrainedTokenizerFast, seed: int
) -> PreTrainedModel:
    """Build the policy on `config.device` in `config.dtype`; with LoRA, wrapped by peft.

    A model from scratch depends only on the configuration, the vocabulary size and `seed`; global
    random states are neither used nor changed. Dropout is 0 except for `config.lora.dropout`, since
    learner and sampler must compute the same distribution. `config.tf32` is set for all float32
    products of this process on CUDA.

    Errors: ConfigError for a folder or hub name without a model, a tokenizer with more tokens than
    the model, a context longer than the model's, a missing device, an unknown LoRA target.
    """
    check_device(config.device)
    set_tf32(config.tf32)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = _from_scratch(config, tokenizer) if config.path is None else _pretrained(config)
        _check_fit(config, tokenizer, model)
        model.config.pad_token_id = tokenizer.pad_token_id
        model.config.eos_token_id = tokenizer.eos_token_id
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        if config.lora is not None:
            model = _with_lora(model, config.lora)
    return model.to(config.device)


def check_model(config: ModelConfig, tokenizer: Any, *, here: bool = True) -> None:
    """Check what `build_model` needs, on torch's meta device: allocates and reads no weights.

    Args:
        tokenizer: None where it is not trained yet.
        here: the model is built on this machine, so its device and memory count.

    Errors: as `build_model`.
    """
    if here:
        check_device(config.device)
    size = 1024 if tokenizer is None else Vocabulary.of(tokenizer).size
    shape = model_shape(config, size)
    try:
        model = _on_meta(shape)
    except Exception as error:  # of each model's own code
        if config.path is not None:
            raise ConfigError(load_error("model.path", config.path, error)) from error
        raise ConfigError(
            f"model.architecture.args: torch cannot build the model: {_line(error)}"
        ) from error
    if config.path is None and here:
        _check_memory(model)
    if config.path is not None:
        _check_files(Path(config.path).expanduser())
    if tokenizer is not None:
        _check_fit(config, tokenizer, model)
    if config.lora is not None:
        loading(config)
        _check_lora(model, config.lora)


def set_tf32(on: bool) -> None:
    """Multiply and convolve float32 matrices on CUDA in TF32, or exactly. Process-wide."""
    torch.backends.cuda.matmul.allow_tf32 = on
    torch.backends.cudnn.allow_tf32 = on


def model_shape(config: ModelConfig, vocab_size: int) -> PreTrainedConfig:
    """Returns the shape of a pretrained model, or of a new model with `vocab_size` tokens.

    Errors: ConfigError.
    """
    if config.path is not None:
        try:
            pretrained: PreTrainedConfig = AutoConfig.from_pretrained(config.path)
        except Exception as error:  # of its validators, too: each has classes of its own
            raise ConfigError(load_error("model.path", config.path, error)) from error
        return pretrained
    assert config.architecture is not None
    try:
        shape: PreTrainedConfig = ARCHITECTURES.build(
            config.architecture,
            where="model.architecture",
            vocab_size=vocab_size,
            context_length=config.context_length,
        )
    except LudusError:
        raise
    except Exception as error:  # of transformers' validators
        raise ConfigError(
            f"model.architecture.args: not a {config.architecture.name} model: {_line(error)}"
        ) from error
    return shape


def merge_lora(model: Any) -> PreTrainedModel:
    """Returns a copy of the model with its adapters merged; a model without adapters as it is."""
    if not hasattr(model, "merge_and_unload"):
        return model
    return unpacked_copy(model).merge_and_unload()


def _from_scratch(config: ModelConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Initialise in float32, so that all dtypes start from the same weights."""
    shape = model_shape(config, Vocabulary.of(tokenizer).size)
    try:
        _check_memory(_on_meta(shape))
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
        if getattr(shape, "induction_heads", False):
            set_induction_heads(model)
    except (RuntimeError, OverflowError) as error:  # a size that torch cannot represent or allocate
        raise ConfigError(
            f"model.architecture.args: torch cannot build the model: {_line(error)}"
        ) from error
    for parameter in model.parameters():  # not `model.to`, which would round rotary frequencies
        parameter.data = parameter.data.to(getattr(torch, config.dtype))
    return model


def _on_meta(shape: PreTrainedConfig) -> PreTrainedModel:
    """Returns a model without memory for its weights."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
    return model


def _check_memory(model: PreTrainedModel) -> None:
    """Refuse a model whose weights alone exceed the machine's memory."""
    size, memory = 4 * sum(p.numel() for p in model.parameters()), _physical_memory()
    if size > memory:
        raise ConfigError(
            f"model.architecture.args: the model's {size / 4:,.0f} parameters take "
            f"{size / 2**30:,.0f} GiB in float32, and this machine has {memory / 2**30:,.0f} GiB: "
            "lower hidden_size, num_layers or intermediate_size"
        )


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _pretrained(config: ModelConfig) -> PreTrainedModel:
    assert config.path is not None
    shape = model_shape(config, 0)
    for key, value in shape.to_dict().items():
        if isinstance(value, float) and ("dropout" in key or key.endswith("pdrop")):
            setattr(shape, key, 0.0)
    try:
        with no_progress_bars():
            model, report = AutoModelForCausalLM.from_pretrained(
                config.path,
                config=shape,
                dtype=getattr(torch, config.dtype),
                output_loading_info=True,
                **loading(config),
            )
            keep_packing(model)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(load_error("model.path", config.path, error)) from error
    except (RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"model.path: {config.path}: its weights cannot be loaded, the file may be truncated: "
            f"{_line(error)}"
        ) from error
    if missing := sorted(report["missing_keys"]):  # transformers initialises them randomly
        raise ConfigError(
            f"model.path: {config.path} lacks {len(missing)} of the model's tensors, "
            f"e.g. {missing[0]}"
        )
    return model


def _check_files(folder: Path) -> None:
    """Check that a folder has all files of its weights, each complete; reads their headers only.

    A hub's name is no folder: its files are checked when they are loaded.
    """
    if not folder.is_dir():
        return
    indices = [folder / f"{name}.index.json" for name in ("model.safetensors", "pytorch_model.bin")]
    for index in [file for file in indices if file.is_file()][:1]:
        parts = set(json.loads(index.read_text("utf-8")).get("weight_map", {}).values())
        if lacking := sorted(part for part in parts if not (folder / part).is_file()):
            raise ConfigError(
                f"model.path: {folder} lacks {len(lacking)} of the {len(parts)} files with its "
                f"weights, e.g. {lacking[0]}"
            )
    files = sorted(folder.glob("*.safetensors"))
    if not files and not any(folder.glob("*.bin")):
        raise ConfigError(f"model.path: {folder} has no weights (*.safetensors)")
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"model.path: {folder}: its weights cannot be loaded, {file.name} may be "
                f"truncated: {_line(error)}"
            ) from error


def _check_fit(
    config: ModelConfig, tokenizer: PreTrainedTokenizerFast, model: PreTrainedModel
) -> None:
    embeddings = model.get_input_embeddings().weight.shape[0]
    token, last = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if last >= embeddings:
        raise ConfigError(
            f"model.tokenizer: the token {token!r} has the id {last}, more than the model's "
            f"{embeddings} embeddings; use the model's own tokenizer, without added tokens"
        )
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and config.context_length > limit:
        raise ConfigError(
            f"model.context_length: {config.context_length} exceeds the model's {limit} positions"
        )


def check_device(name: str) -> None:
    """Errors: ConfigError for a device that torch does not have."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(
            f"model.device: {name!r} is not a device; use cpu, cuda or cuda:N"
        ) from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"model.device: {name} does not exist: torch finds {torch.cuda.device_count()} "
            "CUDA devices; use cpu"
        )


def _check_lora(model: PreTrainedModel, lora: LoraConfig) -> None:
    """Errors: MissingDependency without peft, ConfigError for an unknown target."""
    require("peft", "train", "model.lora")
    if lora.targets == "all-linear":
        return
    linear = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    for i, target in enumerate(lora.targets):
        if target.rpartition(".")[2] not in linear:
            raise ConfigError(
                f"model.lora.targets[{i}]: the model has no linear module {target!r}"
                f"{did_you_mean(target, linear)}"
            )


def _with_lora(model: PreTrainedModel, lora: LoraConfig) -> PreTrainedModel:
    _check_lora(model, lora)
    import peft

    with warnings.catch_warnings():
        # peft reads an attribute of transformers under its deprecated name.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        # peft sets ranks for stacked experts, also where no adapter has them.
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern", RuntimeWarning)
        return peft.get_peft_model(
            model,
            peft.LoraConfig(
                task_type="CAUSAL_LM",
                r=lora.rank,
                lora_alpha=lora.alpha,
                lora_dropout=lora.dropout,
                target_modules=lora.targets,
            ),
        )
