"""A pool of learner ranks in processes, and a small world that they and a local trainer train."""

from __future__ import annotations

import multiprocessing
import random
import socket
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ludus.config.schema import OptimizerConfig, RunConfig
from ludus.core.types import Group, Segment, Spec, Task, Trajectory
from ludus.models.build import build_model
from ludus.models.chat.tokenizers import train_tokenizer
from ludus.train.algorithms.base import Algorithm
from ludus.train.batches.minibatches import TrainSettings
from ludus.train.batches.samples import to_samples
from ludus.train.distributed import Rank, ShardedTrainer, ShardSettings, open_listener
from ludus.train.trainer import Trainer

SHAPE = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "head_dim": 16, "init_range": 0.2}
WORDS = [a + b for a in "abcdefgh" for b in "klmno"]
OPTIMIZER = OptimizerConfig(lr=3e-4, warmup_steps=1, schedule="cosine", weight_decay=0.1)


listeners: list[socket.socket] = []
"""Of rank 0, for its next trainer."""


def settings(**changes: Any) -> TrainSettings:
    """Of a stage of 8 steps."""
    return TrainSettings(**{"stage": "rl", "steps": 8, "optimizer": OPTIMIZER,
                            "tokens_per_batch": 64, "seed": 3, **changes})  # fmt: skip


def run_config(**changes: Any) -> RunConfig:
    shape = {**SHAPE, "intermediate_size": 48, **changes.pop("shape", {})}
    model = {
        "architecture": {"name": changes.pop("architecture", "qwen3"), "args": shape},
        "tokenizer": "words",
        "context_length": 64,
        **changes.pop("model", {}),
    }
    return RunConfig.model_validate(
        {
            "model": model,
            "tasks": {"train": "env"},
            "rollout": {"max_tokens_per_turn": 8},
            "threads": 1,
            **changes,
        }
    )


def world(config: RunConfig) -> tuple[Callable[[], Any], Any]:
    """Returns `make_model` and the tokenizer of a run."""
    tokenizer = train_tokenizer(Spec(name="words"), [" ".join(WORDS)])
    return partial(build_model, config.model, tokenizer, seed=1), tokenizer


def local_trainer(config: RunConfig, folder: Path) -> Trainer:
    return Trainer(*world(config), config, folder)


@contextmanager
def sharded_trainer(
    rank: Rank, config: RunConfig, folder: Path, **shards: Any
) -> Iterator[ShardedTrainer]:
    settings = ShardSettings(**{"timeout_s": 240.0, **shards})
    listener = listeners.pop() if rank.rank == 0 and listeners else None
    trainer = ShardedTrainer(*world(config), config, folder, rank, settings, listener)
    try:
        yield trainer
    finally:
        trainer.close()


def groups(seed: int = 0, num_groups: int = 3, size: int = 4, branches: bool = True) -> list[Group]:
    """Groups of episodes with a common prompt; some have a second branch."""
    draw = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [draw.randrange(3, 40) for _ in range(count)]

    made = []
    for g in range(num_groups):
        prompt = ids(draw.randrange(4, 12))
        members = []
        for t in range(size):
            segments = [Segment(-1, prompt)]
            for turn in range(draw.randrange(1, 3)):
                parent = len(segments) - 1
                count = draw.randrange(1, 8)
                segments.append(_sampled(parent, ids(count), draw))
                segments.append(Segment(parent + 1, ids(2 + turn)))
            if branches and t % 2:
                segments.append(_sampled(0, ids(3), draw))
            name = f"g{g}t{t}"
            members.append(Trajectory(name, f"g{g}", f"task{g}", segments, reward=draw.random()))
        made.append(Group(f"g{g}", Task(id=f"task{g}"), members))
    return made


def _sampled(parent: int, ids: list[int], draw: random.Random) -> Segment:
    logprobs = [-3.0 - draw.random() for _ in ids]
    return Segment(parent, ids, logprobs, policy_version=0)


def scored(trainer: Trainer | ShardedTrainer, algorithm: Algorithm, seed: int) -> list[Group]:
    """Groups with the scores that the algorithm asks for, on all ranks."""
    made = groups(seed)
    if not algorithm.asks_models:
        return made
    if isinstance(trainer, Trainer):
        return list(trainer.score(made, algorithm))
    return trainer.group.share(list(trainer.score(made, algorithm)))[0]


def iterate(
    trainer: Trainer | ShardedTrainer, algorithm: Algorithm, seeds: Iterable[int]
) -> list[dict[str, float]]:
    """One policy iteration a seed; returns their metrics."""
    return [
        trainer.train(to_samples(algorithm.assign(scored(trainer, algorithm, s))), algorithm, s)
        for s in seeds
    ]


def state_of(trainer: Trainer | ShardedTrainer) -> dict[str, torch.Tensor]:
    """Whole weights and moments by name, of all ranks."""
    if isinstance(trainer, Trainer):
        optimizer, model = trainer.learner.optimizer, trainer.model
        found = {n: p.detach().clone() for n, p in model.named_parameters()}
        parts = dict(model.named_parameters())
    else:
        found = {n: t.clone() for b in trainer.weights(4096) for n, t in b.items()}
        optimizer, parts = trainer.learner.optimizer, {}
    for name, parameter in parts.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}/{key}"] = value.clone()
    return found


class RankPool:
    """Processes that are the ranks of one learner after the other."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._links: list[Connection] = []
        self._processes = []
        for _ in range(self.size):
            link, other = context.Pipe()
            process = context.Process(target=_serve, args=(other,), daemon=True)
            process.start()
            self._links.append(link)
            self._processes.append(process)

    def outcomes(
        self, num_ranks: int, work: Callable[..., Any], *args: Any, timeout_s: float = 280
    ) -> list[Any]:
        """Returns what `work(rank, *args)` returned or raised, by rank; None for a dead rank."""
        links = self._links[:num_ranks]
        links[0].send(None)
        address = links[0].recv()
        for number, link in enumerate(links):
            link.send((work, Rank(number, num_ranks, address), args))
        found: list[Any] = []
        for link in links:
            try:
                if not link.poll(timeout_s):
                    self.close()
                    self._start()  # an answer that comes late would be taken for the next one
                    raise AssertionError(f"rank {len(found)} hangs; those before it: {found}")
                found.append(link.recv())
            except (EOFError, ConnectionResetError):
                found.append(None)
        return found

    def run(self, num_ranks: int, work: Callable[..., Any], *args: Any) -> list[Any]:
        """As `outcomes`; raises what a rank raised."""
        found = self.outcomes(num_ranks, work, *args)
        for outcome in found:
            if isinstance(outcome, BaseException):
                raise outcome
        return found

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(link: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    while True:
        try:
            told = link.recv()
        except EOFError:
            return
        if told is None:
            listener, address = open_listener()
            listeners[:] = [listener]
            link.send(address)
            continue
        work, rank, args = told
        try:
            outcome = work(rank, *args)
        except BaseException as error:
            outcome = error
        link.send(outcome)
