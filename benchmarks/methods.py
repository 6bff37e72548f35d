"""SFT and PPO: ludus against TRL's `SFTTrainer`, and against a tuned transformers loop of PPO.

    python benchmarks/methods.py

SFT: an optimizer step on 32 conversations, the same in each step; loss on the assistant's turns
only. TRL has the tokens and labels ready, ludus has trajectories. Before the measurement, the
losses of the first step are compared.

PPO: the training half of a step: values of 64 trajectories, advantages (GAE), then two optimizer
steps on half of the trajectories each. TRL 1.16 has no trainer of PPO. The peer is a loop on
transformers: rows sorted by length, no mask, logits and values of the sampled tokens only, GAE
along a tensor of all trajectories. Before the measurement, the losses of its first optimizer step
are compared. Each trajectory has a prompt of its own, so ludus shares no prefix.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import math
import random
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common import Spread, arguments, clock, machine, make_model, ratios, tabulate, write

import torch  # isort: skip - after common, which sets the threads' policy
from datasets import Dataset
from fixed import make_tokenizer
from torch import Tensor
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from ludus.backends.local import LocalBackend
from ludus.config.schema import OptimizerConfig, RunConfig
from ludus.core.types import Group, Segment, Task, Trajectory
from ludus.models.chat.renderer import Renderer
from ludus.train import ALGORITHMS
from ludus.train.batches.minibatches import TrainSettings
from ludus.train.batches.samples import to_samples

CONVERSATIONS, EPISODES, MINIBATCHES = 32, 64, 2
MICRO_BATCHES = (32, 16, 8, 4, 2)
"""Conversations, or episodes, of one forward pass that a peer is tried with."""
TURN, OBSERVATION = 16, 12
LR, CRITIC_LR = 1e-6, 1e-3
Lengths = list[tuple[int, int]]
"""Tokens of the prompt, and number of turns, of each trajectory."""


def equal(count: int) -> Lengths:
    return [(64, 8)] * count


def heavy_tail(count: int) -> Lengths:
    """1 to 24 turns after prompts of 16 to 256 tokens."""
    rng = random.Random(0)

    def draw(median: float, low: int, high: int) -> int:
        return min(max(int(median * math.exp(0.9 * rng.gauss(0, 1))), low), high)

    return [(draw(64, 16, 256), draw(5, 1, 24)) for _ in range(count)]


WORKS: dict[str, Callable[[int], Lengths]] = {
    "64 + 8 turns of 16, 12 between": equal,
    "heavy tail": heavy_tail,
}
MODELS = ("0.9 M", "5.8 M")


def trajectories(lengths: Lengths, vocab_size: int, sampled: bool) -> list[Trajectory]:
    """Random tokens; with `sampled`, log-probabilities of a policy and a reward."""
    rng = random.Random(0)
    made = []
    for number, (prompt, turns) in enumerate(lengths):
        segments: list[Segment] = []
        for turn in range(turns):
            given = OBSERVATION if turn else prompt
            for count, own in ((given, False), (TURN, True)):
                ids = [rng.randrange(1, vocab_size) for _ in range(count)]
                old = -math.log(vocab_size) if sampled else 0.0
                segments.append(
                    Segment(
                        len(segments) - 1,
                        ids,
                        [old] * count if own else None,
                        policy_version=0 if own and sampled else None,
                    )
                )
        name = f"t{number:03d}"
        made.append(Trajectory(name, name, name, segments, reward=rng.random()))
    return made


class Ludus:
    """Steps of ludus's back end on the same trajectories.

    Args:
        algorithm: sft or ppo.
    """

    def __init__(
        self, model: Any, played: list[Trajectory], algorithm: str, half: bool, folder: Path
    ) -> None:
        renderer = Renderer(make_tokenizer(model.config.vocab_size))
        precision = {"learner": {"dtype": "bfloat16"}} if half else {}
        config = RunConfig.model_validate(
            {
                "model": {"architecture": "qwen3", "tokenizer": "words", "context_length": 1024},
                "env": "fixed:FixedEnv",
                "tasks": {"train": "env"},
                **precision,
            }
        )
        self.backend = LocalBackend(lambda: model, renderer, config, folder)
        torch.use_deterministic_algorithms(False)  # the peer need not pay for it
        self.algorithm = ALGORITHMS.build(algorithm)
        steps = MINIBATCHES if algorithm == "ppo" else 1
        optimizer = OptimizerConfig(lr=LR)
        self.backend.begin_stage(
            TrainSettings(algorithm, 10_000, optimizer, 8192, minibatches=steps), self.algorithm
        )
        self.groups = [Group(t.id, Task(id=t.task_id), [t]) for t in played]
        self.parts: list[float] = []

    def step(self) -> float:
        """The mean loss of the step."""
        return asyncio.run(self._step())

    async def _step(self) -> float:
        screening = self.algorithm.screen(self.groups)
        scored = await self.backend.score(screening.groups, self.algorithm)
        samples = to_samples(self.algorithm.credit(scored))
        return (await self.backend.train(samples, self.algorithm))["train/loss"]


class Watch(TrainerCallback):
    """Seconds of TRL's steps; `then` runs after each step, outside of its time."""

    def __init__(self, then: Callable[[], None]) -> None:
        self.then, self.seconds, self.losses = then, list[float](), list[float]()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.started = clock()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(clock() - self.started)
        self.then()

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])


