"""A whole GRPO step of ludus against TRL's `GRPOTrainer`.

    python benchmarks/step.py

Both programs have the same model, tokenizer, prompt length, groups of 8 and number of sampled
tokens, in one turn or several turns of an environment. All turns have a fixed number of tokens and
rewards are random, so both do the same work for any weights. Steps alternate: one of TRL, then one
of ludus.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
from common import (
    Spread,
    arguments,
    clock,
    machine,
    make_model,
    make_samples,
    ratios,
    tabulate,
    write,
)
from fixed import MEDIAN_S, P99_S, LudusSteps, Work
from learner import Products
from sampler import products_seconds
from step_trl import train_trl
from waiting import STALENESS, compare_waiting, waiting_table

from ludus.core.types import Sample

ONE, LONG = Work(prompt=64), Work(prompt=256)
FOUR, EIGHT = Work(prompt=64, turn=16, turns=4), Work(prompt=64, turn=16, turns=8)
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {
        "learner": {"dtype": "bfloat16"},
        "sampler": {"name": "in_process", "args": {"dtype": "bfloat16"}},
    },
}
"""Settings of ludus that match TRL's `bf16=True`, which samples in bfloat16, too. The
weights stay in float32."""
CASES = [
    ("0.9 M", ONE, "float32"),
    ("0.9 M", LONG, "float32"),
    ("0.9 M", FOUR, "float32"),
    ("0.9 M", EIGHT, "float32"),
    ("5.8 M", ONE, "float32"),
    ("0.9 M", LONG, "bfloat16"),
    ("0.9 M", EIGHT, "bfloat16"),
    ("5.8 M", ONE, "bfloat16"),
]
MICRO_BATCHES = (64, 32, 16, 8)
"""Samples of one forward pass that TRL is tried with."""
TRL_WAITING_STEPS = 2
"""Steps of TRL where environments wait, each of which takes minutes."""


def tuned(model_name: str, work: Work, half: bool) -> dict[str, float]:
    """Seconds of TRL's second step, with each micro-batch; the last entry is the other way of
    taking turns, with the fastest of them."""
    tried: dict[str, float] = {}

    def attempt(size: int, mode: str) -> None:
        seconds, _ = train_trl(model_name, work, half, size, 2, lambda: None, clock, mode=mode)
        tried[f"{size} {mode}"] = seconds[1]

    for size in MICRO_BATCHES:
        attempt(size, "environment")
    if work.turns > 1:
        attempt(fastest(tried)[0], "rollout")
    return tried


def fastest(tried: dict[str, float]) -> tuple[int, str]:
    """Micro-batch and mode."""
    size, mode = min(tried, key=lambda key: tried[key]).split()
    return int(size), mode


def products(model_name: str, work: Work, half: bool) -> Callable[[], float]:
    """A program that returns the seconds of a step's matrix products alone, in torch: those of the
    sampled tokens, of each group's prompt once, of observations, and of training on the tree."""
    dtype = torch.bfloat16 if half else torch.float32
    model = make_model(model_name)
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(1, model.config.vocab_size) for _ in range(count)]

    samples: list[Sample] = []
    for _ in range(work.groups):
        prompt, rest = ids(work.prompt), work.length - work.prompt
        samples += make_samples([(prompt, ids(rest)) for _ in range(work.group_size)], -1.0)
    for sample in samples:  # an observation follows each turn but the last
        for place in range(work.prompt + work.turn, work.length, work.turn + work.observation):
            sample.loss_mask[place : place + work.observation] = [False] * work.observation
    training = Products(model, samples, dtype)
    rounded = model.to(dtype)
    prefilled = work.groups * work.prompt + work.samples * work.observation * (work.turns - 1)

    def seconds() -> float:
        start = clock()
        training.step()
        trained = (clock() - start) * training.share
        return trained + products_seconds(rounded, work.samples, prefilled, work.turn * work.turns)

    return seconds


def measure(
    model_name: str, work: Work, precision: str, repeats: int, *, tune: bool = True
) -> dict[str, Any]:
    half = precision != "float32"
    tried = tuned(model_name, work, half) if tune else {f"{work.samples} environment": 0.0}
    best, mode = fastest(tried)
    ours: list[float] = []
    our_rollouts: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        model, settings = make_model(model_name), PRECISIONS[precision]
        ludus = LudusSteps(model, work, Path(folder), clock=clock, **settings)

        def step() -> None:
            start = clock()
            ludus.step()
            ours.append(clock() - start)
            our_rollouts.append(ludus.rollout_s)

        theirs, their_rollouts = train_trl(
            model_name, work, half, best, repeats + 1, step, clock, mode=mode
        )
        of_products = share_of_products(ludus, model_name, work, half, repeats)
    ours, our_rollouts, theirs = ours[1:], our_rollouts[1:], theirs[1:]
    # One rollout serves all micro-batches of a step; the calls that hand it on do not count.
    assert len(their_rollouts) == repeats + 1
    their_rollouts = their_rollouts[1:]
    row = {
        "model": model_name,
        "work": work.show() + (", bfloat16" if half else ""),
        "micro_batch": best,
        "mode": mode if work.turns > 1 else None,
        "tried": tried,
        "trl": Spread.of(theirs),
        "trl_rollout": Spread.of(their_rollouts),
        "trl_train": Spread.of([a - b for a, b in zip(theirs, their_rollouts, strict=True)]),
        "ludus": Spread.of(ours),
        "ludus_rollout": Spread.of(our_rollouts),
        "ludus_train": Spread.of([a - b for a, b in zip(ours, our_rollouts, strict=True)]),
        "ratio": ratios(theirs, ours),
        "of_products": of_products,
        "seconds": {"trl": theirs, "ludus": ours},
    }
    print(model_name, row["work"], f"TRL {row['trl'].show('.2f')} s;", end=" ")
    print(f"ludus {row['ludus'].show('.2f')} s; {row['ratio'].show('.2f')} times", flush=True)
    return row


