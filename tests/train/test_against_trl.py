"""Loss and gradient equal to TRL's own, on the same model and tokens, to 1e-5.

TRL's side is `GRPOTrainer._compute_loss` as it is: only its settings and its inputs are given.
Skipped, with the reason, where TRL is not installed.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_helpers import VOCAB, policy
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from ludus.config.schema import OptimizerConfig
from ludus.core.types import Group, Segment, Spec, Task, Trajectory
from ludus.train import ALGORITHMS
from ludus.train.algorithms.credit import truncated_importance
from ludus.train.batches.packing import pack
from ludus.train.batches.samples import to_samples
from ludus.train.learner import Learner

trl = pytest.importorskip("trl", reason="TRL is not installed: nothing to compare with")

PROMPTS = [[3, 1, 4], [1, 5, 9, 2]]
MAX_LENGTH = 9
# Completions as runs of (sampled?, number of tokens): one is a conversation of two turns.
COMPLETIONS = [[(1, 4)], [(1, 2), (0, 2), (1, 3)], [(1, 1)], [(1, 5), (0, 1), (1, 3)]]
REWARDS = [1.0, 0.0, 0.25, 0.75]


def episodes() -> list[Group]:
    """Two groups of four; the sampler and the reference differ from the policy by noise."""
    generator = torch.Generator().manual_seed(3)

    def noise(count: int, scale: float) -> Tensor:
        return scale * torch.randn(count, generator=generator)

    groups = []
    for g, prompt in enumerate(PROMPTS):
        members = []
        for e, runs in enumerate(COMPLETIONS):
            segments = [Segment(-1, prompt)]
            for sampled, count in runs:
                ids = torch.randint(0, VOCAB, (count,), generator=generator).tolist()
                segment = Segment(len(segments) - 1, ids)
                if sampled:
                    segment.logprobs = (-3.7 + noise(count, 0.4)).tolist()
                    segment.ref_logprobs = (-3.7 + noise(count, 0.4)).tolist()
                segments.append(segment)
            members.append(Trajectory(f"g{g}/e{e}", f"g{g}", "t", segments, reward=REWARDS[e] + g))
        groups.append(Group(f"g{g}", Task(id="t"), members))
    return groups


def on_policy(groups: list[Group], model: Any) -> None:
    """As if the model itself had sampled."""
    for group in groups:
        for trajectory in group.trajectories:
            ids = torch.tensor([trajectory.token_ids()])
            with torch.no_grad():
                logps = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
            start = 0
            for segment in trajectory.segments:
                stop = start + len(segment.token_ids)
                if segment.sampled:
                    picked = logps[torch.arange(start - 1, stop - 1), ids[0, start:stop]]
                    segment.logprobs = picked.tolist()
                start = stop


@pytest.fixture(scope="module")
def model() -> Any:
    made = policy()
    made.config.pad_token_id = 0
    return made


def ours(model: Any, groups: list[Group], spec: Spec) -> tuple[float, list[Tensor]]:
    """Loss and gradients, over several micro-batches."""
    row = ALGORITHMS.build(spec)
    samples = to_samples(row.assign(groups))
    batch = pack(samples, row.aggregate(samples), tokens_per_batch=32, pad_id=0)
    assert len(batch.micro_batches) > 1
    model = copy.deepcopy(model)
    learner = Learner(model, OptimizerConfig(), num_steps=1)
    total = sum(learner._backward(micro, row.loss)[0] for micro in batch.micro_batches)
    return total, [p.grad.clone() for p in model.parameters()]


@pytest.fixture(scope="module")
def trainers(model: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """TRL's trainers, each around a copy of the model."""
    from datasets import Dataset

    folder: Path = tmp_path_factory.mktemp("trl")
    words = {str(i): i for i in range(VOCAB)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")), pad_token="0", eos_token="1"
    )
    common: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "max_completion_length": MAX_LENGTH,
        "gradient_checkpointing": None,
        "beta": 0.0,
    }
    made = {}
    for name in ("GRPO", "RLOO"):
        trainer = getattr(trl, f"{name}Trainer")(
            model=copy.deepcopy(model),
            reward_funcs=lambda completions, **_: [0.0 for _ in completions],
            args=getattr(trl, f"{name}Config")(**common),
            train_dataset=Dataset.from_list([{"prompt": "3 1 4"}] * 8),
            processing_class=tokenizer,
        )
        trainer.current_gradient_accumulation_steps = 1
        made[name] = trainer
    return made


