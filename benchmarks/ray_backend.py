"""The back end `ray` beside `local`: start, overhead of a step, weights of 0.6B, calls, deaths.

    python benchmarks/ray_backend.py [--only steps,sync,calls,faults] [--rounds 3] [--samplers 1]

Steps: `ludus train recipes/babyai-tiny.yaml` with both back ends in turn; median step of each run.
Sync: one learner rank and samplers with a model of the shape of Qwen3-0.6B, random weights; by the
object store and by broadcast in turn.
Calls: of an actor that does nothing, by Ray alone and in batches.
Faults: an actor is killed; seconds until the death is seen, and until work goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "babyai-tiny.yaml"
SHORT = ("sft.steps=10", "rl.steps=16", "demonstrations.num_episodes=320", "report=false")
SHORT += ("evaluate.num_tasks=16", "evaluate.every=0", "rl.group_size=16")
RAY = ("backend.name=ray", "backend.args.cpus=0.5")
FIRST_ROLLOUT_S = 20.0
"""Seconds before the first publication, which a run spends with its first rollouts."""
TWO = (
    *RAY,
    "backend.args.learner_ranks=2",
    "backend.args.samplers=2",
    "backend.args.env_workers=2",
)
KINDS = {
    "local, two threads": ("threads=2",),
    "local, one thread": ("threads=1",),
    "ray, 1 rank, 1 sampler, 0 workers": (*RAY, "threads=1"),
    "ray, 2 ranks, 2 samplers, 2 workers": (*TWO, "threads=1"),
}


def train(folder: Path, name: str, changes: tuple[str, ...]) -> dict[str, float]:
    """Medians of the metrics of the RL steps of a run, without the first three; seconds in all."""
    command = [sys.executable, "-m", "ludus", "train", str(RECIPE), f"runs_dir={folder}"]
    began = time.perf_counter()
    done = subprocess.run(
        [*command, f"name={name}", *SHORT, *changes], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    lines = map(json.loads, (folder / f"{name}-1" / "metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if line["stage"] == "rl"][3:]
    names = {key for line in steps for key in line if key.startswith(("time/", "rollout/reward"))}
    medians = {n: statistics.median(line.get(n, 0.0) for line in steps) for n in names}
    return {**medians, "total_s": time.perf_counter() - began}


def steps(rounds: int) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="ludus-ray-") as folder:
        for number in range(rounds):
            for place, (kind, changes) in enumerate(KINDS.items()):
                found = train(Path(folder), f"r{number}k{place}", changes)
                rows.append({"round": number, "kind": kind, **found})
                print(number, kind, {k: round(v, 3) for k, v in found.items()}, flush=True)
    return rows


def large_model(folder: Path) -> dict[str, Any]:
    """Write a model of the shape of Qwen3-0.6B with random weights in bfloat16."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from ludus.core.types import Spec
    from ludus.models.chat.tokenizers import train_tokenizer

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    config = Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        dtype=torch.bfloat16,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    torch.set_default_dtype(torch.float32)
    train_tokenizer(Spec(name="words"), ["go left", "go right"]).save_pretrained(folder)
    return {
        "path": str(folder),
        "dtype": "bfloat16",
        "context_length": 64,
        "chat_template": "plain",
    }


async def sync(repeats: int, samplers: int, first: str) -> dict[str, Any]:
    """Seconds of publications of 0.6B weights by each transport, by turns, from `first` on."""
    from ludus.backends import BACKENDS
    from ludus.backends.conformance import GRPO, SETTINGS, tiny_context
    from ludus.core.types import Spec
    from ludus.models.chat.renderer import Renderer
    from ludus.models.chat.tokenizers import load_tokenizer

    with tempfile.TemporaryDirectory(prefix="ludus-ray-") as name:
        folder = Path(name)
        model = large_model(folder / "model")
        rollout = {"max_tokens_per_turn": 8, "deterministic": False}
        built = tiny_context(folder, model=model, rollout=rollout)
        built["renderer"] = Renderer(load_tokenizer(model["path"]))
        began = time.perf_counter()
        args = {"cpus": 0.5, "samplers": samplers, "weights": "broadcast"}
        backend: Any = BACKENDS.build(Spec(name="ray", args=args), "backend", **built)
        started = time.perf_counter() - began
        backend.begin_stage(SETTINGS, GRPO)
        backend.learners.actors[0].touch_store.remote(backend._bucket_bytes)  # as without broadcast
        await asyncio.sleep(FIRST_ROLLOUT_S)
        publisher = backend._publisher
        kinds = {"broadcast": publisher._broadcasts, "object_store": None}
        order = sorted(kinds, key=lambda kind: kind != first)
        rows: list[dict[str, Any]] = []
        for _ in range(repeats):
            for kind in order:
                publisher._broadcasts = kinds[kind]
                began = time.perf_counter()
                await backend.publish_weights()
                spent = {"total_s": time.perf_counter() - began, **backend.sampler.publication}
                print(kind, {key: round(value, 3) for key, value in spent.items()}, flush=True)
                rows.append({"kind": kind, **spent})
        backend.close()
    return {"start_s": started, "samplers": samplers, "publications": rows}


