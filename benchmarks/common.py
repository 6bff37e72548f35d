"""Shared parts of side-by-side measurements: machine facts, alternating repeats, result pages.

Programs run alternately in one process on pinned threads, so other load on the machine affects all
of them. A figure is a median over the repeats, with quartiles; a ratio is the median of the ratios
of neighbouring runs. On one thread, time is processor time, which equals wall time on an idle
machine; on several threads it is wall time.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

RESULTS = Path(__file__).parents[1] / "docs" / "benchmarks"
MODELS: dict[str, dict[str, int]] = {
    "0.9 M": {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 384,
        "vocab_size": 1024,
    },
    "5.8 M": {
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "intermediate_size": 768,
        "vocab_size": 4096,
    },
}
LARGE: dict[str, dict[str, int]] = {
    "17 M": {
        "hidden_size": 384,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 1152,
        "vocab_size": 8192,
    },
}
"""Models that only some benchmarks take."""


def make_model(name: str) -> Any:
    """A Qwen3-shaped model of random weights, in float32, with no end token."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **(MODELS | LARGE)[name],
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(statistics.median(values), low, high)

    def show(self, form: str) -> str:
        return f"{self.median:{form}} ({self.low:{form}} to {self.high:{form}})"


def arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="torch's threads, each pinned")
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of each program")
    parser.add_argument("--quick", action="store_true", help="one small case, nothing written")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-args.threads :])
    return args


def alternate(programs: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each run, after one run of each that is not counted. Every other round runs in
    reverse order."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for number in range(-1, repeats):
        order = list(programs) if number % 2 else list(programs)[::-1]
        for name in order:
            start = clock()
            programs[name]()
            elapsed = clock() - start
            if number >= 0:
                seconds[name].append(elapsed)
    return seconds


def ratios(peer: list[float], ours: list[float]) -> Spread:
    """Speed-up of ours over the peer, run by run."""
    return Spread.of([p / o for p, o in zip(peer, ours, strict=True)])


def machine(threads: int) -> dict[str, Any]:
    """Facts about the machine; the load is that of the last minute."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0].partition(":")[2].strip() if names else model
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": threads,
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers")},
    }


def write(name: str, text: str, facts: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """`docs/benchmarks/<name>.md` and `.json`."""
    clock = facts.get("clock") or ("processor" if facts["threads"] == 1 else "wall")
    use = facts.get("use") or f"{facts['threads']} thread(s) used, pinned"
    told = (
        f"Seconds of {clock} time. "
        f"{facts['cpu']}, {facts['cores']} cores, {use}; load "
        f"{facts['load']} before and {facts['load_after']} after (the benchmark's own share "
        f"included); Python {facts['python']}, torch {facts['torch']}, transformers "
        f"{facts['transformers']}. Raw figures: [{name}.json]({name}.json)."
    )
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.md").write_text(f"{text.strip()}\n\n## Machine\n\n{told}\n")
    plain = json.dumps({"machine": facts, "rows": rows}, indent=1, default=asdict)
    (RESULTS / f"{name}.json").write_text(plain + "\n")


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
