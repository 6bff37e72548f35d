"""Prefill of long prompts in the in-process sampler, against a forward pass of transformers.

python benchmarks/prefill.py
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from common import (
    SHAPES,
    Spread,
    alternate,
    arguments,
    machine,
    make_model,
    ratios,
    sample_turns,
    tabulate,
    write,
)
from sampler import prompts_of

import torch  # isort: skip - after common, which sets the threads' policy

from ludus.models.samplers.engine import InProcessSampler

LENGTHS = (1024, 2048, 4096, 8192)


def measure(name: str, length: int, repeats: int) -> dict[str, Any]:
    """One prompt and one token, beside a plain forward pass with a KV cache and one row of
    logits, in float32 and in bfloat16."""
    model = make_model(name, positions=length + 1).eval()
    half = copy.deepcopy(model).bfloat16()
    [prompt] = prompts_of(1, model.config.vocab_size, length)
    ids = torch.tensor([prompt])

    @torch.inference_mode()
    def plain(of: Any) -> Any:
        return of(ids, use_cache=True, logits_to_keep=1).logits[0, -1]

    full, rounded = (
        InProcessSampler(model, context_length=length + 1, path="fast", dtype=dtype)
        for dtype in ("float32", "bfloat16")
    )
    [greedy] = sample_turns(full, [prompt], 1, 0.0)
    if greedy.token_ids != [int(plain(model).argmax())]:
        raise SystemExit(f"{name}, {length} tokens: the greedy tokens differ")
    seconds = alternate(
        {
            "plain": lambda: plain(model),
            "fast": lambda: sample_turns(full, [prompt], 1),
            "plain_half": lambda: plain(half),
            "half": lambda: sample_turns(rounded, [prompt], 1),
        },
        repeats,
    )
    best = min(("plain", "plain_half"), key=lambda key: sum(seconds[key]))
    row = {
        "model": name,
        "length": length,
        "seconds": seconds,
        **{key: Spread.of([length / s for s in values]) for key, values in seconds.items()},
        "ratio": ratios(seconds["plain"], seconds["fast"]),
        "half_ratio": ratios(seconds["plain_half"], seconds["half"]),
        "best_ratio": ratios(seconds[best], seconds["half"]),
    }
    print(
        f"{name} prefill {length}: {row['ratio'].show('.2f')} times a plain pass, bfloat16 "
        f"{row['half_ratio'].show('.2f')}, {row['best_ratio'].show('.2f')} times the faster",
        flush=True,
    )
    return row


def publish(rows: list[dict[str, Any]], facts: dict[str, Any], repeats: int) -> None:
    def rate(name: str) -> Callable[[dict[str, Any]], str]:
        return lambda row: row[name].show(",.0f")

    table = tabulate(
        rows,
        ("parameters", lambda r: r["model"]),
        ("prompt", lambda r: f"{r['length']:,}"),
        ("forward", rate("plain")),
        ("fast", rate("fast")),
        ("fast / forward", lambda r: r["ratio"].bold()),
        ("forward, bf16", rate("plain_half")),
        ("fast, bf16", rate("half")),
        ("bf16 / bf16", lambda r: r["half_ratio"].bold()),
        ("bf16 / best", lambda r: r["best_ratio"].bold()),
    )
    keys = {"ratio": "float32", "half_ratio": "bfloat16", "best_ratio": "bfloat16 / best"}
    lost = [
        f"{row['model']} at {row['length']:,} tokens ({kind})"
        for row in rows
        for key, kind in keys.items()
        if row[key].median < 1
    ]
    text = f"""
# Sampler: prefill of long prompts

One prompt and one sampled token through the in-process sampler's public interface, against one
forward pass of transformers with the same weights: torch's own attention, a KV cache that is
filled, the logits of the last token only. The first greedy token is the same. Figures are prompt
tokens/s. In bfloat16 the sampler multiplies in bfloat16 on weights in float32; the forward pass has
weights in bfloat16. *Bf16 / best*: against the faster of the forward pass in float32 and in
bfloat16.

Medians and quartiles of {repeats} runs in alternating order, after one warm-up run; a ratio is of
neighbouring runs.

{table}

Slower than the forward pass in: {", ".join(lost) or "none of these cases"}.

    python benchmarks/prefill.py
"""
    write("prefill", text, facts, rows)


def main() -> None:
    args = arguments(__doc__ or "")
    facts = machine(args.threads)
    names = ["0.9 M"] if args.quick else list(SHAPES)
    lengths = LENGTHS[:1] if args.quick else LENGTHS
    rows = [measure(name, length, args.repeats) for name in names for length in lengths]
    if not args.quick:
        publish(rows, facts, args.repeats)


if __name__ == "__main__":
    main()
