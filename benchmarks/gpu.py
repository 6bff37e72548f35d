"""Sampling, training and a GRPO step on a GPU, against what the device could do at most.

    python benchmarks/gpu.py                  # half an hour at most; nothing is downloaded
    python benchmarks/gpu.py --toy            # tiny models, seconds, also without a GPU

Models have the shapes of Qwen3-0.6B, 1.7B and 4B, and random weights in bfloat16. Each part runs in
a process of its own: one that fails, runs out of memory or takes too long is recorded as such, and
the others go on.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import asyncio
import json
import multiprocessing
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, table
from fixed import LudusSteps, Work
from transformers import Qwen3Config, Qwen3ForCausalLM

from ludus.config.schema import LearnerConfig, OptimizerConfig
from ludus.core.types import Sample
from ludus.models.decoders.static import StaticDecoder
from ludus.models.flops import Shape, peak_flops
from ludus.models.samplers.base import SamplingParams
from ludus.models.samplers.engine import InProcessSampler
from ludus.train.algorithms.aggregates import trajectory_mean
from ludus.train.algorithms.losses import clipped
from ludus.train.learner import Learner
from ludus.train.packing import Layout, pack

DTYPE = torch.bfloat16
BYTES = 2
COMMON = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151_936,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": COMMON
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "1.7B": COMMON
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "4B": COMMON
    | {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
}
TOY: dict[str, dict[str, Any]] = {
    "toy": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 1024,
    }
}


@dataclass(frozen=True)
class Scale:
    """How much of everything. `prompt` and `completion` are tokens of an episode."""

    batch: int = 256
    prompt: int = 1024
    completion: int = 256
    group: int = 16
    train_samples: int = 8
    train_prompt: int = 1024
    train_completion: int = 1024
    groups: int = 16
    copied: int = 1 << 30
    repeats: int = 3


TOY_SCALE = Scale(8, 16, 8, 4, 4, 16, 16, groups=2, copied=1 << 22, repeats=2)


@dataclass(frozen=True)
class Part:
    """What a measurement is given."""

    shape: dict[str, Any]
    scale: Scale
    device: torch.device
    limits: dict[str, Any]

    def model(self) -> Any:
        """Random weights, made where they are used."""
        torch.manual_seed(0)
        config = Qwen3Config(
            **self.shape,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            attn_implementation="sdpa",
            dtype=DTYPE,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=None,
        )
        before = torch.get_default_dtype()
        torch.set_default_dtype(DTYPE)
        try:
            with self.device:
                return Qwen3ForCausalLM(config)
        finally:
            torch.set_default_dtype(before)

    def seconds(self, work: Callable[[], Any]) -> float:
        """Wall time until the device is done, too."""
        self.wait()
        start = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - start

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def memory_gb(self) -> float | None:
        """The most allocated since the last call."""
        if self.device.type != "cuda":
            return None
        peak = torch.cuda.max_memory_allocated(self.device) / 1e9
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak


def measure_limits(part: Part) -> dict[str, Any]:
    """Bytes a second of a copy (read and written), operations a second of a matrix product."""
    source = torch.ones(part.scale.copied, dtype=torch.uint8, device=part.device)
    target = torch.empty_like(source)
    fastest = min(part.seconds(lambda: target.copy_(source)) for _ in range(10))
    cuda = part.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(part.device) if cuda else platform.machine(),
        "memory_gb": torch.cuda.get_device_properties(part.device).total_memory / 1e9
        if cuda
        else None,
        "cuda": torch.version.cuda,
        "bandwidth": 2 * source.numel() / fastest,
        "flops": peak_flops(part.device, DTYPE),
    }


def measure_decode(part: Part) -> dict[str, Any]:
    """Tokens a second after the prompts, without and with prompts that a group shares; the limit
    is that of reading all weights, and each token's keys and values once, at every step.

    The path is the GPU's, on a CPU too. `first_s` is what a rollout takes longer when its graphs
    are not captured yet."""
    scale, model = part.scale, part.model().eval()
    sampler = InProcessSampler(model, context_length=scale.prompt + scale.completion, path="static")
    decoder = sampler.decoder
    assert isinstance(decoder, StaticDecoder)
    config = model.config
    kv_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * BYTES
    weight_bytes = sum(p.numel() for p in model.parameters()) * BYTES
    found: dict[str, Any] = {"decoder": decoder.name}
    for name, group in (("alone", 1), ("shared", scale.group)):
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(
            1, config.vocab_size, (scale.batch // group, scale.prompt), generator=generator
        ).tolist()
        rows = [prompts[number // group] for number in range(scale.batch)]
        unwarmed = part.seconds(lambda rows=rows: play(sampler, rows, scale.completion))
        first = part.seconds(lambda rows=rows: play(sampler, rows, 1))
        whole = part.seconds(lambda rows=rows: play(sampler, rows, scale.completion))
        cached = len(prompts) * scale.prompt + scale.batch * scale.completion / 2
        limit = scale.batch * part.limits["bandwidth"] / (weight_bytes + cached * kv_bytes)
        rate = scale.batch * (scale.completion - 1) / (whole - first)
        found[name] = {
            "tokens_per_s": rate,
            "limit_tokens_per_s": limit,
            "of_limit": rate / limit,
            "prefill_s": first,
            "first_s": unwarmed - whole,
            "graphs": decoder.num_graphs,
            "memory_gb": part.memory_gb(),
        }
    return found


def play(sampler: InProcessSampler, prompts: list[list[int]], max_tokens: int) -> None:
    """One turn after each prompt, all at once."""

    async def episode(number: int) -> None:
        name = f"{number:05d}"
        try:
            params = SamplingParams(max_tokens=max_tokens, seed=number)
            await sampler.sample(prompts[number], params, session=name)
        finally:
            sampler.close(name)

    async def everyone() -> None:
        for number in range(len(prompts)):
            sampler.open(f"{number:05d}")
        await asyncio.gather(*[episode(number) for number in range(len(prompts))])

    asyncio.run(everyone())


def measure_train(part: Part) -> dict[str, Any]:
    """An optimizer step on a group that shares its prompt, laid out in several ways."""
    model = part.model()
    layouts: list[tuple[str, Layout, bool]] = [
        ("a sample a row", "single", False),
        ("tree", "tree", False),
        ("tree, checkpointed", "tree", True),
    ]
    found: dict[str, Any] = {}
    for name, layout, checkpointed in layouts:
        try:
            found[name] = train(part, model, layout, checkpointed)
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
        if part.device.type == "cuda":
            torch.cuda.empty_cache()
        model.zero_grad(set_to_none=True)
    return found


def train(part: Part, model: Any, layout: Layout, checkpointed: bool) -> dict[str, Any]:
    """Tokens a second (those of all samples), and model FLOPs of those computed."""
    scale = part.scale
    samples = train_samples(scale, model.config.vocab_size)
    tokens = sum(len(sample.token_ids) for sample in samples)
    learner = Learner(
        model,
        OptimizerConfig(lr=1e-6),
        1000,
        context_length=scale.train_prompt + scale.train_completion,
        settings=LearnerConfig(gradient_checkpointing=checkpointed),
    )
    loss = clipped(0.2, 0.2)

    def step() -> None:
        weights = trajectory_mean(samples)
        batch = pack(samples, weights, tokens_per_batch=tokens, pad_id=0, layout=layout)
        learner.train_step(batch, loss)

    step()
    part.memory_gb()
    seconds = min(part.seconds(step) for _ in range(scale.repeats))
    prompts = 1 if layout == "tree" else scale.train_samples
    prompt, completion = scale.train_prompt, scale.train_completion
    answered = scale.train_samples * completion
    context = prompts * prompt * (prompt + 1) / 2
    context += answered * prompt + answered * (completion + 1) / 2
    computed = prompts * prompt + answered
    flops = 3 * Shape.of(model).forward(computed, answered, context)
    return {
        "attention": learner.forward.attention,
        "tokens_per_s": tokens / seconds,
        "computed_tokens_per_s": computed / seconds,
        "mfu": flops / seconds / part.limits["flops"],
        "step_s": seconds,
        "memory_gb": part.memory_gb(),
    }


def train_samples(scale: Scale, vocab_size: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)

    def ids(num: int) -> list[int]:
        return torch.randint(1, vocab_size, (num,), generator=generator).tolist()

    prompt = ids(scale.train_prompt)
    mask = [False] * scale.train_prompt + [True] * scale.train_completion
    return [
        Sample(
            prompt + ids(scale.train_completion),
            mask,
            [-10.0 * trains for trains in mask],
            [(-1.0) ** number * trains for trains in mask],
            f"{number}",
        )
        for number in range(scale.train_samples)
    ]


def measure_step(part: Part) -> dict[str, Any]:
    """Steps of GRPO through the loop, one turn an episode; the seconds of the fastest."""
    scale = part.scale
    work = Work(scale.prompt, scale.completion, groups=scale.groups, group_size=scale.group)
    with tempfile.TemporaryDirectory() as folder:
        budget = max(16384, work.length) if part.device.type == "cuda" else 1024
        steps = LudusSteps(part.model(), work, Path(folder), tokens_per_batch=budget)
        steps.step()
        part.memory_gb()
        found = min((steps.step() for _ in range(scale.repeats)), key=lambda m: m["time/step_s"])
    times = ("step", "rollout", "train", "sample", "env_wait", "idle")
    return {
        "samples": work.samples,
        "sampled_tokens": work.sampled_tokens,
        **{f"{name}_s": found[f"time/{name}_s"] for name in times},
        "memory_gb": part.memory_gb(),
    }


PARTS: dict[str, Callable[[Part], dict[str, Any]]] = {
    "decode": measure_decode,
    "train": measure_train,
    "step": measure_step,
}


def guarded(
    measure: Callable[[Part], dict[str, Any]], part: Part, seconds: float
) -> dict[str, Any]:
    """The measurement's result, from a process of its own, or {"error": why there is none}."""
    if seconds < 1:
        return {"error": "no time was left"}
    # CUDA does not survive a fork; elsewhere parts start faster with one.
    context = multiprocessing.get_context("spawn" if part.device.type == "cuda" else "fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(measure, part, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if receiver.poll(seconds):
            found: dict[str, Any] = receiver.recv()
            return found
        return {"error": f"not done after {seconds:.0f} s"}
    except EOFError:
        process.join(10)
        return {"error": f"its process died (exit code {process.exitcode})"}
    finally:
        process.kill()
        process.join()


def _answer(measure: Callable[[Part], dict[str, Any]], part: Part, sender: Any) -> None:
    try:
        found = measure(part)
    except BaseException as error:
        found = {"error": f"{type(error).__name__}: {error}"[:500]}
    sender.send(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="tiny models, on the CPU by default")
    parser.add_argument("--device", help="cuda (default), cuda:1, cpu")
    parser.add_argument("--minutes", type=float, default=30, help="time for all parts together")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--out", type=Path, help="folder of gpu.json and gpu.md")
    args = parser.parse_args()
    until = time.monotonic() + 60 * args.minutes
    device = torch.device(args.device or ("cpu" if args.toy else "cuda"))
    scale = TOY_SCALE if args.toy else Scale()
    shapes = TOY if args.toy else {name: SHAPES[name] for name in args.shapes}

    def run(measure: Callable[[Part], dict[str, Any]], shape: dict[str, Any], share: float) -> Any:
        part = Part(shape, scale, device, limits)
        return guarded(measure, part, (until - time.monotonic()) * share)

    limits: dict[str, Any] = {}
    limits = run(measure_limits, {}, 1)
    if "error" in limits:
        raise SystemExit(f"{device} cannot be used: {limits['error']}. --toy needs no GPU")
    print(f"{limits['device']}: {limits['bandwidth'] / 1e9:,.0f} GB/s", flush=True)
    results: dict[str, dict[str, Any]] = {}
    left = len(shapes) * len(PARTS)
    for shape_name, shape in shapes.items():
        results[shape_name] = {}
        for part_name, measure in PARTS.items():
            # What a part does not use is the others'; none may take more than half of the rest.
            found = run(measure, shape, min(1.0, max(0.5, 1 / left)))
            left -= 1
            results[shape_name][part_name] = found
            print(shape_name, part_name, json.dumps(found), flush=True)
            write(args.out or (None if args.toy else RESULTS), limits, scale, results)


def write(
    folder: Path | None, limits: dict[str, Any], scale: Scale, results: dict[str, dict[str, Any]]
) -> None:
    """gpu.json and gpu.md, after each part: what is done stays."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    versions = {name: version(name) for name in ("torch", "transformers")}
    versions["python"] = platform.python_version()
    facts = {"limits": limits, "versions": versions, "scale": scale.__dict__, "results": results}
    (folder / "gpu.json").write_text(json.dumps(facts, indent=1) + "\n")
    (folder / "gpu.md").write_text(page(limits, versions, scale, results))


def page(
    limits: dict[str, Any],
    versions: dict[str, str],
    scale: Scale,
    results: dict[str, dict[str, Any]],
) -> str:
    rows: dict[str, list[list[str]]] = {name: [] for name in PARTS}
    errors: list[str] = []
    for shape, parts in results.items():
        for name, found in parts.items():
            if "error" in found:
                errors.append(f"{shape}, {name}: {found['error']}")
            elif name == "step":
                times = ("step", "rollout", "train", "sample", "env_wait", "idle")
                rows[name].append([shape, *(f"{found[f'{part}_s']:.2f}" for part in times)])
            else:
                for kind, values in found.items():
                    if not isinstance(values, dict):
                        continue
                    if "error" in values:
                        errors.append(f"{shape}, {name}, {kind}: {values['error']}")
                    elif name == "decode":
                        rows[name].append(decode_row(shape, kind, values))
                    else:
                        rows[name].append(train_row(shape, kind, values))
    heads = {
        "decode": [
            "model",
            "prompts",
            "tokens/s",
            "limit, tokens/s",
            "of the limit",
            "prefill, s",
            "first rollout, s more",
        ],
        "train": ["model", "layout", "attention", "tokens/s", "computed tokens/s", "MFU", "GB"],
        "step": [
            "model",
            "step, s",
            "rollout",
            "training",
            "of it sampling",
            "environment",
            "idle",
        ],
    }
    memory = f", {limits['memory_gb']:.0f} GB" if limits["memory_gb"] else ""
    told = ", ".join(f"{name} {value}" for name, value in versions.items())
    failed = "\n".join(f"- {error}" for error in errors) or "Nothing."
    return f"""# On a GPU

{limits["device"]}{memory}; CUDA {limits["cuda"]}; {told}. Measured in the same run: a copy moves
{limits["bandwidth"] / 1e9:,.0f} GB/s, a matrix product in bfloat16 does
{limits["flops"] / 1e12:,.1f} TFLOP/s. Random weights in bfloat16.

## Sampling

{scale.batch} episodes at once, a prompt of {scale.prompt} tokens, {scale.completion} sampled;
*shared*: {scale.group} have the same prompt. The limit is that of reading all weights, and each
token's keys and values once, at every step. Rates are those after the prompts, of a rollout after
the first, which also captures graphs.

{table(heads["decode"], rows["decode"])}

## Training

An optimizer step on {scale.train_samples} samples that share a prompt: {scale.train_prompt} +
{scale.train_completion} tokens. Tokens a second are those of all samples; MFU counts computed ones.

{table(heads["train"], rows["train"])}

## A GRPO step

{scale.groups} groups of {scale.group}, {scale.prompt} + {scale.completion} tokens.

{table(heads["step"], rows["step"])}

## What failed

{failed}

    python benchmarks/gpu.py

Raw figures: [gpu.json](gpu.json).
"""


def decode_row(shape: str, kind: str, found: dict[str, Any]) -> list[str]:
    rates = [f"{found[name]:,.0f}" for name in ("tokens_per_s", "limit_tokens_per_s")]
    seconds = [f"{found[name]:.2f}" for name in ("prefill_s", "first_s")]
    return [shape, kind, *rates, f"{found['of_limit']:.1%}", *seconds]


def train_row(shape: str, kind: str, found: dict[str, Any]) -> list[str]:
    rates = [f"{found[name]:,.0f}" for name in ("tokens_per_s", "computed_tokens_per_s")]
    memory = "" if found["memory_gb"] is None else f"{found['memory_gb']:.1f}"
    return [shape, kind, found["attention"], *rates, f"{found['mfu']:.1%}", memory]


if __name__ == "__main__":
    main()
