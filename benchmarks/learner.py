"""The learner against a tuned transformers loop, on the same samples and the same loss.

    python benchmarks/learner.py

Groups of 8 samples that share a prompt, as in a step of GRPO: prompt {64, 256, 1024} x completion
{64, 512}, one group per step. The transformers loop is tuned: rows sorted by length and padded to
the longest of their micro-batch, SDPA without a mask for rows of equal length (its fast causal
kernel), logits for the completion only, fused AdamW. A second workload has one prompt per sample
and heavy-tailed lengths: nothing is shared, and only packing helps. All programs have the same
limit of positions per forward pass. Each case first checks that loss and gradient are equal. The
learner also starts from samples, so its time includes trees and packing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

from common import (
    SHAPES,
    Spread,
    alternate,
    arguments,
    machine,
    make_model,
    make_samples,
    ratios,
    tabulate,
    write,
)

import torch  # isort: skip - after common, which sets the threads' policy

from ludus.config.schema import LearnerConfig, OptimizerConfig
from ludus.core.types import Sample
from ludus.train.algorithms.aggregates import trajectory_mean
from ludus.train.algorithms.losses import clipped
from ludus.train.batches.packing import Layout, pack
from ludus.train.learner import Learner

BUDGET = 4096  # positions of one forward pass, padding included
GROUP = 8
VOCABULARY = 4096
OPTIMIZER = OptimizerConfig(lr=1e-6, max_grad_norm=1.0)
SURROGATE = clipped(0.2, 0.2)
GRID = [(prompt, completion) for prompt in (64, 256, 1024) for completion in (64, 512)]
TAIL = (0, 0)
"""Stands for the heavy tail: no group, a median of 60 tokens, up to 512."""


def samples_of(prompt: int, completion: int) -> list[Sample]:
    """One group that shares its prompt; or, for `TAIL`, 24 samples that share nothing."""
    generator = torch.Generator().manual_seed(0)

    def ids(num: int) -> list[int]:
        return torch.randint(1, VOCABULARY, (num,), generator=generator).tolist()

    parts = [(ids(prompt), completion)] * GROUP
    if (prompt, completion) == TAIL:
        noise = torch.randn(24, generator=generator).tolist()
        lengths = [min(max(int(60 * math.exp(0.9 * x)), 8), 512) for x in noise]
        parts = [(ids(n // 2), n - n // 2) for n in lengths]
    return make_samples([(given, ids(num)) for given, num in parts], -math.log(VOCABULARY))


class TunedLoop:
    """The peer."""

    def __init__(self, model: Any, *, half: bool = False) -> None:
        self.model, self.half = model.train(), half
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, weight_decay=0.0, fused=True
        )

    def step(self, samples: Sequence[Sample]) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for rows in self.micro_batches(samples):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.half):
                loss = self.loss(rows, len(samples))
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), OPTIMIZER.max_grad_norm)
        self.optimizer.step()
        return total

    def micro_batches(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """Sorted by length, as many rows as fit the budget once they are padded."""
        batches: list[list[Sample]] = [[]]
        for sample in sorted(samples, key=lambda s: len(s.token_ids)):
            width = max(len(s.token_ids) for s in [*batches[-1], sample])
            if width * (len(batches[-1]) + 1) > BUDGET:
                batches.append([])
            batches[-1].append(sample)
        return batches

    def loss(self, rows: Sequence[Sample], num_samples: int) -> torch.Tensor:
        """-min(r A, clip(r) A), the mean over each row's sampled tokens, then over rows."""

        def padded(values: list[list[Any]]) -> torch.Tensor:
            width = max(map(len, values))
            return torch.tensor([v + [0] * (width - len(v)) for v in values])

        ids = padded([s.token_ids for s in rows])
        mask = padded([s.loss_mask for s in rows])[:, 1:].bool()
        old = padded([s.logprobs for s in rows])[:, 1:][mask]
        advantages = padded([s.advantages for s in rows])[:, 1:][mask]
        weights = padded(
            [[m / (num_samples * sum(s.loss_mask)) for m in s.loss_mask] for s in rows]
        )[:, 1:][mask]
        # Right padding needs no mask under causal attention; the head runs on sampled tokens only.
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = self.model.lm_head(hidden[:, :-1][mask])
        logprobs = logits.float().log_softmax(-1).gather(-1, ids[:, 1:][mask][:, None])[:, 0]
        ratio = (logprobs - old).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return -(gain * weights).sum()