async def calls(repeats: int) -> list[dict[str, Any]]:
    """Calls of an actor that does next to nothing, by Ray alone and through a channel, by turns:
    milliseconds a call, and those in which the driver's process computes."""
    import ray

    from ludus.backends.ray.channel import Channel
    from ludus.backends.ray.station import Station, Stationed

    class Doubler(Stationed):
        """An actor whose calls come through a station."""

        def __init__(self) -> None:
            self._station = Station(self)

        async def double(self, value: int) -> int:
            return 2 * value

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    actor: Any = ray.remote(Doubler).options(max_concurrency=1000).remote()  # type: ignore[attr-defined]
    channel = Channel(actor, "the doubler")
    kinds = {
        "Ray's calls": lambda value: actor.double.remote(value),
        "channel": lambda value: channel.call("double", value),
    }
    rows = []

    async def play(kind: str, rounds: int) -> None:
        for value in range(rounds):
            assert await kinds[kind](value) == 2 * value

    for number in range(repeats):
        for concurrent in (1, 16, 256):
            for kind in kinds:
                rounds = max(8, 1024 // concurrent)
                await asyncio.gather(*(play(kind, 2) for _ in range(concurrent)))
                began, cpu = time.perf_counter(), time.process_time()
                await asyncio.gather(*(play(kind, rounds) for _ in range(concurrent)))
                count = rounds * concurrent / 1e3
                row = {
                    "kind": kind,
                    "concurrent": concurrent,
                    "ms": (time.perf_counter() - began) / count,
                    "driver_cpu_ms": (time.process_time() - cpu) / count,
                }
                rows.append(row)
                print(number, row, flush=True)
    ray.shutdown()  # type: ignore[no-untyped-call]
    return rows


async def faults(repeats: int) -> list[dict[str, Any]]:
    """Kill an actor of each kind: seconds until it is seen, and until the interrupted call is
    complete, beside the call without a death."""
    import ray

    from ludus.backends import BACKENDS
    from ludus.backends.conformance import GRPO, SETTINGS, rewarded, tiny_context, turns
    from ludus.backends.ray import channel, learner_group
    from ludus.core.types import Spec

    rows = []
    with tempfile.TemporaryDirectory(prefix="ludus-ray-") as name:
        spec = Spec(name="ray", args={"cpus": 0.5, "learner_ranks": 2, "samplers": 2})
        began = time.perf_counter()
        backend: Any = BACKENDS.build(spec, "backend", **tiny_context(Path(name)))
        print("start", round(time.perf_counter() - began, 2), flush=True)
        backend.begin_stage(SETTINGS, GRPO)
        done = await turns(backend, 32, 40)
        samples = rewarded(done)
        seen: list[float] = []
        for kind, place in ((channel.Channel, "fail"), (learner_group.LearnerGroup, "_recover")):
            original = getattr(kind, place)

            def noted(self: Any, lost: Any, original: Any = original) -> Any:
                seen.append(time.perf_counter())
                return original(self, lost)

            setattr(kind, place, noted)
        calls: dict[str, Any] = {
            "a sampler": (
                lambda: turns(backend, 32, 40),
                lambda: backend.sampler.replicas[0].channel.actor,
            ),
            "a learner rank": (
                lambda: backend.train(samples, GRPO),
                lambda: backend.learners.actors[1],
            ),
        }
        for number in range(repeats):
            for kind, (call, victim) in calls.items():
                await call()
                began = time.perf_counter()
                await call()
                calm = time.perf_counter() - began
                pid = int(ray.get(victim().facts.remote())["pid"])
                seen.clear()
                task = asyncio.create_task(call())
                await asyncio.sleep(0)
                os.kill(pid, signal.SIGKILL)
                killed = time.perf_counter()
                await task
                row = {
                    "kind": kind,
                    "seen_s": seen[0] - killed if seen else None,
                    "complete_s": time.perf_counter() - killed,
                    "calm_s": calm,
                }
                while not all(replica.alive for replica in backend.sampler.replicas):
                    await asyncio.sleep(0.05)
                row["replaced_s"] = time.perf_counter() - killed
                rows.append(row)
                print(number, row, flush=True)
        backend.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="steps,sync,calls,faults")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samplers", type=int, default=1)
    parser.add_argument("--first", choices=("object_store", "broadcast"), default="object_store")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks" / "ray.json")
    arguments = parser.parse_args()
    parts = arguments.only.split(",")
    found = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    if "steps" in parts:
        found["steps"] = steps(arguments.rounds)
    if "sync" in parts:
        found["sync"] = asyncio.run(sync(2 * arguments.rounds, arguments.samplers, arguments.first))
    if "calls" in parts:
        found["calls"] = asyncio.run(calls(arguments.rounds))
    if "faults" in parts:
        found["faults"] = asyncio.run(faults(arguments.rounds))
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
