"""vLLM or SGLang as ludus's sampler: start-up time, tokens per second, time to load new weights.

    make vllm && python benchmarks/vllm_server.py
    make sglang && python benchmarks/vllm_server.py --sglang

Through the public interface: turns over the server's socket, with every token's log-probability.
Processor time is that of the server's processes; other load on the machine affects it little.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from common import (
    RESULTS,
    Spread,
    arguments,
    group_processor_seconds,
    machine,
    make_model,
    sample_turns,
    table,
    write,
)

from ludus.core.types import Spec
from ludus.models.chat.tokenizers import train_tokenizer
from ludus.models.samplers.served import ServedSampler
from ludus.models.samplers.sglang import SglangSampler
from ludus.models.samplers.vllm import VllmSampler

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
MODEL, PROMPT, COMPLETION = "5.8 M", 64, 64
BATCHES = (1, 16, 64)


def play(sampler: ServedSampler, batch: int, run: int) -> None:
    prompts = [
        [1 + (31 * i + 7 * number + run) % 4000 for i in range(PROMPT)] for number in range(batch)
    ]
    turns = sample_turns(sampler, prompts, COMPLETION)
    assert all(len(turn.token_ids) == COMPLETION for turn in turns)


def main() -> None:
    args = arguments(__doc__ or "", sglang="measure SGLang instead of vLLM")
    name = "sglang" if args.sglang else "vllm"
    made: type[Any] = SglangSampler if args.sglang else VllmSampler
    engine, build = ("SGLang", "SGLang 0.4.10") if args.sglang else ("vLLM", "vLLM's CPU build")
    command = f"make {name} && python benchmarks/vllm_server.py{' --sglang' * args.sglang}"
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # the server has a core of its own
    facts = {**machine(args.threads), "clock": "wall"}
    folder = Path(tempfile.mkdtemp())
    tokenizer = train_tokenizer(Spec(name="words"), ["go"])
    rows: list[dict[str, Any]] = []
    for dtype in ("float32", "bfloat16"):
        sampler = made(
            make_model(MODEL),
            tokenizer,
            folder / dtype,
            1024,
            python=str(ROOT / f".venv-{name}" / "bin" / "python"),
            dtype=dtype,
            eager=True,
            threads=args.threads,
        )
        started = time.perf_counter()
        play(sampler, 1, -1)
        row: dict[str, Any] = {"dtype": dtype, "start_s": time.perf_counter() - started}
        assert sampler.server is not None
        for batch in BATCHES:
            wall, used = [], []
            for run in range(args.repeats + 1):
                at, before = time.perf_counter(), group_processor_seconds(sampler.server.pid)
                play(sampler, batch, run)
                used.append(group_processor_seconds(sampler.server.pid) - before)
                wall.append(time.perf_counter() - at)
            tokens = batch * COMPLETION
            row[f"wall_{batch}"] = Spread.of([tokens / s for s in wall[1:]])
            row[f"used_{batch}"] = tokens * args.repeats / sum(used[1:])
        swaps = []
        for version in range(args.repeats + 1):
            at = time.perf_counter()
            sampler.publish(version)
            swaps.append(1e3 * (time.perf_counter() - at))
        row["swap_ms"] = Spread.of(swaps[1:])
        sampler.shutdown()
        rows.append(row)
        print(row, flush=True)
    lines = [("start, s", [f"{row['start_s']:.0f}" for row in rows])]
    for batch in BATCHES:
        used = [f"{row[f'used_{batch}']:,.0f}" for row in rows]
        lines += [(f"batch {batch}, tokens/s", [row[f"wall_{batch}"].show(",.0f") for row in rows])]
        lines += [(f"batch {batch}, tokens per second of the server's processor time", used)]
    lines += [("new weights, ms", [row["swap_ms"].show(".0f") for row in rows])]
    text = f"""
# {engine} as the sampler

{build} behind `sampler: {name}`, one thread, a Qwen3-shaped model of {MODEL} parameters and
random weights, prompts of {PROMPT} tokens, completions of {COMPLETION}, every token with its
log-probability. *New weights* is the whole `publish`: writing, hashing, loading, the probe. Medians
and quartiles of {args.repeats} runs in wall time, except the lines in the server's processor time.

{table(["", *[row["dtype"] for row in rows]], [[name, *cells] for name, cells in lines])}

    {command}
"""
    if not args.quick:
        write(name, text, facts, rows)
        print(RESULTS / f"{name}.md")


if __name__ == "__main__":
    main()