class Ours:
    """The learner, with its batch laid out in one way."""

    def __init__(self, model: Any, layout: Layout, **settings: Any) -> None:
        self.layout, self.model = layout, model
        self.learner = Learner(model, OPTIMIZER, 1000, settings=LearnerConfig(**settings))
        self.optimizer = self.learner.optimizer

    def step(self, samples: Sequence[Sample]) -> float:
        weights = trajectory_mean(samples)
        batch = pack(samples, weights, tokens_per_batch=BUDGET, pad_id=0, layout=self.layout)
        return self.learner.train_step(batch, SURROGATE)["loss"]


class Products:
    """The matrix products of a tree's step, forward and backward, and nothing else.

    Those of attention are not run, but counted: as if they were as fast as the others.
    """

    def __init__(
        self, model: Any, samples: Sequence[Sample], dtype: torch.dtype = torch.float32
    ) -> None:
        batch = pack(
            samples, trajectory_mean(samples), tokens_per_batch=BUDGET, pad_id=0, layout="tree"
        )
        layers, head = model.model.layers, model.lm_head.weight
        weights = [p for p in layers.parameters() if p.ndim == 2]
        config, self.shapes, scores = model.config, [], 0
        for m in batch.micro_batches:
            rows = m.token_ids_RT.numel()
            self.shapes += [(rows, *weight.shape) for weight in weights]
            self.shapes.append((len(m.places_P), *head.shape))
            scores += int((m.ends_RT - torch.arange(rows)).sum())
        width = config.num_attention_heads * config.head_dim
        attention = 2 * len(layers) * width * scores
        self.share = 1 + attention / sum(math.prod(shape) for shape in self.shapes)
        self.tensors = {
            (n, o, i): tuple(torch.randn(*size).to(dtype) for size in ((n, i), (o, i), (n, o)))
            for n, o, i in set(self.shapes)
        }
        self.results = {
            key: tuple(torch.empty_like(t) for t in tensors)
            for key, tensors in self.tensors.items()
        }

    def step(self) -> None:
        for shape in self.shapes:
            x_NI, w_OI, d_NO = self.tensors[shape]
            dx_NI, dw_OI, y_NO = self.results[shape]
            torch.mm(x_NI, w_OI.T, out=y_NO)
            torch.mm(d_NO, w_OI, out=dx_NI)
            torch.mm(d_NO.T, x_NI, out=dw_OI)


def programs(model: Any) -> dict[str, Any]:
    """Each with weights of its own."""
    return {
        "transformers": TunedLoop(copy.deepcopy(model)),
        "transformers, bfloat16": TunedLoop(copy.deepcopy(model), half=True),
        "packing": Ours(copy.deepcopy(model), "packed"),
        "tree": Ours(copy.deepcopy(model), "tree"),
        "tree, bfloat16": Ours(copy.deepcopy(model), "tree", dtype="bfloat16"),
    }


def require_same(model: Any, samples: Sequence[Sample]) -> None:
    """Errors: SystemExit where the float32 programs do not compute the same."""
    results: dict[str, tuple[float, torch.Tensor]] = {}
    for name, program in programs(model).items():
        found: list[torch.Tensor] = []

        def look(*_: Any, model: Any = program.model, found: Any = found) -> None:
            found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))

        program.optimizer.register_step_pre_hook(look)
        loss = program.step(samples)
        results[name] = loss, found[0]
    loss, gradient = results["transformers"]
    for name in ("packing", "tree"):
        off = abs(results[name][0] - loss), float((results[name][1] - gradient).abs().max())
        if max(off) > 1e-5:
            raise SystemExit(f"{name}: loss and gradient differ by {off}")


