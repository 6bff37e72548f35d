"""The in-process sampler against transformers' `generate`, on one model.

    python benchmarks/sampler.py

Both sample from the model's own distribution (temperature 1, nothing cut) with a KV cache, in
float32, and both are checked first to give the same greedy tokens. All prompts of a batch have one
length and all completions another, which suits `generate`: nothing is padded, nothing finishes
early. Ours also returns the log-probability of every token; `generate` is not asked to.
"""

from __future__ import annotations

import asyncio
from typing import Any

from common import MODELS, Spread, alternate, arguments, machine, make_model, ratios, table, write

import torch  # isort: skip - after common, which sets the threads' policy

from ludus.models.engine import InProcessSampler
from ludus.models.sampler import SamplingParams

PROMPT, COMPLETION = 64, 64
BATCHES = (1, 16, 64)


def prompts_of(batch: int, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(1, vocab_size, (batch, PROMPT), generator=generator).tolist()


def run_ours(
    sampler: InProcessSampler, prompts: list[list[int]], temperature: float
) -> list[list[int]]:
    async def episode(number: int) -> list[int]:
        params = SamplingParams(max_tokens=COMPLETION, temperature=temperature, seed=number)
        name = f"{number:03d}"
        try:
            completion = await sampler.sample(prompts[number], params, session=name)
        finally:
            sampler.close(name)
        return completion.token_ids

    async def everyone() -> list[list[int]]:
        for number in range(len(prompts)):
            sampler.open(f"{number:03d}")
        return await asyncio.gather(*[episode(number) for number in range(len(prompts))])

    return asyncio.run(everyone())


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
    found: list[list[int]] = output[:, PROMPT:].tolist()
    return found


def measure(name: str, batch: int, repeats: int) -> dict[str, Any]:
    model = make_model(name).eval()
    sampler = InProcessSampler(model, context_length=1024)
    prompts = prompts_of(batch, model.config.vocab_size)
    if run_ours(sampler, prompts, 0.0) != run_generate(model, prompts, 0.0):
        raise SystemExit(f"{name}, batch {batch}: the greedy tokens differ")
    seconds = alternate(
        {
            "generate": lambda: run_generate(model, prompts, 1.0),
            "ludus": lambda: run_ours(sampler, prompts, 1.0),
        },
        repeats,
    )
    tokens = batch * COMPLETION
    row = {
        "model": name,
        "batch": batch,
        "seconds": seconds,
        "generate": Spread.of([tokens / s for s in seconds["generate"]]),
        "ludus": Spread.of([tokens / s for s in seconds["ludus"]]),
        "ratio": ratios(seconds["generate"], seconds["ludus"]),
    }
    print(f"{name} batch {batch}: {row['ratio'].show('.2f')} times generate", flush=True)
    return row


def main() -> None:
    args = arguments(__doc__ or "")
    cases = [("0.9 M", 16)] if args.quick else [(name, b) for name in MODELS for b in BATCHES]
    facts = machine(args.threads)
    rows = [measure(name, batch, args.repeats) for name, batch in cases]
    facts["load_after"] = machine(args.threads)["load"]
    if args.quick:
        return
    lost = [f"{r['model']} at batch {r['batch']}" for r in rows if r["ratio"].median < 1]
    cells = [
        [
            r["model"],
            str(r["batch"]),
            r["generate"].show(",.0f"),
            r["ludus"].show(",.0f"),
            f"**{r['ratio'].median:.2f}** ({r['ratio'].low:.2f} to {r['ratio'].high:.2f})",
        ]
        for r in rows
    ]
    head = ["parameters", "batch", "generate, tokens/s", "ludus, tokens/s", "ludus / generate"]
    text = f"""
# Sampler against `generate`

The in-process sampler, through its public interface (sessions, asyncio, seeds), against
`model.generate` of transformers on the same Qwen3-shaped model of random weights. Prompts of
{PROMPT} tokens, completions of {COMPLETION}, temperature 1, float32, KV caches, no padding in
either. Ours also returns every token's log-probability. Both give the same greedy tokens, checked
before each case.

Medians and quartiles of {args.repeats} runs in alternating order, one more before them not counted;
the ratio is that of neighbouring runs.

{table(head, cells)}

`generate` is faster in: {", ".join(lost) or "none of these cases"}.

Not measured here: what a cache that lives from turn to turn saves, batches whose rows differ in
length or come and go, half precision.

    python benchmarks/sampler.py
"""
    write("sampler", text, facts, rows)


if __name__ == "__main__":
    main()