def train_trl(
    model_name: str,
    played: list[Trajectory],
    half: bool,
    micro_batch: int,
    steps: int,
    then: Callable[[], None] = lambda: None,
    *,
    told: bool = False,
) -> Watch:
    """TRL's steps. An epoch has the conversations of one step, grouped by length.

    Args:
        told: log losses.
    """
    model = make_model(model_name)
    rows = []
    for t in played:
        ids, labels = list[int](), list[int]()
        for segment in t.segments:
            ids += segment.token_ids
            labels += segment.token_ids if segment.sampled else [-100] * len(segment.token_ids)
        rows.append({"input_ids": ids, "labels": labels, "length": len(ids)})
    watch = Watch(then)
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(
                output_dir=folder,
                optim="adamw_torch_fused",
                use_cpu=True,
                bf16=half,
                gradient_checkpointing=False,
                per_device_train_batch_size=micro_batch,
                gradient_accumulation_steps=CONVERSATIONS // micro_batch,
                max_steps=steps,
                max_length=None,
                train_sampling_strategy="group_by_length",
                learning_rate=LR,
                weight_decay=0.0,
                lr_scheduler_type="constant",
                logging_strategy="steps" if told else "no",
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=make_tokenizer(model.config.vocab_size),
            callbacks=[watch],
        )
        trainer.train()
    return watch


