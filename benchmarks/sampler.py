"""The in-process sampler against transformers, on one model.

    python benchmarks/sampler.py

All sample from the model's own distribution (temperature 1, no top-k or top-p) with a KV cache. In
float32 the greedy tokens are compared first; in bfloat16 the sampler's log-probabilities are
compared with those of the model in float32. All prompts of a batch have one length and all
completions another, which suits `generate`: no padding, no early end. The sampler also returns the
log-probability of every token; `generate` does not.

A further program computes only the matrix products of the same tokens, in torch, at the batch's
size: the limit if everything else were free.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Literal

from common import (
    SHAPES,
    Spread,
    alternate,
    arguments,
    clock,
    machine,
    make_model,
    ratios,
    sample_turns,
    tabulate,
    write,
)

import torch  # isort: skip - after common, which sets the threads' policy
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from ludus.models.samplers.engine import InProcessSampler

PROMPT, COMPLETION = 64, 64
BATCHES = (1, 16, 64, 256)
GENERIC_UP_TO = 16  # beyond, it takes as long as `generate`
GROUP, LONG_PROMPT = 8, 256
PATIENCE_S = 120.0


def prompts_of(batch: int, vocab_size: int, length: int = PROMPT) -> list[list[int]]:
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(1, vocab_size, (batch, length), generator=generator).tolist()


def run_ours(
    sampler: InProcessSampler, prompts: list[list[int]], temperature: float
) -> list[list[int]]:
    turns = sample_turns(sampler, prompts, COMPLETION, temperature)
    return [turn.token_ids for turn in turns]


@torch.inference_mode()
def run_generate(model: Any, prompts: list[list[int]], temperature: float) -> list[list[int]]:
    ids = torch.tensor(prompts)
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=COMPLETION,
        min_new_tokens=COMPLETION,
        pad_token_id=0,
        **(sampling if temperature else {"do_sample": False}),
    )
    found: list[list[int]] = output[:, ids.shape[1] :].tolist()
    return found


def run_generate_batch(model: Any, prompts: list[list[int]]) -> None:
    """transformers' continuous batching, with room for all rows at once."""
    config = GenerationConfig(
        max_new_tokens=COMPLETION,
        do_sample=True,
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        pad_token_id=0,
        eos_token_id=-1,
    )
    page = 32
    blocks = len(prompts) * -(-(len(prompts[0]) + COMPLETION) // page) + 8
    found = model.generate_batch(
        prompts,
        generation_config=config,
        progress_bar=False,
        warmup=False,
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=page, num_blocks=blocks, max_batch_tokens=2048
        ),
    )
    assert all(len(output.generated_tokens) == COMPLETION for output in found.values())


@torch.inference_mode()
def deviation(model: Any, prompts: list[list[int]], sampler: InProcessSampler) -> float:
    """The mean distance, in nats, of the sampler's log-probabilities of its own tokens from those
    of the model in float32."""
    [found] = sample_turns(sampler, prompts[:1], COMPLETION)
    ids = torch.tensor([[*prompts[0], *found.token_ids]])
    logprobs = model(ids).logits[0, len(prompts[0]) - 1 : -1].log_softmax(-1)
    exact = logprobs.gather(-1, torch.tensor(found.token_ids)[:, None]).flatten()
    return float((exact - torch.tensor(found.logprobs)).abs().mean())


@torch.inference_mode()
def products_seconds(
    model: Any, batch: int, prefilled: int | None = None, sampled: int = COMPLETION
) -> float:
    """The least time of all matrix products of prompts and completions, as `F.linear` in torch: the
    weights' sizes, `batch` rows at a time; the prompt's at up to 2,048 rows, without the head.

    `prefilled`: tokens of all prompts; `sampled`: tokens of a row.
    """
    prefilled = batch * PROMPT if prefilled is None else prefilled
    linears = [m.weight for m in model.model.layers.modules() if isinstance(m, torch.nn.Linear)]

    def seconds(weights: list[torch.Tensor], rows: int) -> float:
        inputs = [torch.randn(rows, w.shape[1], dtype=w.dtype) for w in weights]
        times = []
        for _ in range(7):
            start = clock()
            for x, weight in zip(inputs, weights, strict=True):
                torch.nn.functional.linear(x, weight)
            times.append(clock() - start)
        return min(times)

    rows = min(2048, prefilled)
    prefill = seconds(linears, rows) * prefilled / rows
    return prefill + seconds([*linears, model.lm_head.weight], batch) * sampled