def inputs_of(groups: list[Group], spec: Spec) -> dict[str, Tensor]:
    """TRL's rectangle: prompts padded on the left, completions on the right."""
    row = ALGORITHMS.build(spec)
    advantages = {t.id: next(x for x in s.advantages[::-1] if x) for t, s in _scored(groups, row)}
    trajectories = [t for group in groups for t in group.trajectories]
    width = max(map(len, PROMPTS))
    shape = len(trajectories), MAX_LENGTH
    made: dict[str, Tensor] = {
        "prompt_ids": torch.zeros(len(trajectories), width, dtype=torch.int64),
        "prompt_mask": torch.zeros(len(trajectories), width, dtype=torch.int64),
        "completion_ids": torch.zeros(shape, dtype=torch.int64),
        "completion_mask": torch.zeros(shape, dtype=torch.int64),
        "tool_mask": torch.zeros(shape, dtype=torch.int64),
        "old_per_token_logps": torch.zeros(shape),
        "ref_per_token_logps": torch.zeros(shape),
        "advantages": torch.tensor([advantages[t.id] for t in trajectories]),
    }
    for i, trajectory in enumerate(trajectories):
        prompt, *rest = trajectory.segments
        made["prompt_ids"][i, width - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
        made["prompt_mask"][i, width - len(prompt.token_ids) :] = 1
        start = 0
        for segment in rest:
            span = slice(start, start + len(segment.token_ids))
            made["completion_ids"][i, span] = torch.tensor(segment.token_ids)
            made["completion_mask"][i, span] = 1
            if segment.sampled:
                made["tool_mask"][i, span] = 1
                old = segment.learner_logprobs or segment.logprobs
                made["old_per_token_logps"][i, span] = torch.tensor(old)
                made["ref_per_token_logps"][i, span] = torch.tensor(segment.ref_logprobs)
            start = span.stop
    made["num_items_in_batch"] = made["tool_mask"].sum()
    return made


def _scored(groups: list[Group], row: Any) -> list[tuple[Trajectory, Any]]:
    samples = {s.trajectory_id: s for s in to_samples(row.assign(groups))}
    return [(t, samples[t.id]) for group in groups for t in group.trajectories]


def theirs(
    trainer: Any, inputs: dict[str, Tensor], settings: dict[str, Any]
) -> tuple[float, list[Tensor]]:
    settings = {"use_bias_correction_kl": False, **settings}
    owner = {n: trainer.args if n == "use_bias_correction_kl" else trainer for n in settings}
    before = {name: getattr(owner[name], name, None) for name in settings}
    for name, value in settings.items():
        setattr(owner[name], name, value)
    try:
        trainer.model.train()
        trainer.model.zero_grad()
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        return loss.item(), [p.grad.clone() for p in trainer.model.parameters()]
    finally:
        for name, value in before.items():
            setattr(owner[name], name, value)


def assert_equal(mine: tuple[float, list[Tensor]], other: tuple[float, list[Tensor]]) -> None:
    assert mine[0] == pytest.approx(other[0], rel=1e-5, abs=1e-6)
    largest = max(float(g.abs().max()) for g in other[1])
    assert largest > 1e-4
    for a, b in zip(mine[1], other[1], strict=True):
        assert float((a - b).abs().max()) < 1e-5 * max(largest, 1)


CLIPS = {"epsilon_low": 0.2, "epsilon_high": 0.2}
CASES: dict[str, tuple[Spec, dict[str, Any]]] = {
    "grpo": (Spec(name="grpo"), {"loss_type": "grpo", **CLIPS}),
    "grpo, KL": (
        Spec(name="grpo", args={"kl_coefficient": 0.3}),
        {"loss_type": "grpo", "beta": 0.3, **CLIPS},
    ),
    "grpo, KL with the ratio": (
        Spec(name="grpo", args={"kl_coefficient": 0.3, "kl_kind": "k3_corrected"}),
        {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": True, **CLIPS},
    ),
    "dr_grpo": (
        Spec(name="dr_grpo", args={"length": MAX_LENGTH}),
        {"loss_type": "dr_grpo", **CLIPS},
    ),
    "dapo": (Spec(name="dapo"), {"loss_type": "dapo", "epsilon_low": 0.2, "epsilon_high": 0.28}),
    "bnpo is a token mean": (
        Spec(name="dapo", args={"clip_high": 0.2}),
        {"loss_type": "bnpo", **CLIPS},
    ),
    "dapo, KL and entropy": (
        Spec(name="dapo", args={"kl_coefficient": 0.1, "entropy_bonus": 0.2}),
        {
            "loss_type": "dapo",
            "epsilon_low": 0.2,
            "epsilon_high": 0.28,
            "beta": 0.1,
            "_entropy_bonus_enabled": True,
            "entropy_coef": 0.2,
        },
    ),
    "gspo": (
        Spec(name="gspo", args={"clip_low": 0.2, "clip_high": 0.2}),
        {"loss_type": "grpo", "importance_sampling_level": "sequence", **CLIPS},
    ),
    "gspo, clipped": (
        Spec(name="gspo", args={"clip_low": 0.01, "clip_high": 0.01}),
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon_low": 0.01,
            "epsilon_high": 0.01,
        },
    ),
    "cispo": (Spec(name="cispo"), {"loss_type": "cispo", "epsilon_high": 5.0}),
    "cispo, capped": (
        Spec(name="cispo", args={"cap": 1.1}),
        {"loss_type": "cispo", "epsilon_high": 1.1},
    ),
    "reinforce++, baseline": (
        Spec(name="reinforce_pp_baseline"),
        {"loss_type": "bnpo", **CLIPS},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_trls(name: str, model: Any, trainers: dict[str, Any]) -> None:
    spec, settings = CASES[name]
    groups = episodes()
    wanted = theirs(trainers["GRPO"], inputs_of(groups, spec), settings)
    assert_equal(ours(model, groups, spec), wanted)


@pytest.mark.parametrize("level", ["token", "trajectory"])
def test_truncated_importance_is_trls(level: Any, model: Any, trainers: dict[str, Any]) -> None:
    """The learner's own log-probabilities are those of the model, the sampler's are others."""
    groups = episodes()
    sampled = [s for g in groups for t in g.trajectories for s in t.segments if s.sampled]
    recorded = [segment.logprobs for segment in sampled]
    on_policy(groups, model)
    for segment, logprobs in zip(sampled, recorded, strict=True):
        segment.learner_logprobs, segment.logprobs = segment.logprobs, logprobs
    args = {"importance_cap": 1.2, "importance_level": level, "kl_coefficient": 0.2}
    plain = Spec(name="grpo", args={"kl_coefficient": 0.2})
    inputs = inputs_of(groups, plain)
    inputs["importance_sampling_ratio"] = torch.ones_like(inputs["old_per_token_logps"])
    # TRL's weight when vLLM has sampled: exp of the difference, of its sum over a sequence's
    # sampled tokens, clamped.
    for i, trajectory in enumerate(t for g in groups for t in g.trajectories):
        weights = truncated_importance(trajectory, 1.2, level)
        gaps = torch.zeros(MAX_LENGTH)
        start = 0
        for segment in trajectory.segments[1:]:
            stop = start + len(segment.token_ids)
            if segment.sampled:
                own = torch.tensor(segment.learner_logprobs)
                gaps[start:stop] = own - torch.tensor(segment.logprobs)
            start = stop
        ratio = (gaps.sum() if level == "trajectory" else gaps).exp().clamp(max=1.2)
        inputs["importance_sampling_ratio"][i] = ratio
        mine = torch.tensor([w for row in weights for w in row])
        there = inputs["tool_mask"][i].bool()
        assert torch.allclose(mine, inputs["importance_sampling_ratio"][i][there], atol=1e-6)
    settings = {"loss_type": "grpo", "beta": 0.2, **CLIPS, "use_vllm": True}
    settings |= {"vllm_importance_sampling_correction": True}
    wanted = theirs(trainers["GRPO"], inputs, settings)
    assert_equal(ours(model, groups, Spec(name="grpo", args=args)), wanted)


def test_rloo_has_trls_gradient_on_policy(model: Any, trainers: dict[str, Any]) -> None:
    """TRL takes the ratio of whole sequences, ludus log-probabilities: one gradient, two values."""
    groups = episodes()
    on_policy(groups, model)
    for group in groups:  # TRL's RLOO knows no turns
        for trajectory in group.trajectories:
            del trajectory.segments[2:]
    inputs = inputs_of(groups, Spec(name="rloo"))
    inputs["old_logps"] = inputs["old_per_token_logps"].sum(1)
    (_, mine), (_, other) = (
        ours(model, groups, Spec(name="rloo")),
        theirs(trainers["RLOO"], inputs, CLIPS),
    )
    assert_equal((0.0, mine), (0.0, other))
