"""Export a trained policy as a Hugging Face folder.

    config.json, model.safetensors          or adapter_config.json, adapter_model.safetensors
    generation_config.json                  end-of-turn ids, padding id
    tokenizer.json, tokenizer_config.json, chat_template.jinja
    README.md                               a model card

`AutoModelForCausalLM.from_pretrained(folder)` then generates the same tokens as the policy.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

import ludus
from ludus.core.errors import CheckpointError, ConfigError
from ludus.core.files import recover
from ludus.models.progress_bars import no_progress_bars
from ludus.models.quantisation import unpacked_copy
from ludus.train.checkpoint.folder import checkpoint_folder
from ludus.train.checkpoint.state import all_tensors, trained_tensors

if TYPE_CHECKING:  # a second to import, and few models have adapters
    from peft import PeftModel


def export_hf(
    model: Any,
    tokenizer: Any,
    path: str | Path,
    *,
    merge: bool = True,
    overwrite: bool = False,
    chat_template: str | None = None,
    stop_token_ids: Sequence[int] | None = None,
    name: str | None = None,
) -> Path:
    """Write `model` and `tokenizer` as a Hugging Face folder and return it. The model is unchanged.

    Args:
        model: a Hugging Face causal LM, or one with LoRA adapters (peft).
        tokenizer: a Hugging Face tokenizer.
        path: the folder, new or empty; written atomically.
        merge: merge adapters into a copy of the weights (twice the memory meanwhile); False writes
            only the adapters, which need their base model.
        overwrite: replace an earlier export.
        chat_template: Jinja text that replaces the tokenizer's template.
        stop_token_ids: end-of-turn ids; default: the model's, else the tokenizer's `eos`.
        name: title of the model card; default: the folder's name.

    Errors: ConfigError for a folder that must not be overwritten, or adapters without a named base
    model; CheckpointError if the disk refuses, or weights are not finite.
    """
    target = Path(path).expanduser().resolve()
    recover(target.parent, target.name)
    _require_target(target, overwrite)
    adapted = _has_adapters(model)
    base_name = str(getattr(model.config, "_name_or_path", "") or "")
    if adapted and not merge and not base_name:
        raise ConfigError(
            "the adapters cannot be exported alone: their base model has no name or folder "
            "(it was initialised from scratch); export them merged"
        )
    whole = _merged(model) if adapted and merge else model
    parts = trained_tensors(model) if adapted and not merge else all_tensors(model)
    with checkpoint_folder(target, sum(tensor.nbytes for tensor in parts.values())) as folder:
        with no_progress_bars():
            if adapted and not merge:
                whole.save_pretrained(folder, save_embedding_layers=False)
            else:
                whole.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if chat_template is not None:
            (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
        _generation_config(whole, tokenizer, stop_token_ids).save_pretrained(folder)
        card = _model_card(name or target.name, base_name, adapted and not merge)
        (folder / "README.md").write_text(card, encoding="utf-8")
    return target


def _require_target(target: Path, overwrite: bool) -> None:
    """Require a new or empty folder, or an earlier export with `overwrite`."""
    if not target.exists():
        return
    if not target.is_dir():
        raise ConfigError(f"{target} is a file: name a folder to export to")
    names = {path.name for path in target.iterdir()}
    if not names:
        return
    if not overwrite:
        raise ConfigError(
            f"{target} is not empty: name another folder, or overwrite it with --overwrite"
        )
    if not names & {"config.json", "adapter_config.json"}:
        raise ConfigError(f"{target} holds no model: it is not overwritten")


def _has_adapters(model: Any) -> bool:
    peft = sys.modules.get("peft")  # imported by whoever made a PeftModel
    return peft is not None and isinstance(model, peft.PeftModel)


def _merged(model: PeftModel) -> Any:
    """Returns a copy of the model with its adapters merged."""
    with warnings.catch_warnings():
        # peft warns that it corrects `tie_word_embeddings`, as intended.
        warnings.filterwarnings("ignore", message="Input and output embeddings are no longer tied")
        try:
            copied = unpacked_copy(model)
            _untie_adapted_embeddings(copied)
            return copied.merge_and_unload(safe_merge=True)
        except (ValueError, RuntimeError) as error:  # not finite; tied adapters; out of memory
            raise CheckpointError(f"the adapters cannot be merged: {error}") from error


def _untie_adapted_embeddings(model: PeftModel) -> None:
    """Untie adapted embeddings; otherwise both uses would get the sum of both deltas."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    base = model.get_base_model()
    inputs, outputs = base.get_input_embeddings(), base.get_output_embeddings()
    if outputs is None or not any(isinstance(m, BaseTunerLayer) for m in (inputs, outputs)):
        return
    if outputs.weight is inputs.weight:
        plain = outputs.get_base_layer() if isinstance(outputs, BaseTunerLayer) else outputs
        plain.weight = nn.Parameter(plain.weight.detach().clone(), requires_grad=False)
        base.config.tie_word_embeddings = False


def _generation_config(model: Any, tokenizer: Any, stop_token_ids: Sequence[int] | None) -> Any:
    """Returns the model's generation config with end-of-turn and padding ids."""
    config = copy.deepcopy(model.generation_config)
    if stop_token_ids:
        config.eos_token_id = list(stop_token_ids)
    elif config.eos_token_id is None:
        config.eos_token_id = tokenizer.eos_token_id
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id
    if config.pad_token_id is None:
        ids = config.eos_token_id
        config.pad_token_id = ids[0] if isinstance(ids, list) else ids
    return config


def _model_card(name: str, base_name: str, adapter: bool) -> str:
    base = f"base_model: {base_name}\n" if base_name else ""
    kind = "LoRA adapters" if adapter else "A language model"
    loader = f'AutoModelForCausalLM.from_pretrained("{name}")'
    return (
        f"---\nlibrary_name: {'peft' if adapter else 'transformers'}\n{base}"
        "pipeline_tag: text-generation\ntags:\n- ludus\n- reinforcement-learning\n---\n\n"
        f"# {name}\n\n{kind} trained with ludus {ludus.__version__}"
        f"{f', starting from {base_name}' if base_name else ''}.\n\n"
        f"```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = {loader}\ntokenizer = AutoTokenizer.from_pretrained("{name}")\n```\n'
    )