def measure(name: str, batch: int, repeats: int) -> dict[str, Any]:
    model = make_model(name).eval()
    prompts = prompts_of(batch, model.config.vocab_size)
    half = copy.deepcopy(model).bfloat16()
    samplers = {path: make_sampler(model, path) for path in ("fast", "generic")}
    rounded = InProcessSampler(model, context_length=1024, path="fast", dtype="bfloat16")
    greedy = run_generate(model, prompts[:4], 0.0)
    for path, sampler in samplers.items():
        if run_ours(sampler, prompts[:4], 0.0) != greedy:
            raise SystemExit(f"{name}, {path}: the greedy tokens differ")
    programs = {
        "generate": lambda: run_generate(model, prompts, 1.0),
        "fast": lambda: run_ours(samplers["fast"], prompts, 1.0),
        "generate_half": lambda: run_generate(half, prompts, 1.0),
        "half": lambda: run_ours(rounded, prompts, 1.0),
    }
    if batch <= GENERIC_UP_TO:
        programs["generic"] = lambda: run_ours(samplers["generic"], prompts, 1.0)
    seconds = alternate(programs, repeats)
    tokens = batch * COMPLETION
    rates = {key: Spread.of([tokens / s for s in seconds[key]]) for key in seconds}
    limit, half_limit = (tokens / products_seconds(m, batch) for m in (model, half))
    best = min(("generate", "generate_half"), key=lambda key: sum(seconds[key]))
    row = {
        "model": name,
        "batch": batch,
        "seconds": seconds,
        **rates,
        "limit": limit,
        "of_limit": rates["fast"].median / limit,
        "half_limit": half_limit,
        "half_of_limit": rates["half"].median / half_limit,
        "ratio": ratios(seconds["generate"], seconds["fast"]),
        "half_ratio": ratios(seconds[best], seconds["half"]),
        "deviation": deviation(model, prompts, rounded),
    }
    print(
        f"{name} batch {batch}: {row['ratio'].show('.2f')} times generate, "
        f"{row['of_limit']:.0%} of the products' rate; bfloat16 {row['half_ratio'].show('.2f')}, "
        f"{row['half_of_limit']:.0%}",
        flush=True,
    )
    return row


def make_sampler(model: Any, path: Literal["fast", "generic"]) -> InProcessSampler:
    return InProcessSampler(model, context_length=1024, path=path)


