"""The learner against a plain padded training loop, on the same samples and the same loss.

    python benchmarks/learner.py

The peer is the loop that one would write: rows padded to the longest of their micro-batch, the
model called with an attention mask, the clipped surrogate on the sampled tokens, AdamW. It comes
in two forms: rows in the order they are in, and sorted by length, its best case. All have the same
budget of positions in a forward pass, and are checked first to give the same gradient. Ours starts
from samples too, so packing is part of its time.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

from common import MODELS, Spread, alternate, arguments, machine, make_model, ratios, table, write

import torch  # isort: skip - after common, which sets the threads' policy

from ludus.core.schema import OptimizerConfig
from ludus.core.types import Sample
from ludus.train.aggregates import trajectory_mean
from ludus.train.learner import Learner
from ludus.train.losses import clipped
from ludus.train.packing import pack

BUDGET = 2048  # positions of one forward pass, padding included
OPTIMIZER = OptimizerConfig(lr=1e-6, max_grad_norm=1.0)
SURROGATE = clipped(0.2, 0.2)
SAMPLES = {"0.9 M": 48, "5.8 M": 16}
WORKLOADS: dict[str, Callable[[torch.Generator], int]] = {
    "uniform, 32 to 256": lambda g: int(torch.randint(32, 257, (1,), generator=g)),
    "heavy tail, median 60, up to 512": lambda g: min(
        max(int(math.exp(math.log(60) + 0.9 * float(torch.randn(1, generator=g)))), 8), 512
    ),
    "all 128": lambda g: 128,
}


def make_samples(num: int, vocab_size: int, workload: str) -> list[Sample]:
    """Rows of the workload's lengths, half of each given, half sampled."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for number in range(num):
        length = WORKLOADS[workload](generator)
        mask = [i >= length // 2 for i in range(length)]
        samples.append(
            Sample(
                torch.randint(1, vocab_size, (length,), generator=generator).tolist(),
                mask,
                [-math.log(vocab_size) * m for m in mask],
                [(-1.0) ** number * m for m in mask],
                f"{number}",
            )
        )
    return samples


class PaddedLoop:
    """The peer."""

    def __init__(self, model: Any, *, sort: bool) -> None:
        self.model, self.sort = model.train(), sort
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, weight_decay=0.0
        )

    def step(self, samples: Sequence[Sample]) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for rows in self.micro_batches(samples):
            self.loss(rows, len(samples)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), OPTIMIZER.max_grad_norm)
        self.optimizer.step()

    def micro_batches(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """As many rows as fit the budget once they are padded."""
        order = sorted(samples, key=lambda s: len(s.token_ids)) if self.sort else samples
        batches: list[list[Sample]] = [[]]
        for sample in order:
            width = max(len(s.token_ids) for s in [*batches[-1], sample])
            if width * (len(batches[-1]) + 1) > BUDGET:
                batches.append([])
            batches[-1].append(sample)
        return batches

    def positions(self, samples: Sequence[Sample]) -> int:
        """What it computes, padding included."""
        batches = self.micro_batches(samples)
        return sum(len(b) * max(len(s.token_ids) for s in b) for b in batches)

    def loss(self, rows: Sequence[Sample], num_samples: int) -> torch.Tensor:
        """-min(r A, clip(r) A), the mean over each row's sampled tokens, then over rows."""

        def padded(values: list[list[Any]]) -> torch.Tensor:
            width = max(map(len, values))
            return torch.tensor([v + [0] * (width - len(v)) for v in values])

        ids = padded([s.token_ids for s in rows])
        attends = padded([[1] * len(s.token_ids) for s in rows])
        mask = padded([s.loss_mask for s in rows])[:, 1:].bool()
        old = padded([s.logprobs for s in rows])[:, 1:][mask]
        advantages = padded([s.advantages for s in rows])[:, 1:][mask]
        weights = padded(
            [[m / (num_samples * sum(s.loss_mask)) for m in s.loss_mask] for s in rows]
        )[:, 1:][mask]
        logits = self.model(input_ids=ids, attention_mask=attends, use_cache=False).logits
        logprobs = logits[:, :-1][mask].log_softmax(-1).gather(-1, ids[:, 1:][mask][:, None])[:, 0]
        ratio = (logprobs - old).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return -(gain * weights).sum()


def our_step(learner: Learner, samples: Sequence[Sample]) -> float:
    batch = pack(samples, trajectory_mean(samples), tokens_per_batch=BUDGET, pad_id=0)
    learner.train_step(batch, SURROGATE)
    return batch.padding


def require_same_gradient(model: Any, samples: Sequence[Sample]) -> None:
    """Errors: SystemExit where the two programs do not compute the same."""
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    learner, loop = Learner(first, OPTIMIZER, 1), PaddedLoop(second, sort=True)
    found: list[torch.Tensor] = []
    for copied, optimizer in ((first, learner.optimizer), (second, loop.optimizer)):
        optimizer.register_step_pre_hook(
            lambda *_, m=copied: found.append(torch.cat([p.grad.flatten() for p in m.parameters()]))
        )
    our_step(learner, samples)
    loop.step(samples)
    error = float((found[0] - found[1]).abs().max())
    if error > 1e-5:
        raise SystemExit(f"the gradients differ by {error:.1e}")


def measure(name: str, workload: str, repeats: int) -> dict[str, Any]:
    model = make_model(name)
    samples = make_samples(SAMPLES[name], model.config.vocab_size, workload)
    require_same_gradient(model, samples)
    tokens = sum(len(s.token_ids) for s in samples)
    learner = Learner(copy.deepcopy(model), OPTIMIZER, 1000)
    padded = PaddedLoop(copy.deepcopy(model), sort=False)
    ordered = PaddedLoop(copy.deepcopy(model), sort=True)
    seconds = alternate(
        {
            "padded": lambda: padded.step(samples),
            "sorted": lambda: ordered.step(samples),
            "ludus": lambda: our_step(learner, samples),
        },
        repeats,
    )
    row: dict[str, Any] = {"model": name, "workload": workload, "tokens": tokens}
    row["padding"] = {
        "padded": 1 - tokens / padded.positions(samples),
        "sorted": 1 - tokens / ordered.positions(samples),
        "ludus": our_step(learner, samples),
    }
    for program, times in seconds.items():
        row[program] = Spread.of([tokens / s for s in times])
    row["over_padded"] = ratios(seconds["padded"], seconds["ludus"])
    row["over_sorted"] = ratios(seconds["sorted"], seconds["ludus"])
    row["seconds"] = seconds
    print(
        f"{name}, {workload}: {row['over_padded'].show('.2f')} times padded, "
        f"{row['over_sorted'].show('.2f')} times sorted",
        flush=True,
    )
    return row


def main() -> None:
    args = arguments(__doc__ or "")
    cases = [(name, workload) for name in MODELS for workload in WORKLOADS]
    facts = machine(args.threads)
    rows = [measure(*case, args.repeats) for case in (cases[:1] if args.quick else cases)]
    facts["load_after"] = machine(args.threads)["load"]
    if args.quick:
        return

    def speed(row: dict[str, Any], program: str) -> str:
        return f"{row[program].show(',.0f')}, {row['padding'][program]:.0%}"

    cells = [
        [
            r["model"],
            r["workload"],
            *[speed(r, program) for program in ("padded", "sorted", "ludus")],
            f"**{r['over_padded'].median:.2f}**",
            f"**{r['over_sorted'].median:.2f}** "
            f"({r['over_sorted'].low:.2f} to {r['over_sorted'].high:.2f})",
        ]
        for r in rows
    ]
    head = ["parameters", "lengths", "padded", "padded, sorted", "ludus", "ludus / padded"]
    head += ["ludus / sorted"]
    lost = [f"{r['model']}, {r['workload']}" for r in rows if r["over_sorted"].median < 1]
    text = f"""
# Learner against a padded loop

One optimizer step on the same samples: `Learner.train_step`, packing included, against the loop
that one would write (rows padded to the longest of their micro-batch, an attention mask, the
clipped surrogate, AdamW), once with rows in their order, once sorted by length, its best case. At
most {BUDGET:,} positions a forward pass, float32, full parameters; {SAMPLES["0.9 M"]} rows for the
small model, {SAMPLES["5.8 M"]} for the other; half of each row's tokens train. All give the same
gradient (to 1e-5), checked before each case. Ours also computes entropies and other metrics.

Cells: tokens a second (padding not counted), median and quartiles of {args.repeats} runs in
alternating order; then the share of positions that is padding.

{table(head, cells)}

The sorted loop is faster in: {", ".join(lost) or "none of these cases"}.

    python benchmarks/learner.py
"""
    write("learner", text, facts, rows)


if __name__ == "__main__":
    main()
