"""The in-process sampler against vLLM's CPU build, on the same weights and the same core.

    make vllm && python benchmarks/vllm_sampler.py      # vLLM starts 8 times, 1 to 2 minutes each

Both sample 64 tokens after prompts of 64, all at once, from the model's own distribution. *All*
counts prompts and completions; *steady* counts the 63 tokens after the first, when every row
decodes. vLLM runs in its own process, without a server, tokenizer or detokenizer. Each program
waits while the other runs. vLLM's settings are the fastest of those tested first.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from common import (
    Spread,
    arguments,
    group_processor_seconds,
    machine,
    make_model,
    processor_seconds,
    ratios,
    rounds,
    sample_turns,
    table,
    write,
)
from sampler import COMPLETION, PROMPT, prompts_of, run_ours
from vllm_server import PYTHON

from ludus.models.samplers.engine import InProcessSampler

MODEL = "5.8 M"
BATCHES = (64, 1, 16, 256)
DTYPES: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
KINDS = {"all": "wall", "steady": "steady wall"}
"""Keys of a program's seconds: those of the processor, those of the wall."""
TRIED: dict[str, dict[str, Any]] = {
    "compiled": {},
    "eager": {"enforce_eager": True},
    "eager, blocks of 128": {"enforce_eager": True, "block_size": 128},
    "compiled, 16,384 tokens a step": {"max_num_batched_tokens": 16384},
}
"""Settings of vLLM to try besides ENGINE, at the first batch size."""
ENGINE = {
    "max_model_len": 1024,
    "max_num_seqs": 256,
    "kv_cache_memory_bytes": 2**30,
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,  # every run has the same prompts: each is to compute them
    "generation_config": "vllm",
    "disable_log_stats": True,
    "distributed_executor_backend": "uni",
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the process is pinned already
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Seconds:
    """Of the processor and of the wall."""

    processor: float
    wall: float

    def __sub__(self, other: Seconds) -> Seconds:
        return Seconds(self.processor - other.processor, self.wall - other.wall)


Program = Callable[[list[list[int]], int], Seconds]
"""Completes prompts with that number of tokens."""


class Vllm:
    """vLLM in a process of its own, pinned as this one is."""

    def __init__(self, folder: Path, dtype: str, settings: dict[str, Any], threads: int) -> None:
        self._log = (folder / "vllm.log").open("w")
        self._process = subprocess.Popen(
            # -P: the names of files beside the worker must not hide modules.
            [str(PYTHON), "-P", str(Path(__file__).with_name("vllm_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(threads)},
            start_new_session=True,
        )
        self._ask(**ENGINE, model=str(folder / "model"), dtype=dtype, **settings)

    def run(
        self, prompts: list[list[int]], tokens: int, logprobs: bool, temperature: float = 1.0
    ) -> tuple[Seconds, list[list[int]]]:
        started = self._others()
        found = self._ask(
            prompts=prompts, max_tokens=tokens, temperature=temperature, logprobs=logprobs
        )
        others = self._others() - started
        return Seconds(found["processor_s"] + others, found["wall_s"]), found["tokens"]

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._log.close()

    def _others(self) -> float:
        """Processor time of its other processes; to 0.01 s."""
        pid = self._process.pid
        return max(0.0, group_processor_seconds(pid) - processor_seconds(pid))

    def _ask(self, **line: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"vLLM ended; see {self._log.name}")
        found: dict[str, Any] = json.loads(answer)
        return found


def ours(sampler: InProcessSampler, prompts: list[list[int]], tokens: int) -> Seconds:
    """The same with ludus, through its public interface; it always tells log-probabilities."""
    wall, used = time.perf_counter(), time.process_time()
    sample_turns(sampler, prompts, tokens)
    return Seconds(time.process_time() - used, time.perf_counter() - wall)


def tuned(
    folder: Path, dtype: str, threads: int, names: list[str]
) -> tuple[Vllm, dict[str, float]]:
    """vLLM with the fastest settings, and the steady tokens/s of all that were tried."""
    prompts = prompts_of(BATCHES[0], 4000)
    rates: dict[str, float] = {}
    fastest: Vllm | None = None
    for name in names:
        vllm = Vllm(folder, dtype, TRIED[name], threads)
        vllm.run(prompts, COMPLETION, True)
        runs = [
            vllm.run(prompts, COMPLETION, True)[0] - vllm.run(prompts, 1, True)[0] for _ in range(3)
        ]
        found = len(prompts) * (COMPLETION - 1) / min(run.processor for run in runs)
        print(f"vLLM {dtype}, {name}: {found:,.0f} tokens/s steady", flush=True)
        slower = fastest if found > max(rates.values(), default=0.0) else vllm
        fastest = vllm if slower is not vllm else fastest
        if slower is not None:
            slower.stop()
        rates[name] = found
    assert fastest is not None
    return fastest, rates


def check_greedy(model: Any, vllm: Vllm) -> None:
    """Both give the same tokens, in float32."""
    prompts = prompts_of(4, model.config.vocab_size)
    expected = run_ours(InProcessSampler(model, context_length=1024), prompts, 0.0)
    if vllm.run(prompts, COMPLETION, False, 0.0)[1] != expected:
        raise SystemExit("the greedy tokens differ")


def measure(prompts: list[list[int]], programs: dict[str, Program], repeats: int) -> dict[str, Any]:
    """Each program in turn: a run of all tokens and one of the first only."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in programs}
    for number, name in rounds(programs, repeats):
        whole, first = programs[name](prompts, COMPLETION), programs[name](prompts, 1)
        if number < 0:
            continue
        for (kind, wall), seconds in zip(KINDS.items(), (whole, whole - first), strict=True):
            found[name].setdefault(kind, []).append(seconds.processor)
            found[name].setdefault(wall, []).append(seconds.wall)
    return {"batch": len(prompts), "seconds": found}


def rate(row: dict[str, Any], program: str, key: str) -> Spread:
    tokens = row["batch"] * (COMPLETION - key.startswith("steady"))
    return Spread.of([tokens / s for s in row["seconds"][program][key]])


def faster(row: dict[str, Any], peer: str, program: str, key: str) -> Spread:
    return ratios(row["seconds"][peer][key], row["seconds"][program][key])


def best(row: dict[str, Any], key: str, program: str) -> str:
    """vLLM or ludus in its faster type."""
    return max((f"{program} {d}" for d in DTYPES), key=lambda name: rate(row, name, key).median)


def report(rows: list[dict[str, Any]], tried: dict[str, dict[str, float]], repeats: int) -> str:
    cells, best_cells = [], []
    for row, dtype, kind in itertools.product(rows, DTYPES, KINDS):
        names = [f"{program} {dtype}" for program in ("vLLM", "bare vLLM", "ludus")]
        vllm, bare, ludus = names
        rates = [f"{rate(row, name, kind).median:,.0f}" for name in names]
        wall = faster(row, vllm, ludus, KINDS[kind])
        gains = [faster(row, vllm, ludus, kind).bold()]
        gains += [f"{gain.median:.2f}" for gain in (faster(row, bare, ludus, kind), wall)]
        cells.append([str(row["batch"]), dtype, kind, *rates, *gains])
    for row, kind in itertools.product(rows, KINDS):
        names = [best(row, kind, program) for program in ("vLLM", "ludus")]
        rates = [f"{name.split()[1]}, {rate(row, name, kind).median:,.0f}" for name in names]
        best_cells.append([str(row["batch"]), kind, *rates, faster(row, *names, kind).bold()])
    head = ["batch", "type", "", "vLLM", "vLLM, no log-probabilities", "ludus", "ludus / vLLM"]
    head += ["/ no log-probabilities", "wall"]
    tried_cells = [
        [name, *[f"{tried[dtype][name]:,.0f}" for dtype in DTYPES]] for name in tried[DTYPES[0]]
    ]
    return f"""
# The sampler beside vLLM

The in-process sampler and vLLM's CPU build on the same Qwen3-shaped model of {MODEL} parameters and
random weights; prompts of {PROMPT} tokens, completions of {COMPLETION}, temperature 1, no top-k or
top-p, no end token. Both are pinned to the same core with one thread, and run in turn. Figures are
tokens per second of processor time of all processes of a program. *all*: prompts and completions.
*steady*: the tokens after each row's first, when all rows decode (the difference of runs of
{COMPLETION} tokens and of one). In float32 both give the same greedy tokens; the benchmark checks
this first.

vLLM runs in process (its `LLM` class: no server, no tokenizer, no text), which is faster than its
server. Both return the log-probability of every token; *no log-probabilities* is vLLM without them.

Medians (and quartiles) of {repeats} runs in alternating order, after one warm-up run; ratios are of
neighbouring runs. *Wall*: the ratio by wall time, which other load affects.

{table(head, cells)}

## Best against best

Each program in its faster type, by processor time, both with log-probabilities.

{table(["batch", "", "vLLM", "ludus", "ludus / vLLM"], best_cells)}

## vLLM's settings

Steady tokens/s at batch {BATCHES[0]} with each tested setting, the best of three runs. The
benchmark uses the fastest setting for each type. The cache holds all rows. Prefix caching is off,
because prompts repeat from run to run.

{table(["settings", *DTYPES], tried_cells)}

    make vllm && python benchmarks/vllm_sampler.py
"""


def main() -> None:
    args = arguments(__doc__ or "")
    if args.threads != 1:
        raise SystemExit("--threads: vLLM and ludus are measured on one core, with one thread each")
    facts = machine(args.threads)
    model = make_model(MODEL).eval()
    folder = Path(tempfile.mkdtemp())
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder / "model")
    names = ["compiled"] if args.quick else list(TRIED)
    programs: dict[str, Program] = {}
    engines, tried = [], {}
    for dtype in DTYPES:
        vllm, tried[dtype] = tuned(folder, dtype, args.threads, names)
        engines.append(vllm)
        sampler = InProcessSampler(model, context_length=1024, dtype=dtype)
        programs |= {
            f"vLLM {dtype}": lambda prompts, n, vllm=vllm: vllm.run(prompts, n, True)[0],
            f"bare vLLM {dtype}": lambda prompts, n, vllm=vllm: vllm.run(prompts, n, False)[0],
            f"ludus {dtype}": lambda prompts, n, mine=sampler: ours(mine, prompts, n),
        }
    check_greedy(model, engines[0])
    rows = []
    for batch in BATCHES[:1] if args.quick else BATCHES:
        prompts = prompts_of(batch, model.config.vocab_size)
        rows.append(measure(prompts, programs, args.repeats))
        for dtype in DTYPES:
            for kind in KINDS:
                ratio = faster(rows[-1], f"vLLM {dtype}", f"ludus {dtype}", kind)
                print(f"batch {batch} {dtype} {kind}: {ratio.show('.2f')} times vLLM", flush=True)
    for vllm in engines:
        vllm.stop()
    text = report(sorted(rows, key=lambda row: int(row["batch"])), tried, args.repeats)
    if args.quick:
        print(text)
        return
    write("vllm-sampler", text, {**facts, "vllm": "0.32.0"}, [*rows, {"tried": tried}])


if __name__ == "__main__":
    main()