class TunedPPO:
    """The peer of PPO: a critic on the policy's hidden states, and ludus's losses.

    Args:
        micro_batch: rows of a forward pass.
    """

    def __init__(
        self, model: Any, played: Sequence[Trajectory], micro_batch: int, half: bool
    ) -> None:
        self.model, self.half, self.micro_batch = model.train(), half, micro_batch
        self.head = torch.nn.Linear(model.config.hidden_size, 1)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=LR, betas=OptimizerConfig().betas, weight_decay=0.0, fused=True
        )
        self.head_optimizer = torch.optim.Adam(self.head.parameters(), lr=CRITIC_LR)
        self.played = sorted(played, key=lambda t: len(t.token_ids()))
        self.losses: list[float] = []

    def step(self) -> None:
        values, old, advantages, returns = self.prepare()
        scale = advantages.var(unbiased=False).clamp_min(1e-8).rsqrt()
        advantages = (advantages - advantages.mean()) * scale
        counts = [t.num_sampled_tokens for t in self.played]
        starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
        columns = (values, old, advantages, returns)
        for rows in self.minibatches():
            total = sum(counts[i] for i in rows)
            self.optimizer.zero_grad(set_to_none=True)
            self.head_optimizer.zero_grad(set_to_none=True)
            summed = 0.0
            for chunk in self.chunks(rows):
                part = [torch.cat([c[starts[i] : starts[i + 1]] for i in chunk]) for c in columns]
                summed += self.backward(chunk, part, total)
            parameters = [*self.model.parameters(), *self.head.parameters()]
            torch.nn.utils.clip_grad_norm_(parameters, OptimizerConfig().max_grad_norm)
            self.optimizer.step()
            self.head_optimizer.step()
            self.losses.append(summed)

    def minibatches(self) -> list[list[int]]:
        """Every second trajectory, so that both have all lengths."""
        return [list(range(i, len(self.played), MINIBATCHES)) for i in range(MINIBATCHES)]

    def chunks(self, rows: Sequence[int]) -> list[Sequence[int]]:
        return [rows[i : i + self.micro_batch] for i in range(0, len(rows), self.micro_batch)]

    def hidden(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Hidden states before each sampled token, row by row, and the tokens."""
        ids = [self.played[i].token_ids() for i in rows]
        width = max(map(len, ids))
        padded = torch.tensor([row + [0] * (width - len(row)) for row in ids])
        mask = torch.zeros_like(padded, dtype=torch.bool)
        for place, i in enumerate(rows):
            at = 0
            for segment in self.played[i].segments:
                mask[place, at : at + len(segment.token_ids)] = segment.sampled
                at += len(segment.token_ids)
        states = self.model.model(input_ids=padded, use_cache=False).last_hidden_state
        return states[:, :-1][mask[:, 1:]], padded[:, 1:][mask[:, 1:]]

    @torch.no_grad()
    def prepare(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Values, old log-probabilities, advantages and returns of all sampled tokens."""
        parts = []
        for rows in self.chunks(range(len(self.played))):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.half):
                states, _ = self.hidden(rows)
            parts.append(self.head(states.float())[:, 0])
        values = torch.cat(parts)
        split = values.split([t.num_sampled_tokens for t in self.played])
        width = max(map(len, split))
        # Right-aligned, so that all trajectories end in the same column.
        V = torch.stack([torch.cat([torch.zeros(width - len(v)), v]) for v in split])
        rewards = torch.zeros_like(V)
        rewards[:, -1] = torch.tensor([t.reward or 0.0 for t in self.played])
        A, to_go, after = torch.zeros_like(V), torch.zeros(len(V)), torch.zeros(len(V))
        for t in range(width - 1, -1, -1):
            to_go = rewards[:, t] + after - V[:, t] + 0.95 * to_go
            A[:, t], after = to_go, V[:, t]
        advantages = torch.cat([a[width - len(v) :] for a, v in zip(A, split, strict=True)])
        old = [x for t in self.played for s in t.segments for x in s.logprobs or []]
        return values, torch.tensor(old), advantages, advantages + values

    def backward(self, rows: Sequence[int], columns: Sequence[Tensor], total: int) -> float:
        old_values, old, advantages, returns = columns
        with torch.autocast("cpu", torch.bfloat16, enabled=self.half):
            states, tokens = self.hidden(rows)
            logits = self.model.lm_head(states)
        logprobs = logits.float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        ratio = (logprobs - old).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        values = self.head(states.float())[:, 0]
        near = old_values + (values - old_values).clamp(-0.2, 0.2)
        error = torch.maximum((values - returns).square(), (near - returns).square()) / 2
        loss = (0.5 * error - gain).sum() / total
        loss.backward()
        return float(loss.detach())


def fastest(tried: dict[int, float]) -> int:
    return min(tried, key=lambda size: tried[size])


def measure_sft(model_name: str, work: str, half: bool, repeats: int) -> dict[str, Any]:
    model = make_model(model_name)
    played = trajectories(WORKS[work](CONVERSATIONS), model.config.vocab_size, sampled=False)
    tried = {
        size: train_trl(model_name, played, half, size, 2).seconds[1] for size in MICRO_BATCHES
    }
    best = fastest(tried)
    with tempfile.TemporaryDirectory() as folder:
        ludus, ours = Ludus(model, played, "sft", half, Path(folder)), list[float]()
        first = ludus.step()
        theirs_first = train_trl(model_name, played, half, best, 1, told=True).losses[0]
        require_same(first, theirs_first, half, f"SFT, {model_name}, {work}")

        def step() -> None:
            start = clock()
            ludus.step()
            ours.append(clock() - start)

        theirs = train_trl(model_name, played, half, best, repeats + 1, step).seconds
    return row_of("SFT", model_name, work, half, best, tried, theirs[1:], ours[1:])


