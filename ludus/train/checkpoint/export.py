"""Export of a trained policy to a Hugging Face folder that any tool of the field can load.

    config.json, model.safetensors          or adapter_config.json, adapter_model.safetensors
    generation_config.json                  where a turn ends, what pads
    tokenizer.json, tokenizer_config.json, chat_template.jinja
    README.md                               a model card

`AutoModelForCausalLM.from_pretrained(folder)` then generates the tokens that the policy would.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

import ludus
from ludus.core.errors import CheckpointError, ConfigError
from ludus.core.files import recover
from ludus.train.checkpoint.folder import checkpoint_folder
from ludus.train.checkpoint.state import all_tensors, trained_tensors


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
    """Write `model` and `tokenizer` as a Hugging Face folder; returns it. The model is unchanged.

    Args:
        model: a Hugging Face causal LM, or one with LoRA adapters (peft).
        tokenizer: a Hugging Face tokenizer.
        path: the folder; new or empty. It appears whole or not at all.
        merge: fold adapters into the weights, on a copy (so twice the memory for that moment);
            False writes the adapters alone, which need their base model to be loaded.
        overwrite: replace an earlier export.
        chat_template: Jinja text, in place of the tokenizer's own.
        stop_token_ids: what ends a turn; default: the model's own, else the tokenizer's `eos`.
        name: title of the model card, e.g. the run's name; default: the folder's.

    Errors: ConfigError where the folder may not be written to, or the adapters have no base to
    refer to; CheckpointError where the disk refuses, or weights are not finite.
    """
    target = Path(path).expanduser().resolve()
    recover(target.parent, target.name)
    _require_target(target, overwrite)
    adapted = isinstance(model, PeftModel)
    base_name = str(getattr(model.config, "_name_or_path", "") or "")
    if adapted and not merge and not base_name:
        raise ConfigError(
            "the adapters cannot be exported alone, because their base model has no name or "
            "folder to be loaded from (it was initialised from scratch): export them merged"
        )
    whole = _merged(model) if adapted and merge else model
    parts = trained_tensors(model) if adapted and not merge else all_tensors(model)
    with checkpoint_folder(target, sum(tensor.nbytes for tensor in parts.values())) as folder:
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
    """A new or empty folder, or an earlier export that may be replaced."""
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
        raise ConfigError(f"{target} holds something else than a model: it is not overwritten")


def _merged(model: PeftModel) -> Any:
    """A copy of the model whose adapters are folded into its weights."""
    with warnings.catch_warnings():
        # peft tells that it corrects `tie_word_embeddings`, which is what we want.
        warnings.filterwarnings("ignore", message="Input and output embeddings are no longer tied")
        try:
            twin = copy.deepcopy(model)
            _untie_adapted_embeddings(twin)
            return twin.merge_and_unload(safe_merge=True)
        except (ValueError, RuntimeError) as error:  # not finite; tied adapters; out of memory
            raise CheckpointError(f"the adapters cannot be merged: {error}") from error


def _untie_adapted_embeddings(model: PeftModel) -> None:
    """Part tied embeddings that have adapters, or both uses would get the sum of both deltas."""
    base = model.get_base_model()
    inputs, outputs = base.get_input_embeddings(), base.get_output_embeddings()
    if outputs is None or not any(isinstance(m, BaseTunerLayer) for m in (inputs, outputs)):
        return
    if outputs.weight is inputs.weight:
        plain = outputs.get_base_layer() if isinstance(outputs, BaseTunerLayer) else outputs
        plain.weight = nn.Parameter(plain.weight.detach().clone(), requires_grad=False)
        base.config.tie_word_embeddings = False


def _generation_config(model: Any, tokenizer: Any, stop_token_ids: Sequence[int] | None) -> Any:
    """The model's own, with the ids that end a turn and that pad."""
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
    what = "LoRA adapters" if adapter else "A language model"
    loader = f'AutoModelForCausalLM.from_pretrained("{name}")'
    return (
        f"---\nlibrary_name: {'peft' if adapter else 'transformers'}\n{base}"
        "pipeline_tag: text-generation\ntags:\n- ludus\n- reinforcement-learning\n---\n\n"
        f"# {name}\n\n{what} trained with ludus {ludus.__version__}"
        f"{f', starting from {base_name}' if base_name else ''}.\n\n"
        f"```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = {loader}\ntokenizer = AutoTokenizer.from_pretrained("{name}")\n```\n'
    )
