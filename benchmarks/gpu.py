"""Training, decoding and a GRPO step on a GPU, against the limits of the device.

    python benchmarks/gpu.py                  # 8 minutes at most; nothing is downloaded
    python benchmarks/gpu.py --toy            # tiny models on the CPU

Cases run in the order of their importance until the seconds are spent, in a worker process: a case
that fails, hangs or runs out of memory is recorded, and the next one gets a new worker. Results are
written after each case. Models have the shapes of Qwen3-0.6B, 1.7B and 4B, and random weights in
bfloat16. Times are medians, without the first runs.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import asyncio
import json
import multiprocessing
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, make_samples, qwen3_config, sample_turns, tabulate
from fixed import LudusSteps, Work
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from ludus.config.schema import LearnerConfig, OptimizerConfig
from ludus.core.types import Sample, Spec
from ludus.envs import ENVS
from ludus.models.chat.tokenizers import train_tokenizer
from ludus.models.decoders.static import StaticDecoder
from ludus.models.flops import Shape, peak_flops
from ludus.models.samplers.engine import InProcessSampler
from ludus.telemetry.metrics import MetricsLog
from ludus.train.algorithms.aggregates import trajectory_mean
from ludus.train.algorithms.losses import clipped
from ludus.train.batches.packing import Layout, pack
from ludus.train.learner import Learner

ROOT = Path(__file__).parents[1]
DTYPE = torch.bfloat16
BYTES = 2
MAX_GAP = 0.02  # nats between the learner's and the sampler's log-probabilities
SHAPES = {
    "0.6B": (1024, 3072, 28, 16, 8, 128, 151_936),
    "1.7B": (2048, 6144, 28, 16, 8, 128, 151_936),
    "4B": (2560, 9728, 36, 32, 8, 128, 151_936),
}
TOY = {"toy": (32, 64, 2, 2, 1, 16, 1024), "toy 2": (48, 64, 2, 2, 1, 16, 1024)}


@dataclass(frozen=True)
class Scale:
    """Sizes of the work: `prompt` and `completion` in tokens, `case_s` at most for a case."""

    batches: tuple[int, ...] = (64, 256)
    prompt: int = 1024
    completion: int = 256
    group: int = 16
    groups: int = 16
    train_samples: int = 8
    train_prompt: int = 1024
    train_completion: int = 1024
    copied: int = 1 << 30
    repeats: int = 3
    case_s: float = 120
    recipe: str = "recipes/babyai-tiny.yaml"
    changes: tuple[str, ...] = ("rl.steps=4", "evaluate.num_tasks=32")
    init_s: float = 200
    after_init: tuple[str, ...] = ("sft.steps=12", "rl.steps=3", "evaluate.num_tasks=32")


TOY_SCALE = Scale(
    batches=(4, 8),
    prompt=16,
    completion=8,
    group=4,
    groups=2,
    train_samples=4,
    train_prompt=16,
    train_completion=16,
    copied=1 << 22,
    case_s=3600,
    recipe="tests/recipes/babyai.yaml",
    changes=("sft.steps=8", "rl.steps=2", "evaluate.num_tasks=2", "demonstrations.num_episodes=8"),
    init_s=3600,
    after_init=("sft.steps=3", "rl.steps=2", "evaluate.num_tasks=2", "rl.groups_per_step=2"),
)


@dataclass(frozen=True)
class Bench:
    """Measurement tools of every case."""

    scale: Scale
    device: torch.device
    limits: dict[str, Any] = field(default_factory=dict)

    def model(self, shape: tuple[int, ...]) -> Any:
        """A model of random weights, created on the device."""
        torch.manual_seed(0)
        rope = {"rope_type": "default", "rope_theta": 1e6}
        config = qwen3_config(
            shape, rope_parameters=rope, max_position_embeddings=4096, dtype=DTYPE
        )
        before = torch.get_default_dtype()
        torch.set_default_dtype(DTYPE)
        try:
            with self.device:
                return Qwen3ForCausalLM(config)
        finally:
            torch.set_default_dtype(before)

    def seconds(self, work: Callable[[], Any]) -> float:
        """Seconds between two events of the device, around all that `work` starts there."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            work()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        begin.record()
        work()
        torch.cuda.synchronize(self.device)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000

    def median(self, work: Callable[[], Any]) -> float:
        return statistics.median(self.seconds(work) for _ in range(self.scale.repeats))

    def memory_gb(self) -> float | None:
        """Peak of allocated memory since the last call."""
        if self.device.type != "cuda":
            return None
        peak = torch.cuda.max_memory_allocated(self.device) / 1e9
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak


