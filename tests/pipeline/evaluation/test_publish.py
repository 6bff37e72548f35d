"""The model card of a published checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludus.config.load import dump_config, load_config
from ludus.pipeline.evaluation.publish import model_card
from ludus.store.folders import RunFolder
from ludus.train.checkpoint.store import CheckpointInfo

CONFIG = """
name: tiny
model: {architecture: qwen3, tokenizer: words}
env: textcraft
tasks: {train: {name: env, args: {num_tasks: 4}}}
demonstrations: {num_episodes: 4}
sft: {steps: 15}
rl: {steps: 30, groups_per_step: 8, group_size: 8}
"""
SFT, GRPO = "- SFT: 15 steps of 32 conversations\n", "of 8 tasks with 8 episodes each\n"


@pytest.mark.parametrize(
    ("stage", "step", "lines"),
    [
        ("sft", 15, SFT),
        ("sft", 10, "- SFT: 10 steps (of 15 planned) of 32 conversations\n"),
        ("rl", 10, f"{SFT}- RL: grpo, 10 steps (of 30 planned) {GRPO}"),
        ("rl", 30, f"{SFT}- RL: grpo, 30 steps {GRPO}"),
    ],
)
def test_the_card_tells_the_training_of_this_checkpoint(
    tmp_path: Path, stage: str, step: int, lines: str
) -> None:
    folder = RunFolder(tmp_path / "tiny-1")
    folder.path.mkdir(exist_ok=True)
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(CONFIG, encoding="utf-8")
    folder.config.write_text(dump_config(load_config(recipe)), encoding="utf-8")
    info = CheckpointInfo(folder.path / f"{stage}-{step:06d}", stage, step, 1, None, pinned=False)
    card = model_card(folder, info, "me/tiny", "mit", "---\n---\n# tiny\n")
    training = card[card.index("## Training") : card.index("## Data")]
    assert training.endswith(f"`.\n\n{lines}\n")