def measure(model_name: str, prompt: int, completion: int, repeats: int) -> dict[str, Any]:
    model = make_model(model_name, VOCABULARY)
    samples = samples_of(prompt, completion)
    require_same(model, samples)
    tokens = sum(len(s.token_ids) for s in samples)
    size = f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M"
    row: dict[str, Any] = {"model": size, "prompt": prompt, "completion": completion}
    row |= {"tokens": tokens}
    steps = {name: lambda p=p: p.step(samples) for name, p in programs(model).items()}
    products = Products(model, samples)
    seconds = alternate({**steps, "products": products.step}, repeats)
    alone = [s * products.share for s in seconds.pop("products")]
    row["tree, of products"] = ratios(alone, seconds["tree"])
    for name, times in seconds.items():
        row[name] = Spread.of([tokens / s for s in times])
        row[f"{name} / transformers"] = ratios(seconds["transformers"], times)
    half = seconds["transformers, bfloat16"], seconds["tree, bfloat16"]
    row["bfloat16, tree / transformers"] = ratios(*half)
    row["seconds"] = seconds
    told = [
        f"{name} {value.show('.2f')}" for name, value in row.items() if "/" in name or "of" in name
    ]
    print(model_name, prompt, completion, *told, sep="; ", flush=True)
    return row


def main() -> None:
    args = arguments(__doc__ or "")
    cases = [(name, *lengths) for name in list(SHAPES)[:2] for lengths in [*GRID, TAIL]]
    facts = machine(args.threads)
    rows = [measure(*case, args.repeats) for case in (cases[:1] if args.quick else cases)]
    if not args.quick:
        publish(rows, facts, args.repeats)


def publish(rows: list[dict[str, Any]], facts: dict[str, Any], repeats: int) -> None:
    ours = ("packing / transformers", "tree / transformers", "bfloat16, tree / transformers")

    def case(row: dict[str, Any]) -> str:
        tail = (row["prompt"], row["completion"]) == TAIL
        return "heavy tail, nothing shared" if tail else f"{row['prompt']} + {row['completion']}"

    def ratio(name: str) -> tuple[str, Callable[[dict[str, Any]], str]]:
        return name, lambda row: row[name].show(".2f")

    table = tabulate(
        rows,
        ("parameters", lambda row: row["model"]),
        ("prompt + completion", case),
        ("transformers, tokens/s", lambda row: row["transformers"].show(",.0f")),
        ("tree, tokens/s", lambda row: f"{row['tree'].median:,.0f}"),
        *map(ratio, ours),
        ("tree, of products", lambda row: f"{100 * row['tree, of products'].median:.0f} %"),
    )
    lost = [
        f"{name} at {row['model']}, {case(row)} ({row[name].median:.2f})"
        for row in rows
        for name in ours
        if row[name].median < 1
    ]
    text = f"""
# Learner against a tuned transformers loop

One optimizer step on the same samples: a group of {GROUP} with a common prompt. The transformers
loop is tuned: rows sorted by length, SDPA's causal kernel without a mask, logits of the sampled
tokens only, fused AdamW. At most {BUDGET:,} positions per forward pass, a vocabulary of
{VOCABULARY:,}, all parameters trained. The float32 programs give the same loss and gradient (to
1e-5); each case starts with this check. ludus also computes entropies and other metrics, and its
time includes trees and packing.

- *packing*: several samples per row, nothing shared.
- *tree*: the default. Shared prefixes are computed once, attention in tiles.
- *bfloat16, tree*: the same with `learner.dtype: bfloat16`, against the loop under autocast.
- *of products*: the time of a tree's matrix products alone, in torch, as a share of its step. The
  products of attention count at the speed of the linear layers' products.

Tokens are the tokens of all samples. Cells: median (quartiles) of {repeats} runs in alternating
order; ratios are of neighbouring runs.

{table}

Slower than the transformers loop: {"; ".join(lost) or "none of these"}.

    python benchmarks/learner.py
"""
    write("learner", text, facts, rows)


if __name__ == "__main__":
    main()