Measure = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A measurement: `measure(bench, shape, **args)`."""

    name: str
    model: str
    measure: Measure
    args: dict[str, Any] = field(default_factory=dict)
    most_s: float | None = None  # None: as the scale has it


def cases(shapes: dict[str, tuple[int, ...]], scale: Scale) -> Iterator[Case]:
    """All cases, the most important one first."""
    first, *larger = shapes
    most = scale.batches[-1]
    yield Case("recipe", "0.8M", measure_recipe)
    for batch in scale.batches:
        yield Case(f"decode, batch {batch}", first, measure_decode, {"batch": batch})
    yield Case("train", first, measure_train, {"layout": "single"})
    yield Case("GRPO step", first, measure_step)
    yield Case("init", first, measure_init, most_s=scale.init_s)
    for name in larger:
        yield Case(f"decode, batch {most}", name, measure_decode, {"batch": most})
        yield Case("train", name, measure_train, {"layout": "single"})
        yield Case("GRPO step", name, measure_step)
    shared = {"batch": most, "group": scale.group}
    yield Case(f"decode, batch {most}, shared prompts", first, measure_decode, shared)
    yield Case("train, shared prompt", first, measure_train, {"layout": "tree"})
    checkpointed = {"layout": "tree", "checkpointing": True}
    yield Case("train, shared prompt, checkpointing", first, measure_train, checkpointed)
    copied = {"batch": most, "copied": True}
    yield Case(f"decode, batch {most}, copy of float32 weights", first, measure_decode, copied)


def measure_limits(bench: Bench, shape: None) -> dict[str, Any]:
    """Bytes a second of a copy (read and written), operations a second of a matrix product."""
    source = torch.randint(256, (bench.scale.copied,), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    seconds = [bench.seconds(lambda: target.copy_(source)) for _ in range(12)][2:]
    cuda = bench.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(bench.device) if cuda else platform.machine(),
        "cuda": torch.version.cuda,
        "bandwidth": 2 * source.numel() / statistics.median(seconds),
        "flops": peak_flops(bench.device, DTYPE),
    }


def measure_recipe(bench: Bench, shape: None) -> dict[str, Any]:
    """Train a recipe with products in bfloat16: does the loss fall, do the weights move, and how
    far apart are the learner's and the sampler's log-probabilities?"""
    changes = [
        *bench.scale.changes,
        f"model.device={bench.device.type}",
        "learner.dtype=bfloat16",
        "sampler={name: in_process, args: {dtype: bfloat16, path: static}}",
        "rl.algorithm={name: grpo, args: {importance_cap: 2}}",
        "checkpoint.every=1000",
    ]
    with tempfile.TemporaryDirectory() as folder:
        seconds = ludus(folder, "train", str(ROOT / bench.scale.recipe), *changes)
        [run] = [path for path in Path(folder, "runs").iterdir() if path.is_dir()]
        lines = list(MetricsLog.read(run / "metrics.jsonl"))
        after_sft, *_, after_rl = sorted((run / "checkpoints").iterdir(), reverse=True)
        weights = [load_file(path / "model.safetensors") for path in (after_sft, after_rl)]
        moved = max(float((weights[0][k] - weights[1][k]).abs().max()) for k in weights[0])
    losses = [line.metrics["train/loss"] for line in lines if line.stage == "sft"]
    gaps = [line.metrics["train/sampler_gap"] for line in lines if line.stage == "rl"]
    sound = losses[-1] < losses[0] and moved > 0 and max(gaps) < MAX_GAP
    return {
        "seconds": seconds,
        "losses": losses,
        "largest_weight_change": moved,
        "sampler_gaps": gaps,
        "trains": sound,
        "note": f"{'trains' if sound else 'DOES NOT TRAIN'}: loss {losses[0]:.2f} to "
        f"{losses[-1]:.2f}, gap {max(gaps):.4f} nats, weights move by {moved:.1g} at most",
    }


def measure_init(bench: Bench, shape: tuple[int, ...]) -> dict[str, Any]:
    """`ludus init --model` with a model of random weights, and the seconds of a few steps of the
    recipe that it writes. Such a model has no success, so RL samples, and trains on nothing."""
    scale = bench.scale
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(bench.model(shape), Path(folder, "model"))
        init = ["init", "babyai", "--tiers", "OpenDoor", "--model", "model", "--minutes", "5"]
        init_s = ludus(folder, *init, "--out", "recipe.yaml")
        recipe = Path(folder, "recipe.yaml").read_text()
        train_s = ludus(folder, "train", "recipe.yaml", "sft.until=null", *scale.after_init)
        [run] = [path for path in Path(folder, "runs").iterdir() if path.is_dir()]
        lines = MetricsLog.read(run / "metrics.jsonl")
    steps = {stage: [x.metrics for x in lines if x.stage == stage] for stage in ("sft", "rl")}
    sft_s, rl_s = (
        statistics.median(metrics["time/step_s"] for metrics in steps[stage][1:])
        for stage in ("sft", "rl")
    )
    return {
        "seconds": init_s,
        "train_s": train_s,
        "sft_step_s": sft_s,
        "rl_step_s": rl_s,
        "losses": [metrics["train/loss"] for metrics in steps["sft"]],
        "recipe": recipe,
        "note": f"a step of SFT {sft_s:.2f} s, of RL {rl_s:.2f} s, `ludus train` {train_s:.0f} s",
    }


def ludus(folder: str, *argv: str) -> float:
    """The seconds of a command. Errors: RuntimeError with the end of what it told."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "ludus", *argv]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-400:])
    return time.perf_counter() - start


