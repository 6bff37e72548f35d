"""Recipes of co-evolution: keys, published settings, a plan that fits, a test run."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner

from ludus.cli import app
from ludus.coevolve.checks import check_all
from ludus.coevolve.flow import storage_of
from ludus.coevolve.plan import plan
from ludus.coevolve.roles import Roles
from ludus.config.coevolve import CoevolveConfig
from ludus.config.load import load_as
from ludus.core.errors import MissingDependency

RECIPES = Path(__file__).parents[2] / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("coevolve-*.yaml"))
BIG = [name for name in NAMES if "qwen3" in name]

SHAPES = {
    "coevolve-qwen3-0.6b": (1024, 3072, 16, 28),
    "coevolve-qwen3-4b": (2560, 9728, 32, 36),
    "coevolve-qwen3-8b": (4096, 12288, 32, 36),
}
"""Width, inner width, heads, layers, as the hub has them: no test reaches the hub."""

MEANT_FOR = {
    "coevolve-qwen3-0.6b": "h100",
    "coevolve-qwen3-4b": "h100",
    "coevolve-qwen3-8b": "h200",
}


def recipe(name: str, *overrides: str) -> Roles:
    config = load_as(CoevolveConfig, str(RECIPES / f"{name}.yaml"), overrides)
    found = Roles(config, storage_of(config))
    try:
        check_all(found)
    except MissingDependency as error:
        pytest.skip(str(error))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_derived_configuration_holds(name: str) -> None:
    recipe(name)


@pytest.mark.parametrize("name", BIG)
def test_it_fits_the_hardware_that_it_is_meant_for(name: str, tmp_path: Path) -> None:
    width, inner, heads, layers = SHAPES[name]
    Qwen3Config(
        vocab_size=151_936,
        hidden_size=width,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_hidden_layers=layers,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=name != "coevolve-qwen3-8b",
    ).save_pretrained(tmp_path)
    found = plan(recipe(name, f"shared.model.path={tmp_path}"), MEANT_FOR[name], fill=0.4)
    assert not found.too_large
    assert 24 < found.seconds / 3600 < 24 * 10


@pytest.mark.parametrize("name", BIG)
def test_the_published_settings(name: str) -> None:
    roles = recipe(name)
    curriculum, executor = (roles.training(role, 2) for role in ("curriculum", "executor"))
    for run in (curriculum, executor):
        assert run.rl is not None
        assert run.rl.optimizer.lr == 1e-6
        assert run.rl.algorithm.args["kl_coefficient"] == 1e-2
        assert run.rl.algorithm.args["kl_kind"] == "k3"
        assert (run.rollout.temperature, run.rollout.max_tokens_per_turn) == (1.0, 4096)
    assert curriculum.rl is not None
    assert executor.rl is not None
    assert curriculum.rl.algorithm.name == "grpo"
    assert curriculum.rl.group_size == 4
    assert curriculum.rl.groups_per_step == (64 if "0.6b" in name else 512)
    assert executor.rl.algorithm.name == "adpo"
    assert (executor.rl.groups_per_step, executor.rl.group_size) == (128, 16)
    assert executor.rl.optimizer.warmup_steps == 10
    calls = executor.rollout.tool_calls
    assert (calls.max_per_episode, calls.max_result_tokens) == (4, 512)
    answers = roles.answering(1, 2)
    assert (answers.rollout.temperature, answers.rollout.top_p) == (0.7, 0.9)
    assert answers.rollout.max_tokens_per_turn == 2048
    assert roles.config.answers.number == 10
    assert (roles.config.questions.min_consistency, roles.config.questions.max_consistency) == (
        0.25,
        0.75,
    )
    assert roles.config.iterations == 3


def test_steps_of_the_curriculum_have_enough_prompts() -> None:
    for name in BIG:
        roles = recipe(name)
        config = roles.training("curriculum", 1)
        assert config.rl is not None
        assert config.tasks.train.args["num_tasks"] >= config.rl.groups_per_step


@pytest.fixture
def small_qwen(tmp_path: Path) -> Path:
    """A folder with random weights of a small Qwen3, and a tokenizer of single bytes."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: i for i, text in enumerate([*special, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": special[1:]})
    folder = tmp_path / "model"
    tokenizer.save_pretrained(folder)
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(vocabulary),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            eos_token_id=vocabulary["<|im_end|>"],
        )
    ).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_test_mode_runs_all_stages_with_a_small_model(
    small_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe for 0.6B with another folder, on the CPU: what it would do, in small."""
    recipe("coevolve-qwen3-0.6b")
    monkeypatch.chdir(tmp_path)
    rng = random.Random(0)
    sums = [(rng.randrange(90), rng.randrange(90)) for _ in range(8)]
    rows = [
        {"problem": f"{a} + {b}", "answer": str(a + b), "unique_id": f"{a}-{b}"} for a, b in sums
    ]
    Path("math.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "coevolve",
        str(RECIPES / "coevolve-qwen3-0.6b.yaml"),
        "--test-mode",
        f"shared.model={{path: {small_qwen}, context_length: 1024, device: cpu, dtype: float32}}",
        "shared.model.chat_template=qwen3",
        "executor.tasks.heldout.args.path=math.jsonl",
        "shared.rollout.max_tokens_per_turn=64",
        "answers.max_tokens_per_turn=32",
        "shared.learner={dtype: float32}",
    ]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    root = Path("coevolve/coevolve-qwen3-0.6b-test")
    stages = json.loads((root / "state.json").read_text())["stages"]
    assert [*stages] == ["iteration-0/evaluate"] + [
        f"iteration-1/{name}"
        for name in ("curriculum", "generate", "score", "filter", "executor", "evaluate")
    ]
    assert (root / "models" / "executor-1" / "config.json").is_file()
    assert (root / "evaluation" / "iteration-1.json").is_file()
    shutil.rmtree(root)
