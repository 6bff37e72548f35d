"""Samples, a small model, and a step whose every bit is to be repeated.

    python tests/support/learner_helpers.py NUM_THREADS...

prints the digest of the weights after three steps, for each number of threads.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from ludus.config.schema import OptimizerConfig
from ludus.core.types import Sample
from ludus.train.algorithms.aggregates import token_mean
from ludus.train.algorithms.losses import LossFn, clipped
from ludus.train.batches.packing import Batch, MicroBatch, pack
from ludus.train.checkpoint.loading import load
from ludus.train.checkpoint.store import CheckpointStore
from ludus.train.learner import Learner

VOCAB = 40


def policy(seed: int = 0, hidden: int = 32) -> Any:
    """A random model with weights wide enough that every token's context matters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=VOCAB,
                hidden_size=hidden,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                max_position_embeddings=64,
                initializer_range=0.2,
                attn_implementation="sdpa",
            )
        )


def make_samples(num: int = 12, seed: int = 0) -> list[Sample]:
    """Rows of 2 to 30 tokens in alternating spans of given and sampled ones."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    samples = []
    for number in range(num):
        [length] = integers(2, 31, 1)
        mask = [False] + [bool(i // 3 % 2) or i == length - 1 for i in range(1, length)]
        noise = torch.randn(length, generator=generator)
        advantage = float(torch.randn(1, generator=generator))
        samples.append(
            Sample(
                token_ids=integers(0, VOCAB, length),
                loss_mask=mask,
                logprobs=[float(-3.7 + 0.3 * n) if m else 0.0 for n, m in zip(noise, mask)],  # noqa: B905
                advantages=[advantage if m else 0.0 for m in mask],
                trajectory_id=f"t{number}",
            )
        )
    return samples


def make_batch(samples: list[Sample], tokens_per_batch: int = 64) -> Batch:
    return pack(samples, token_mean(samples), tokens_per_batch=tokens_per_batch, pad_id=0)


def bits(learner: Learner) -> list[Tensor]:
    """Weights and the optimizer's state."""
    states = [learner.optimizer.state[p] for p in learner.parameters]
    return [
        *[p.detach().clone() for p in learner.parameters],
        *[value.clone() for state in states for _, value in sorted(state.items())],
    ]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def check_resume(fresh: Callable[[], Learner], folder: Path, loss: LossFn, half: int = 3) -> Path:
    """Train for `half` steps, save, load, and train for as many more: the bits are those of
    training without a break. Returns the checkpoint."""
    batches = [make_batch(make_samples(8, seed)) for seed in range(2 * half)]
    whole, first, resumed = fresh(), fresh(), fresh()
    for batch in batches:
        whole.train_step(batch, loss)
    for batch in batches[:half]:
        first.train_step(batch, loss)
    store = CheckpointStore(folder)
    path = store.save("rl", half, model=first.model, optimizer=first.optimizer, state={})
    load(path, model=resumed.model, optimizer=resumed.optimizer)
    resumed.step = half
    assert same(bits(resumed), bits(first))
    for batch in batches[half:]:
        resumed.train_step(batch, loss)
    assert same(bits(resumed), bits(whole))
    return path


def starts(micro_batch: MicroBatch) -> int:
    """Samples, or trees, in the rows of a micro-batch: their first tokens, padding aside."""
    every_T = torch.arange(micro_batch.ends_RT.shape[1])
    seen_RT = micro_batch.ends_RT > every_T + 1  # samples here have two tokens at least
    return int(((micro_batch.positions_RT == 0) & seen_RT).sum())


def digest(model: Any) -> str:
    total = hashlib.sha256()
    for parameter in model.parameters():
        total.update(parameter.detach().numpy().tobytes())
    return total.hexdigest()


def three_steps(num_threads: int) -> str:
    """The digest of the weights after three optimizer steps."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(True)
    try:
        model = policy(hidden=128)
        learner = Learner(model, OptimizerConfig(), num_steps=3)
        for seed in range(3):
            learner.train_step(make_batch(make_samples(24, seed), 256), clipped(0.2, 0.2))
        return digest(model)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(before)


def limited_step() -> tuple[int, float]:
    """The number of the backbone's passes in a step, and the step's loss, in a process that has
    memory for half of its one micro-batch only."""
    import resource

    model = policy(hidden=64)
    learner = Learner(model, OptimizerConfig(), num_steps=2)
    samples = [
        Sample([i + 1, *[7] * 39], [False] + [True] * 39, [-3.0] * 40, [1.0] * 40, f"{i}")
        for i in range(32)
    ]
    batch = pack(samples, token_mean(samples), tokens_per_batch=32 * 40, pad_id=0)
    sizes: list[int] = []
    hog: list[torch.Tensor] = []

    def look(_module: Any, _args: Any, kwargs: Any) -> None:
        sizes.append(kwargs["input_ids"].numel())
        hog.clear()
        hog.append(torch.ones(sizes[-1], 1 << 18))  # 1 MiB a position

    model.model.register_forward_pre_hook(look, with_kwargs=True)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + (sizes_limit := 900 << 20)
    assert sizes_limit < 32 * 40 << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    loss = learner.train_step(batch, clipped(0.2, 0.2))["loss"]
    return len(sizes), loss


if __name__ == "__main__":
    if sys.argv[1:] == ["limited"]:
        print(*limited_step())
    else:
        for argument in sys.argv[1:]:
            print(three_steps(int(argument)))