def measure_ppo(model_name: str, work: str, half: bool, repeats: int) -> dict[str, Any]:
    vocab_size = make_model(model_name).config.vocab_size
    played = trajectories(WORKS[work](EPISODES), vocab_size, sampled=True)
    tried = {}
    for size in MICRO_BATCHES:
        peer = TunedPPO(make_model(model_name), played, size, half)
        peer.step()
        start = clock()
        peer.step()
        tried[size] = clock() - start
    best = fastest(tried)
    peer = TunedPPO(make_model(model_name), played, best, half)
    theirs, ours = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        ludus = Ludus(make_model(model_name), played, "ppo", half, Path(folder))
        for _ in range(repeats + 1):
            for program, seconds in ((peer, theirs), (ludus, ours)):
                start = clock()
                program.step()
                seconds.append(clock() - start)
    check_ppo(model_name, played, best)
    return row_of("PPO", model_name, work, half, best, tried, theirs[1:], ours[1:])


def check_ppo(model_name: str, played: list[Trajectory], best: int) -> None:
    """Errors: SystemExit where the losses of an optimizer step on all trajectories differ."""
    whole = TunedPPO(make_model(model_name), played, best, False)
    whole.minibatches = lambda: [list(range(len(played)))]  # type: ignore[method-assign]
    whole.step()
    with tempfile.TemporaryDirectory() as folder:
        ludus = Ludus(make_model(model_name), played, "ppo", False, Path(folder))
        settings = TrainSettings("ppo", 10, OptimizerConfig(lr=LR), 8192)
        ludus.backend.begin_stage(settings, ludus.algorithm)
        require_same(ludus.step(), whole.losses[0], False, f"PPO, {model_name}")


def require_same(ours: float, theirs: float, half: bool, where: str) -> None:
    if abs(ours - theirs) > (2e-2 if half else 1e-4):
        raise SystemExit(f"{where}: the losses are {ours} and {theirs}")


def row_of(
    method: str,
    model_name: str,
    work: str,
    half: bool,
    best: int,
    tried: dict[int, float],
    theirs: list[float],
    ours: list[float],
) -> dict[str, Any]:
    row = {
        "method": method,
        "model": model_name,
        "work": work + (", bfloat16" if half else ""),
        "micro_batch": best,
        "tried": tried,
        "peer": Spread.of(theirs),
        "ludus": Spread.of(ours),
        "ratio": ratios(theirs, ours),
        "seconds": {"peer": theirs, "ludus": ours},
    }
    print(method, model_name, row["work"], best, row["ratio"].show(".2f"), flush=True)
    return row


def main() -> None:
    args = arguments(__doc__ or "")
    facts = machine(args.threads)
    if args.quick:
        measure_sft("0.9 M", "heavy tail", False, 1)
        measure_ppo("0.9 M", "heavy tail", False, 1)
        return
    rows = [
        measure(model_name, work, half, args.repeats)
        for measure in (measure_sft, measure_ppo)
        for half in (False, True)
        for model_name in MODELS
        for work in WORKS
    ]
    publish(rows, facts, args.repeats)


def publish(rows: list[dict[str, Any]], facts: dict[str, Any], repeats: int) -> None:
    table = tabulate(
        rows,
        ("method", lambda row: row["method"]),
        ("parameters", lambda row: row["model"]),
        ("tokens", lambda row: row["work"]),
        ("peer, s", lambda row: row["peer"].show(".2f")),
        ("micro-batch", lambda row: str(row["micro_batch"])),
        ("ludus, s", lambda row: row["ludus"].show(".2f")),
        ("peer / ludus", lambda row: row["ratio"].bold()),
    )
    lost = [
        f"{row['method']}, {row['model']}, {row['work']}" for row in rows if row["ratio"].median < 1
    ]
    text = f"""
# SFT and PPO beside peers

{chr(10).join((__doc__ or "").strip().splitlines()[4:])}

Turns have {TURN} tokens, observations {OBSERVATION}. *Heavy tail*: log-normal prompts of 16 to 256
tokens and 1 to 24 turns. Cells: median (quartiles) of {repeats} steps after one warm-up step, the
programs alternate. The peers are tuned: the micro-batch is the fastest of
{", ".join(map(str, MICRO_BATCHES))} in the same run; fused AdamW, no activation checkpointing, no
logging. TRL {version("trl")} groups conversations by length. Its packing and padding-free modes
are left out: they need flash attention, which no CPU has. ludus has its defaults, and computes
entropies and other metrics, too.

{table}

The peer is faster in: {"; ".join(lost) or "none of these"}.

    python benchmarks/methods.py
"""
    write("methods", text, facts, rows, ("trl", "accelerate"))


if __name__ == "__main__":
    main()
