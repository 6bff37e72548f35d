from __future__ import annotations

import copy
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ludus.core.errors import CheckpointError, ConfigError
from ludus.train.checkpoint.export import export_hf
from ludus.train.checkpoint.loading import load
from ludus.train.checkpoint.state import fingerprint
from ludus.train.checkpoint.store import CheckpointStore

pytestmark = [
    # peft asks transformers for an attribute by its former name.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
]

WORDS = ["<pad>", "<end>", "<unk>", *(f"w{i}" for i in range(61))]
TEMPLATE = "{% for m in messages %}{{ m['content'] }} <end>{% endfor %}"


def qwen3(seed: int = 0, *, tied: bool = True) -> Qwen3ForCausalLM:
    """Random weights, large enough that greedy decoding does not repeat one token."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=tied,
        initializer_range=0.6,
    )
    return Qwen3ForCausalLM(config).eval()


def adapted(base: Any, targets: Any = "all-linear", **more: Any) -> PeftModel:
    """LoRA whose adapters are far from zero, as after training."""
    config = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", **more)
    model = get_peft_model(base, config)
    torch.manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    return model.eval()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unk>",
        chat_template=TEMPLATE,
    )


def greedy(model: Any, num_tokens: int = 24) -> list[list[int]]:
    torch.manual_seed(0)
    prompts = torch.randint(3, len(WORDS), (4, 6))
    with torch.no_grad():
        output = model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=1,
            pad_token_id=0,
        )
    tokens: list[list[int]] = output[:, 6:].tolist()
    return tokens


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("tied", [True, False])
def test_the_export_generates_the_same_tokens(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, tied: bool
) -> None:
    model = qwen3(tied=tied)
    before = greedy(model)
    assert len({token for row in before for token in row}) > 10
    folder = export_hf(model, tokenizer, tmp_path / "policy")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert greedy(loaded) == before
    assert fingerprint(loaded) == fingerprint(model)
    assert greedy(model) == before
    assert greedy(qwen3(1, tied=tied)) != before
    assert names_in(tmp_path) == {"policy"}


def test_it_ends_and_pads_as_told_and_reads_with_its_template(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = qwen3()
    folder = export_hf(model, tokenizer, tmp_path / "policy", name="babyai-tiny")
    config = AutoModelForCausalLM.from_pretrained(folder).generation_config
    assert (config.eos_token_id, config.pad_token_id) == (1, 0)
    loaded = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "w1 w2"}]
    expected = tokenizer.apply_chat_template(messages, tokenize=False)
    assert loaded.apply_chat_template(messages, tokenize=False) == expected == "w1 w2 <end>"
    assert loaded("w1 w60 <end>")["input_ids"] == [4, 63, 1]
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "# babyai-tiny" in card
    assert model.generation_config.eos_token_id is None


def test_template_and_stop_ids_can_be_given(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    folder = export_hf(
        qwen3(), tokenizer, tmp_path / "p", chat_template="given", stop_token_ids=[5, 1]
    )
    assert AutoTokenizer.from_pretrained(folder).chat_template == "given"
    assert tokenizer.chat_template == TEMPLATE
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [5, 1]


@pytest.mark.parametrize("tied", [True, False])
def test_lora_is_merged_on_a_copy(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, tied: bool
) -> None:
    model = adapted(qwen3(tied=tied))
    before, content = greedy(model), fingerprint(model)
    assert before != greedy(qwen3(tied=tied))
    folder = export_hf(model, tokenizer, tmp_path / "policy")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(loaded, Qwen3ForCausalLM)
    assert greedy(loaded) == before
    assert fingerprint(model) == content
    assert "adapter_config.json" not in names_in(folder)


@pytest.mark.parametrize(
    ("targets", "more"),
    [
        (["lm_head", "q_proj"], {}),
        (["embed_tokens", "q_proj"], {}),
        (["embed_tokens", "lm_head"], {}),
        (["q_proj"], {"modules_to_save": ["lm_head"]}),
    ],
)
def test_adapters_on_tied_embeddings_are_merged_right(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, targets: list[str], more: dict[str, Any]
) -> None:
    model = adapted(qwen3(tied=True), targets, **more)
    if "modules_to_save" in more:
        head = model.get_base_model().lm_head.modules_to_save["default"]
        with torch.no_grad():
            head.weight.add_(0.2 * torch.randn_like(head.weight))
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        folder = export_hf(model, tokenizer, tmp_path / "policy")
        loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
        torch.testing.assert_close(loaded(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-3)
        assert torch.equal(model(input_ids=ids).logits, expected)


def test_adapters_alone_load_on_their_base(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    base = export_hf(qwen3(), tokenizer, tmp_path / "base")
    model = adapted(AutoModelForCausalLM.from_pretrained(base))
    folder = export_hf(model, tokenizer, tmp_path / "adapter", merge=False)
    assert "model.safetensors" not in names_in(folder)
    assert f"base_model: {base}" in (folder / "README.md").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert greedy(loaded) == greedy(model)


def test_adapters_of_a_model_from_scratch_cannot_go_alone(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(ConfigError, match="export them merged"):
        export_hf(adapted(qwen3()), tokenizer, tmp_path / "adapter", merge=False)
    assert names_in(tmp_path) == set()


def test_adapters_that_are_not_finite_are_not_merged(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = adapted(qwen3())
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "lora_B" in n).fill_(float("nan"))
    with pytest.raises(CheckpointError, match="cannot be merged"):
        export_hf(model, tokenizer, tmp_path / "policy")


def test_adapters_that_cannot_be_copied_are_not_merged(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = adapted(qwen3(), ["lm_head"], ensure_weight_tying=True)
    with pytest.raises(CheckpointError, match="cannot be merged"):
        export_hf(model, tokenizer, tmp_path / "policy")


def test_a_checkpoint_exports_what_was_trained(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = adapted(qwen3())
    path = CheckpointStore(tmp_path / "checkpoints").save("rl", 1, model=model, state={})
    other = adapted(qwen3())
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    load(path, model=other)
    folder = export_hf(other, tokenizer, tmp_path / "policy")
    assert greedy(AutoModelForCausalLM.from_pretrained(folder)) == greedy(model)


def test_bfloat16_stays(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model = qwen3().bfloat16()
    folder = export_hf(model, tokenizer, tmp_path / "policy")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.bfloat16
    assert fingerprint(loaded) == fingerprint(model)


def test_what_is_there_is_not_overwritten_unasked(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    first, second = qwen3(0), qwen3(1)
    folder = tmp_path / "policy"
    folder.mkdir()
    export_hf(first, tokenizer, folder)  # an empty folder is taken
    (folder / "stale.txt").write_text("of the first")
    with pytest.raises(ConfigError, match="is not empty"):
        export_hf(second, tokenizer, folder)
    assert fingerprint(AutoModelForCausalLM.from_pretrained(folder)) == fingerprint(first)
    export_hf(second, tokenizer, folder, overwrite=True)
    assert fingerprint(AutoModelForCausalLM.from_pretrained(folder)) == fingerprint(second)
    assert "stale.txt" not in names_in(folder)
    assert names_in(tmp_path) == {"policy"}


def test_a_folder_of_other_things_is_never_replaced(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match="holds no model"):
        export_hf(qwen3(), tokenizer, tmp_path, overwrite=True)
    with pytest.raises(ConfigError, match="is a file"):
        export_hf(qwen3(), tokenizer, tmp_path / "thesis.tex", overwrite=True)
    assert names_in(tmp_path) == {"thesis.tex"}


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB: the tokenizer fits, the weights do not."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mount)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_full_disk_leaves_nothing(full_disk: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(CheckpointError, match=r"No space left on device.* are free"):
        export_hf(qwen3(), tokenizer, full_disk / "policy")
    assert names_in(full_disk) == set()


def test_the_training_model_is_left_as_it_was(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    for model in (qwen3(), adapted(qwen3())):
        model.train()
        gradients = [parameter.requires_grad for parameter in model.parameters()]
        generation = copy.deepcopy(model.generation_config.to_dict())
        export_hf(model, tokenizer, tmp_path / type(model).__name__)
        assert model.training
        assert [parameter.requires_grad for parameter in model.parameters()] == gradients
        assert model.generation_config.to_dict() == generation


def test_whoever_may_read_the_folder_may_read_the_weights(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    folder = export_hf(qwen3(), tokenizer, tmp_path / "hf")
    modes = {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir()}
    assert set(modes.values()) == {folder.stat().st_mode & 0o666}, modes