def share_of_products(
    ludus: LudusSteps, model_name: str, work: Work, half: bool, repeats: int
) -> Spread:
    """The seconds of the products as a share of ludus's step, alternating."""
    alone, whole = [], []
    program = products(model_name, work, half)
    for _ in range(repeats + 1):
        alone.append(program())
        start = clock()
        ludus.step()
        whole.append(clock() - start)
    return ratios(alone[1:], whole[1:])


def main() -> None:
    args = arguments(__doc__ or "")
    facts = machine(args.threads)
    if args.quick:
        work = Work(prompt=16, turn=4, turns=2, groups=2)
        measure("0.9 M", work, "float32", 2, tune=False)
        compare_waiting("0.9 M", work, work.samples, 2, 1)
        return
    rows = [measure(*case, args.repeats) for case in CASES]
    best = next(row["micro_batch"] for row in rows if row["work"] == EIGHT.show())
    waiting = compare_waiting("0.9 M", EIGHT, best, args.repeats, TRL_WAITING_STEPS)
    publish(rows, waiting, facts, args.repeats)


def publish(
    rows: list[dict[str, Any]], waiting: list[dict[str, Any]], facts: dict[str, Any], repeats: int
) -> None:
    def split(row: dict[str, Any], name: str) -> str:
        parts = (row[f"{name}_rollout"], row[f"{name}_train"])
        return " + ".join(f"{part.median:.2f}" for part in parts)

    def gain(row: dict[str, Any], part: str) -> str:
        return f"{row[f'trl_{part}'].median / row[f'ludus_{part}'].median:.1f}"

    table = tabulate(
        rows,
        ("parameters", lambda row: row["model"]),
        ("tokens per episode", lambda row: row["work"]),
        ("TRL, s", lambda row: row["trl"].show(".2f")),
        ("rollout + training", lambda row: split(row, "trl")),
        (
            "micro-batch",
            lambda row: ", ".join(filter(None, (str(row["micro_batch"]), row["mode"]))),
        ),
        ("ludus, s", lambda row: row["ludus"].show(".2f")),
        ("rollout + training", lambda row: split(row, "ludus")),
        ("TRL / ludus", lambda row: row["ratio"].bold()),
        ("rollout, training", lambda row: f"{gain(row, 'rollout')}, {gain(row, 'train')}"),
        ("of products", lambda row: f"{row['of_products'].median:.0%}"),
        ("limit", lambda row: f"{row['ratio'].median / row['of_products'].median:.1f}"),
    )
    lost = [f"{row['model']}, {row['work']}" for row in rows if row["ratio"].median < 1]
    trl = version("trl")
    text = f"""
# A GRPO step against TRL

{chr(10).join((__doc__ or "").strip().splitlines()[4:])}

64 samples per step, in 8 groups. Cells: median (quartiles) of {repeats} steps in float32, after one
warm-up step. *bfloat16*: both train and sample in bfloat16, with weights in float32. *Rollout,
training*: the speed-up of each part. *Of products*: seconds of the step's matrix products alone, in
torch, as a share of ludus's step: sampled tokens, each group's prompt once, observations, training
on the tree, with attention counted at the speed of the other products. *Limit*: the speed-up over
TRL of a program that computes these products in torch and nothing else.

{table}

TRL is faster in: {"; ".join(lost) or "none of these"}.

TRL {trl} is tuned: the micro-batch is the fastest of {", ".join(map(str, MICRO_BATCHES))}
samples, for each case, in the same run; no reference model, no activation checkpointing, fused
AdamW, no logging, no log-probabilities computed twice. It samples with `generate`. For several
turns, the faster of two methods counts. *environment*: its `environment_factory`; every turn is a
call of one tool, which is not described in the prompt, so both programs read equally many tokens.
*rollout*: a `rollout_func` that plays one turn of all episodes at a time. ludus has its defaults.

## Slow environments

{waiting[0]["model"]}, {waiting[0]["work"]}; wall time. The environment answers a turn after a draw
of a log-normal distribution with a median of {MEDIAN_S * 1000:.0f} ms and a 99th percentile of
{P99_S:.0f} s. All programs have the same draws in each step, except when ludus plays ahead.

{waiting_table(waiting)}

In ludus, each episode waits independently (`rollout.deterministic: false`). With
`rl.max_staleness: {STALENESS}` the learner does not wait for the episodes of the step. TRL's
`environment_factory` accepts async tools, but gathers only the calls of one turn of one episode:
episodes wait one after the other. In a `rollout_func`, all episodes wait for the slowest at each
turn.

[Time to success](success.md) on BabyAI is a separate benchmark.

    python benchmarks/step.py
"""
    write("step", text, facts, [*rows, *waiting], ("trl", "accelerate"))


if __name__ == "__main__":
    main()