def save_pretrained(model: Any, folder: Path) -> None:
    """Save a model with a tokenizer of as many tokens, of which most are fillers."""
    tokenizer = train_tokenizer(Spec(name="bpe"), asyncio.run(openings()), "qwen3")
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    for number in range(len(tokenizer), model.config.vocab_size):
        vocabulary[f"filler{number}"] = number
    path.write_text(json.dumps(content))
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.save_pretrained(folder)


async def openings() -> list[str]:
    """Texts of BabyAI."""
    env, texts = ENVS.build(Spec(name="babyai")), []
    for seed in range(64):
        opening = await env.reset(env.task("OpenDoor", seed))
        texts += [message.content for message in opening.messages]
    return texts


def measure_decode(
    bench: Bench, shape: tuple[int, ...], batch: int, group: int = 1, copied: bool = False
) -> dict[str, Any]:
    """Decode tokens a second of a rollout: one turn after each prompt, `group` of them with the
    same prompt. The limit is that of reading all weights, and each token's keys and values once, at
    every step. The decoder is the GPU's, on a CPU too. `copied`: the sampler's copy of weights in
    float32."""
    scale, model = bench.scale, bench.model(shape).eval()
    sampler = InProcessSampler(
        model.float() if copied else model,
        context_length=scale.prompt + scale.completion,
        path="static",
        dtype="bfloat16" if copied else "auto",
    )
    decoder, config = sampler.decoder, model.config
    assert isinstance(decoder, StaticDecoder)
    generator = torch.Generator().manual_seed(0)
    size = (batch // group, scale.prompt)
    prompts = torch.randint(1, config.vocab_size, size, generator=generator).tolist()
    rows = [prompts[number // group] for number in range(batch)]
    first = bench.seconds(lambda: sample_turns(sampler, rows, scale.completion))
    prefill = bench.median(lambda: sample_turns(sampler, rows, 1))
    whole = bench.median(lambda: sample_turns(sampler, rows, scale.completion))
    kv_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * BYTES
    weight_bytes = sum(p.numel() for p in model.parameters()) * BYTES
    cached = len(prompts) * scale.prompt + batch * scale.completion / 2
    limit = batch * bench.limits["bandwidth"] / (weight_bytes + cached * kv_bytes)
    rate = batch * (scale.completion - 1) / (whole - prefill)
    copying = f"; copying the weights {bench.median(decoder.refresh):.4f} s" if copied else ""
    return {
        "tokens_per_s": rate,
        "limit_tokens_per_s": limit,
        "of_limit": rate / limit,
        "seconds": whole,
        "prefill_s": prefill,
        "first_s": first - whole,
        "decoder": decoder.name,
        "graphs": decoder.num_graphs,
        "memory_gb": bench.memory_gb(),
        "note": f"{decoder.name}; prefill {prefill:.2f} s; first rollout {first - whole:+.1f} s"
        f"{copying}",
    }


def measure_train(
    bench: Bench, shape: tuple[int, ...], layout: Layout, checkpointing: bool = False
) -> dict[str, Any]:
    """An optimizer step on a group with one prompt. Tokens a second are those of all samples; MFU
    counts the computed ones (`tree` computes the prompt once)."""
    scale, model = bench.scale, bench.model(shape)
    samples = train_samples(scale, model.config.vocab_size)
    tokens = sum(len(sample.token_ids) for sample in samples)
    learner = Learner(
        model,
        OptimizerConfig(lr=1e-6),
        1000,
        context_length=scale.train_prompt + scale.train_completion,
        settings=LearnerConfig(gradient_checkpointing=checkpointing),
    )

    def step() -> None:
        weights = trajectory_mean(samples)
        batch = pack(samples, weights, tokens_per_batch=tokens, pad_id=0, layout=layout)
        learner.train_step(batch, clipped(0.2, 0.2))

    step()
    bench.memory_gb()
    seconds = bench.median(step)
    prompt, completion = scale.train_prompt, scale.train_completion
    prompts = 1 if layout == "tree" else scale.train_samples
    sampled = scale.train_samples * completion
    context = prompts * prompt * (prompt + 1) / 2
    context += sampled * prompt + sampled * (completion + 1) / 2
    computed = prompts * prompt + sampled
    flops = 3 * Shape.of(model).forward(computed, sampled, context)
    return {
        "tokens_per_s": tokens / seconds,
        "computed_tokens_per_s": computed / seconds,
        "flops": flops,
        "of_limit": flops / seconds / bench.limits["flops"],
        "seconds": seconds,
        "memory_gb": bench.memory_gb(),
        "note": f"{layout} layout, {learner.forward.attention} attention, "
        f"{computed / seconds:,.0f} computed tokens/s",
    }


def train_samples(scale: Scale, vocab_size: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)

    def ids(num: int) -> list[int]:
        return torch.randint(1, vocab_size, (num,), generator=generator).tolist()

    prompt = ids(scale.train_prompt)
    completions = [ids(scale.train_completion) for _ in range(scale.train_samples)]
    return make_samples([(prompt, completion) for completion in completions], -10.0)


def measure_step(bench: Bench, shape: tuple[int, ...]) -> dict[str, Any]:
    """Steps of GRPO through the loop, one turn an episode: the split of the median step."""
    scale = bench.scale
    work = Work(scale.prompt, scale.completion, groups=scale.groups, group_size=scale.group)
    with tempfile.TemporaryDirectory() as folder:
        budget = max(16384, work.length) if bench.device.type == "cuda" else 1024
        steps = LudusSteps(bench.model(shape), work, Path(folder), tokens_per_batch=budget)
        steps.step()
        bench.memory_gb()
        metrics = sorted(
            (steps.step() for _ in range(scale.repeats)), key=lambda m: m["time/step_s"]
        )[scale.repeats // 2]
    split = {
        name: metrics[f"time/{name}_s"]
        for name in ("rollout", "train", "sample", "env_wait", "idle")
    }
    return {
        "tokens_per_s": work.sampled_tokens / metrics["time/step_s"],
        "seconds": metrics["time/step_s"],
        **{f"{name}_s": value for name, value in split.items()},
        "memory_gb": bench.memory_gb(),
        "note": ", ".join(f"{name} {value:.2f} s" for name, value in split.items()),
    }


class Worker:
    """A process that measures cases; it is replaced after a case that fails, dies or hangs."""

    def __init__(self) -> None:
        self._process: Any = None

    def measure(self, case: Case, bench: Bench, shape: Any, seconds: float) -> dict[str, Any]:
        """Return the case's results, or {"error": the reason}."""
        if seconds < 1:
            return {"error": "no time was left"}
        if self._process is None:
            # CUDA does not survive a fork; elsewhere a fork starts faster.
            method = "spawn" if bench.device.type == "cuda" else "fork"
            context = multiprocessing.get_context(method)
            self._pipe, pipe = context.Pipe()
            self._process = context.Process(target=_serve, args=(pipe,), daemon=True)
            self._process.start()
            pipe.close()
        results: dict[str, Any] = {"error": f"not done after {seconds:.0f} s"}
        try:
            self._pipe.send((case, bench, shape))
            if self._pipe.poll(seconds):
                results = self._pipe.recv()
        except EOFError:
            self._process.join(10)
            results = {"error": f"its process died (exit code {self._process.exitcode})"}
        if "error" in results:
            self.close()
        return results

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


def _serve(pipe: Any) -> None:
    while True:
        case, bench, shape = pipe.recv()
        try:
            results = case.measure(bench, shape, **case.args)
        except BaseException as error:
            results = {"error": f"{type(error).__name__}: {error}"[:500]}
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
        pipe.send(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="tiny models, on the CPU by default")
    parser.add_argument("--device", help="cuda (default), cuda:1, cpu")
    parser.add_argument("--seconds", type=float, help="for all cases together (480; toy: 3600)")
    parser.add_argument("--out", type=Path, help="folder of gpu.json and gpu.md")
    args = parser.parse_args()
    until = time.monotonic() + (args.seconds or (3600 if args.toy else 480))
    device = torch.device(args.device or ("cpu" if args.toy else "cuda"))
    scale, shapes = (TOY_SCALE, TOY) if args.toy else (Scale(), SHAPES)
    folder = args.out or (None if args.toy else RESULTS)
    worker = Worker()

    def run(case: Case, bench: Bench) -> dict[str, Any]:
        seconds = min(case.most_s or scale.case_s, until - time.monotonic())
        return worker.measure(case, bench, shapes.get(case.model), seconds)

    limits = run(Case("limits", "", measure_limits), Bench(scale, device))
    if "error" in limits:
        raise SystemExit(f"{device} cannot be used: {limits['error']}. --toy needs no GPU")
    results: list[dict[str, Any]] = []
    for case in cases(shapes, scale):
        results.append({"case": case.name, "model": case.model})
        results[-1] |= run(case, Bench(scale, device, limits))
        print(json.dumps(results[-1]), flush=True)
        text = page(limits, scale, results)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            facts = {"limits": limits, "scale": asdict(scale), "results": results}
            (folder / "gpu.json").write_text(json.dumps(facts, indent=1) + "\n")
            (folder / "gpu.md").write_text(text)
    worker.close()
    print(text)


def page(limits: dict[str, Any], scale: Scale, results: list[dict[str, Any]]) -> str:
    def cell(name: str, form: str) -> Callable[[dict[str, Any]], str]:
        return lambda result: "" if result.get(name) is None else format(result[name], form)

    table = tabulate(
        results,
        ("case", lambda result: result["case"]),
        ("model", lambda result: result["model"]),
        ("tokens/s", cell("tokens_per_s", ",.0f")),
        ("of the limit", cell("of_limit", ".1%")),
        ("seconds", cell("seconds", ".2f")),
        ("GB", cell("memory_gb", ".1f")),
        ("notes", lambda result: result.get("note") or f"failed: {result['error']}"),
    )
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return f"""# On a GPU

{limits["device"]}; CUDA {limits["cuda"]}; {versions}; Python {platform.python_version()}. Measured
in the same run: a copy moves {limits["bandwidth"] / 1e9:,.0f} GB/s, a matrix product in bfloat16
does {limits["flops"] / 1e12:,.1f} TFLOP/s. Random weights in bfloat16. Medians of {scale.repeats}.

{table}

- decode: prompts of {scale.prompt} tokens, {scale.completion} sampled after each; with shared
  prompts, {scale.group} episodes have the same one. Rates leave out the prefill. The limit is the
  bandwidth: all weights, and each token's keys and values once, are read at every step. The first
  rollout also captures graphs.
- train: an optimizer step on {scale.train_samples} samples with one prompt, {scale.train_prompt} +
  {scale.train_completion} tokens. The limit is the matrix product's rate (MFU of the computed
  tokens).
- init: seconds of `ludus init babyai --tiers OpenDoor --model FOLDER`, a folder of random weights.
- GRPO step: {scale.groups} groups of {scale.group}, {scale.prompt} + {scale.completion} tokens.
  Rates are those of sampled tokens.

Command: `python benchmarks/gpu.py`. Raw figures: [gpu.json](gpu.json).
"""


if __name__ == "__main__":
    main()