def measure_group(name: str, repeats: int) -> dict[str, Any]:
    """Groups of GROUP that share a prompt of LONG_PROMPT tokens."""
    model = make_model(name).eval()
    sampler = make_sampler(model, "fast")
    distinct = prompts_of(64 // GROUP, model.config.vocab_size, LONG_PROMPT)
    shared = [prompt for prompt in distinct for _ in range(GROUP)]
    own = prompts_of(64, model.config.vocab_size, LONG_PROMPT)
    seconds = alternate(
        {
            "generate": lambda: run_generate(model, shared, 1.0),
            "shared": lambda: run_ours(sampler, shared, 1.0),
            "own": lambda: run_ours(sampler, own, 1.0),
        },
        repeats,
    )
    tokens = 64 * COMPLETION
    row = {
        "model": name,
        "seconds": seconds,
        **{key: Spread.of([tokens / s for s in seconds[key]]) for key in seconds},
        "ratio": ratios(seconds["generate"], seconds["shared"]),
        "gain": ratios(seconds["own"], seconds["shared"]),
    }
    print(f"{name} groups: {row['ratio'].show('.2f')} times generate", flush=True)
    return row


def continuous_batching(name: str, batch: int, threads: int) -> str:
    """A sentence on `generate_batch`, measured in a process of its own, as it may not end."""
    command = [sys.executable, __file__, "--threads", str(threads)]
    command += ["--continuous", name, str(batch)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        return (
            f"`generate_batch` ({name}, batch {batch}) had not finished two runs after "
            f"{PATIENCE_S:.0f} s of wall time; no figure."
        )
    if done.returncode:
        return f"`generate_batch` failed: {done.stderr.strip().splitlines()[-1][:200]}"
    return done.stdout.strip().splitlines()[-1]


def report_continuous_batching(name: str, batch: int) -> None:
    """Print the sentence: two runs beside two of ours, in processor time of all threads."""
    model = make_model(name).eval()
    prompts = prompts_of(batch, model.config.vocab_size)
    sampler = make_sampler(model, "fast")
    seconds = alternate(
        {
            "generate_batch": lambda: run_generate_batch(model, prompts),
            "ludus": lambda: run_ours(sampler, prompts, 1.0),
        },
        2,
    )
    rates = {key: batch * COMPLETION / min(values) for key, values in seconds.items()}
    print(
        f"`generate_batch` of transformers ({name}, batch {batch}, the better of two runs): "
        f"{rates['generate_batch']:,.0f} tokens/s, ludus {rates['ludus']:,.0f}; "
        "in processor time of all threads."
    )


def main() -> None:
    if "--continuous" in sys.argv:
        at = sys.argv.index("--continuous")
        name, batch = sys.argv[at + 1 : at + 3]
        del sys.argv[at : at + 3]
        arguments(__doc__ or "")
        report_continuous_batching(name, int(batch))
        sys.stdout.flush()
        os._exit(0)  # its threads do not end by themselves
    args = arguments(__doc__ or "")
    cases = [(name, batch) for name in SHAPES for batch in BATCHES]
    if args.quick:
        cases = [("0.9 M", 16)]
    facts = machine(args.threads)
    rows = [measure(name, batch, args.repeats) for name, batch in cases]
    groups = [] if args.quick else [measure_group("5.8 M", args.repeats)]
    said = continuous_batching("0.9 M", 16, args.threads)
    print(said)
    if not args.quick:
        publish(rows, groups, said, facts, args.repeats)


def publish(
    rows: list[dict[str, Any]],
    groups: list[dict[str, Any]],
    said: str,
    facts: dict[str, Any],
    repeats: int,
) -> None:
    def rate(name: str) -> Callable[[dict[str, Any]], str]:
        return lambda row: row[name].show(",.0f") if name in row else "not measured"

    def where(holds: Callable[[dict[str, Any]], bool]) -> list[str]:
        return [f"{row['model']} at batch {row['batch']}" for row in rows if holds(row)]

    case = (("parameters", lambda r: r["model"]), ("batch", lambda r: str(r["batch"])))
    full = tabulate(
        rows,
        *case,
        ("generate", rate("generate")),
        ("generic", rate("generic")),
        ("fast", rate("fast")),
        ("fast / generate", lambda r: r["ratio"].bold()),
        ("of products", lambda r: f"{r['of_limit']:.0%}"),
    )
    half = tabulate(
        rows,
        *case,
        ("generate", rate("generate_half")),
        ("fast", rate("half")),
        ("fast / best", lambda r: r["half_ratio"].bold()),
        ("of products", lambda r: f"{r['half_of_limit']:.0%}"),
        ("nats", lambda r: f"{r['deviation']:.4f}"),
    )
    grouped = tabulate(
        groups,
        ("parameters", lambda r: r["model"]),
        ("generate", rate("generate")),
        ("own prompts", rate("own")),
        ("shared", rate("shared")),
        ("shared / generate", lambda r: f"**{r['ratio'].median:.2f}**"),
        ("gain", lambda r: f"{r['gain'].median:.2f}"),
    )
    lost = where(lambda r: r["ratio"].median < 1)
    slower = where(lambda r: "generic" in r and r["generate"].median > r["generic"].median)
    below = where(lambda r: r["ratio"].median < 4)
    half_below = where(lambda r: r["half_ratio"].median < 4)
    text = f"""
# Sampler against transformers

The in-process sampler, through its public interface (sessions, asyncio, seeds), against
`model.generate` of transformers on the same Qwen3-shaped model of random weights. Prompts of
{PROMPT} tokens, completions of {COMPLETION}, temperature 1, float32, KV caches, no padding, prefill
included. The sampler also returns every token's log-probability. All programs give the same greedy
tokens; each case starts with this check, on up to four prompts. Figures are sampled tokens/s.
*fast* and *generic* are the sampler's two decoders.

*Of products*: the rate of *fast* relative to a program that computes only the matrix products of
the same tokens in torch, measured after the case. Native products may be faster than torch's, which
do not use all vector units on every machine.

Medians and quartiles of {repeats} runs in alternating order, after one warm-up run; the ratio
is of neighbouring runs.

{full}

`generate` is faster than *fast* in: {", ".join(lost) or "none of these cases"}; faster than
*generic* in: {", ".join(slower) or "none of those measured"}. *Fast* is less than 4 times
`generate` in: {", ".join(below) or "none of these cases"}.

## In bfloat16

`sampler: {{name: in_process, args: {{dtype: bfloat16}}}}` on weights in float32, against `generate`
on weights in bfloat16, in the same runs. *Fast / best*: against the faster of `generate` in float32
and in bfloat16. *Of products*: relative to torch's products in bfloat16. *Nats*: mean difference
between the log-probabilities of the sampler and those of the model in float32.

{half}

Less than 4 times the faster `generate` in: {", ".join(half_below) or "none of these cases"}.

## Groups that share a prompt

64 rows in groups of {GROUP}, prompts of {LONG_PROMPT} tokens, completions of {COMPLETION}. *Own
prompts*: as many rows of the same length without shared prompts. *Gain*: shared / own.

{grouped}

## Continuous batching

{said}

vLLM: see [vllm-sampler.md](vllm-sampler.md).

Not measured: later turns of an episode, rows of different length, rows that start and end at
different times, a GPU.

    python benchmarks/sampler.py
"""
    write("sampler", text, facts, [*rows, *groups])


if __name__ == "__main__":
    main()
