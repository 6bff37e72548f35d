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
import asyncio
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from ludus.core.types import Sample
from ludus.models.samplers.base import Completion, Sampler, SamplingParams

RESULTS = Path(__file__).parents[1] / "docs" / "benchmarks"
KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
KEYS += ("num_key_value_heads", "head_dim", "vocab_size")
SHAPES = {
    "0.9 M": (128, 384, 4, 4, 2, 32, 1024),
    "5.8 M": (256, 768, 6, 8, 4, 32, 4096),
    "17 M": (384, 1152, 8, 6, 2, 64, 8192),
}
"""The values of KEYS for each model."""


def qwen3_config(shape: Sequence[int], **settings: Any) -> Qwen3Config:
    """A Qwen3 configuration without an end token."""
    return Qwen3Config(
        **dict(zip(KEYS, shape, strict=True)),
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        **settings,
    )


def make_model(name: str, vocab_size: int | None = None, positions: int = 1024) -> Any:
    """A Qwen3-shaped model with random float32 weights."""
    torch.manual_seed(0)
    config = qwen3_config(SHAPES[name], max_position_embeddings=positions)
    config.vocab_size = vocab_size or config.vocab_size
    return Qwen3ForCausalLM(config)


def make_samples(parts: Sequence[tuple[list[int], list[int]]], logprob: float) -> list[Sample]:
    """A sample of each (prompt, completion), with advantages of 1 and -1 in turn."""
    samples = []
    for number, (prompt, completion) in enumerate(parts):
        mask = [False] * len(prompt) + [True] * len(completion)
        logprobs = [logprob * trained for trained in mask]
        advantages = [(-1.0) ** number * trained for trained in mask]
        samples.append(Sample(prompt + completion, mask, logprobs, advantages, f"{number}"))
    return samples


def sample_turns(
    sampler: Sampler, prompts: list[list[int]], max_tokens: int, temperature: float = 1.0
) -> list[Completion]:
    """Sample a turn after each prompt, all at the same time, each in a session of its own."""

    async def turn(session: str, number: int) -> Completion:
        try:
            params = SamplingParams(max_tokens, temperature=temperature, seed=number)
            return await sampler.sample(prompts[number], params, session=session)
        finally:
            sampler.close(session)

    async def turns() -> list[Completion]:
        sessions = [f"{number:05d}" for number in range(len(prompts))]
        for session in sessions:
            sampler.open(session)
        return await asyncio.gather(*(turn(s, number) for number, s in enumerate(sessions)))

    return asyncio.run(turns())


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        one = len(values) == 1  # `--repeats 1`: statistics.quantiles needs two values before 3.13
        low, _, high = values * 3 if one else statistics.quantiles(values, n=4, method="inclusive")
        return cls(statistics.median(values), low, high)

    def show(self, form: str) -> str:
        return f"{self.median:{form}} ({self.low:{form}} to {self.high:{form}})"

    def bold(self) -> str:
        """A ratio with two decimals, its median in bold."""
        return f"**{self.median:.2f}** ({self.low:.2f} to {self.high:.2f})"


def arguments(description: str, **flags: str) -> argparse.Namespace:
    """The options of a benchmark; `flags` are further ones, with their help."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="torch's threads, each pinned")
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of each program")
    parser.add_argument("--quick", action="store_true", help="one small case, nothing written")
    for name, text in flags.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-args.threads :])
    return args


def clock() -> float:
    """Processor time on one thread, wall time on several."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def rounds(names: Iterable[str], repeats: int, warmup: int = 1) -> Iterator[tuple[int, str]]:
    """Yield (round, name), in reverse order every other round; rounds below 0 are not counted."""
    order = list(names)
    for number in range(-warmup, repeats):
        for name in order if (number + warmup) % 2 == 0 else order[::-1]:
            yield number, name


def alternate(programs: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each run, after one run of each that is not counted. Every other round runs in
    reverse order."""
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for number, name in rounds(programs, repeats):
        start = clock()
        programs[name]()
        elapsed = clock() - start
        if number >= 0:
            seconds[name].append(elapsed)
    return seconds


def ratios(peer: list[float], ours: list[float]) -> Spread:
    """Speed-up of ours over the peer, run by run."""
    return Spread.of([p / o for p, o in zip(peer, ours, strict=True)])


def processor_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    return _ticks(Path(f"/proc/{pid}/stat"))[1] / os.sysconf("SC_CLK_TCK")


def group_processor_seconds(group: int) -> float:
    """Processor time of all living processes of a process group."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            its_group, its_ticks = _ticks(stat)
        except (FileNotFoundError, ProcessLookupError):
            continue
        ticks += its_ticks if its_group == group else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def _ticks(stat: Path) -> tuple[int, int]:
    """Process group, and user and system time in clock ticks."""
    fields = stat.read_text().rpartition(")")[2].split()
    return int(fields[2]), int(fields[11]) + int(fields[12])


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


def write(
    name: str,
    text: str,
    facts: dict[str, Any],
    rows: list[dict[str, Any]],
    packages: Sequence[str] = (),
) -> None:
    """Write `docs/benchmarks/<name>.md` and `.json`.

    Args:
        facts: those of `machine` before the measurement.
        packages: further packages whose versions are recorded.
    """
    facts = facts | {package: version(package) for package in packages}
    facts["load_after"] = machine(facts["threads"])["load"]
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


def two_axes() -> tuple[Any, Any]:
    """A figure for an SVG file, and its two axes side by side."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tabulate(rows: Iterable[Any], *columns: tuple[str, Callable[[Any], str]]) -> str:
    """A Markdown table of columns: a heading, and the cell of a row."""
    return table(
        [head for head, _ in columns], [[cell(row) for _, cell in columns] for row in rows]
    )
