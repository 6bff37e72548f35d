"""Recipes of one GPU, and mixtures: every key is known, every task is made, the plan fits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from transformers import Qwen3Config

from ludus.config.load import load_config
from ludus.config.schema import RunConfig
from ludus.core.errors import LudusError, MissingDependency
from ludus.data.splits import read_splits
from ludus.diagnostics import plan as planning
from ludus.diagnostics.hardware import HARDWARE
from ludus.pipeline.parts.checks import check
from ludus.tasks.mixture import part_of
from ludus.train.schedule import turn_limit

RECIPES = Path(__file__).parents[2] / "recipes"
FIVE = ("alfworld", "babyai", "sciworld", "textcraft", "webshop")


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-0.6B's shape, as its config.json on the hub has it: no test reaches the hub."""
    folder = tmp_path_factory.mktemp("shape")
    Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    ).save_pretrained(folder)
    return folder


def recipe(name: str, *overrides: str) -> RunConfig:
    config = load_config(str(RECIPES / f"{name}.yaml"), list(overrides))
    try:
        check(config)
    except MissingDependency as error:
        pytest.skip(str(error))
    except LudusError as error:
        if "Java" in str(error):
            pytest.skip(str(error))
        raise
    return config


@pytest.mark.parametrize("name", ["babyai", "textcraft", "agentgym"])
def test_it_fits_the_gpu_that_it_is_meant_for(name: str, shape: Path) -> None:
    config = recipe(f"{name}-qwen3-0.6b", f"model.path={shape}")
    found = planning.plan(config, HARDWARE["h200"], fill=0.4)
    assert found.num_parameters == 596_049_920
    assert found.fits
    assert 1 < found.hours < 24


@pytest.mark.parametrize("name", ["babyai-qwen3-0.6b", "textcraft-qwen3-0.6b"])
@pytest.mark.slow
def test_its_tasks_are_made_and_the_splits_share_none(name: str) -> None:
    config = recipe(name)
    train, heldout, *_ = read_splits(config)
    assert len(train) >= (config.demonstrations.num_episodes if config.demonstrations else 0)
    assert len(heldout) == config.evaluate.num_tasks


@pytest.mark.parametrize(
    ("name", "ratios"),
    [
        ("agentgym-tiny", {"babyai": 1, "textcraft": 2}),
        ("agentgym-qwen3-0.6b", dict.fromkeys(FIVE, 1)),
    ],
    ids=["tiny", "qwen3"],
)
@pytest.mark.slow
def test_a_mixture_has_its_exact_shares_everywhere(name: str, ratios: dict[str, int]) -> None:
    config = recipe(name)
    train, heldout, *_ = read_splits(config)
    assert train.ratios == ratios
    total = sum(ratios.values())
    assert config.rl is not None
    assert config.sft is not None
    assert config.rl.groups_per_step % total == config.sft.episodes_per_step % total == 0
    assert config.demonstrations is not None
    for tasks, most, shares in (
        (train, config.demonstrations.num_episodes, ratios),
        (heldout, config.evaluate.num_tasks_between, dict.fromkeys(ratios, 1)),
        (heldout, config.evaluate.num_tasks, dict.fromkeys(ratios, 1)),
    ):
        assert most is not None
        assert most <= len(tasks)
        counts = Counter(part_of(task) for task in tasks[:most])
        whole = sum(shares.values())
        assert counts == {part: most * share // whole for part, share in shares.items()}


def test_scaling_inter_s_horizon_is_by_environment() -> None:
    config = load_config(str(RECIPES / "agentgym-qwen3-0.6b.yaml"))
    limits = [turn_limit(config, step) for step in (0, 99, 100, 299)]
    assert [limit["babyai"] for limit in limits if isinstance(limit, dict)] == [6, 6, 13, 20]
    assert [limit["sciworld"] for limit in limits if isinstance(limit, dict)] == [10, 10, 20, 30]
    assert limits[-1] == config.rollout.max_turns
    assert config.rl is not None
    assert config.rl.algorithm.args == {"kl_coefficient": 1e-3, "kl_kind": "k3"}


def test_a_plan_of_a_mixture_counts_each_part_s_turns() -> None:
    config = load_config(str(RECIPES / "agentgym-tiny.yaml"))
    lone = load_config(str(RECIPES / "agentgym-tiny.yaml"), ["rollout.max_turns=7"])
    h200 = HARDWARE["h200"]
    seven = planning.plan(lone, h200, env_step_s=0.1).seconds["rl: environment"]
    assert planning.plan(config, h200, env_step_s=0.1).seconds["rl: environment"] == pytest.approx(
        seven * (8 + 2 * 6) / 3 / 7
    )
    part = "tasks.train.args.parts.babyai.ratio=6"
    more = planning.plan(
        load_config(str(RECIPES / "agentgym-tiny.yaml"), [part]), h200, env_step_s=0.1
    )
    assert more.seconds["rl: environment"] == pytest.approx(seven * 7.5 / 7)
