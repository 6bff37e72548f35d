"""Generating data: an expert's episodes, a model's by rejection sampling, or both.

source    what is kept of a task
expert    the expert's episode, where it succeeds
model     the best of `samples` episodes of the model, where good enough
mixed     the model's, and the expert's where none of the model's was good enough

A folder holds:

    data.jsonl       {"messages": [...], "reward": ..., "success": ..., ...}: what `sft.data` reads
    agenttraj.json   the same in the form of AgentTraj, which has none for tool calls
    card.json        counts, success, lengths, by environment; README.md is the same to read
    episodes.jsonl   all that was played, from which a run that was stopped goes on
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ludus.config.schema import RolloutConfig
from ludus.core.errors import ConfigError, DataError
from ludus.core.files import atomic_write
from ludus.core.types import Spec, Task
from ludus.data import demonstrations as demonstrate
from ludus.data.cards import Chosen, Enough, EnvCard, card_of, choose, render
from ludus.data.journal import Journal, Record, of_expert, of_model
from ludus.envs import ENVS
from ludus.models.endpoint.client import Endpoint
from ludus.rollout.jobs import ChatAgent, EpisodeRecord, RolloutJob
from ludus.rollout.requests import LocalEnvs, agentgym_spec, tasks_of
from ludus.tasks.agentgym import conversations_of, read_agentgym
from ludus.tasks.readers import read_env

Say = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Which:
    """The tasks of each environment: AgentGym's `ids` or `items` (a file), or tiers and seeds."""

    num_tasks: int = 100
    first_seed: int = 0
    tiers: list[str] | None = None
    ids: Sequence[int | str] = ()
    items: str | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """The model to sample from. `samples` episodes of each task are played."""

    name: str
    base_url: str
    api_key: str | None = None
    samples: int = 4
    turn_deadline_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Generation:
    """What to generate. `rollout` says how a turn looks, for the expert and the model."""

    envs: Sequence[Spec]
    source: Literal["expert", "model", "mixed"]
    which: Which
    rollout: RolloutConfig
    model: Model | None = None
    keep: int = 1
    min_score: float | None = None
    seed: int = 0
    workers: int = 2
    expert_deadline_s: float = 60.0

    @property
    def enough(self) -> Enough:
        """Which episodes may be kept: what has more turns than it may have, nothing could play."""
        limit = self.rollout.max_turns
        return Enough(self.min_score, limit if isinstance(limit, int) else None)

    def settings(self) -> dict[str, Any]:
        """What the episodes depend on; a folder has one of it."""
        rollout = self.rollout
        keys = ("format", "system_prompt", "max_turns", "max_tokens_per_turn", "temperature")
        return {
            "envs": {spec.name: spec.args for spec in map(self.spec, self.envs)},
            "model": self.model.name if self.model else None,
            "seed": self.seed,
            **{key: getattr(rollout, key) for key in (*keys, "top_p")},
        }

    def spec(self, spec: Spec) -> Spec:
        """The environment, with AgentGym's arguments where the tasks are AgentGym's."""
        agentgym = self.which.ids or self.which.items
        return agentgym_spec(spec, None) if agentgym else spec

    def tasks(self, spec: Spec) -> list[Task]:
        """The tasks of an environment. Errors: ConfigError, DataError."""
        which = self.which
        if which.ids:
            return list(tasks_of(spec, which.ids, None))
        if which.items:
            return list(read_agentgym(which.items, name=spec.name, maker=ENVS.build(spec)))
        return list(read_env(which.num_tasks, which.tiers, which.first_seed, ENVS.build(spec)))


@dataclass(frozen=True, slots=True)
class Generated:
    """What a generation wrote."""

    folder: Path
    num_kept: int
    cards: dict[str, EnvCard]


def generate(wanted: Generation, folder: Path, say: Say = lambda _: None) -> Generated:
    """Play what the folder does not have yet, choose, and write the data set.

    Errors: ConfigError for wrong settings; DataError where the folder is of others, where the
    model's endpoint gave no episode at all, and where nothing is good enough.
    """
    if wanted.source != "expert" and wanted.model is None:
        raise ConfigError(f"--source {wanted.source} needs --model and --base-url")
    for spec in wanted.envs:
        ENVS.check(spec, "env")
    tasks = {spec.name: wanted.tasks(spec) for spec in map(wanted.spec, wanted.envs)}
    with Journal(folder, wanted.settings()) as journal:
        for spec in map(wanted.spec, wanted.envs):
            _play(wanted, spec, tasks[spec.name], journal, folder, say)
        records = _asked_for(wanted, tasks, journal)
    chosen = choose(records, wanted.keep, wanted.enough)
    cards = card_of(records, chosen)
    if not chosen.kept:
        reasons = {env: card.left_out for env, card in cards.items()}
        raise DataError(f"{folder}: no episode is good enough to be kept: {json.dumps(reasons)}")
    _write(folder, wanted, chosen, cards)
    return Generated(folder, len(chosen.kept), cards)


def _asked_for(wanted: Generation, tasks: dict[str, list[Task]], journal: Journal) -> list[Record]:
    """The records of the tasks, in their order; the journal may hold others, of earlier runs."""
    num_samples = wanted.model.samples if wanted.model and wanted.source != "expert" else 0
    keys = []
    for env, asked in tasks.items():
        for task in asked:
            keys += [(env, "model", task.id, sample) for sample in range(num_samples)]
            if wanted.source != "model":
                keys.append((env, "expert", task.id, 0))
    found = [journal.records[key] for key in keys if key in journal.records]
    solved = {
        (r.env, r.task_id) for r in found if r.source == "model" and not wanted.enough.fault(r)
    }
    return [r for r in found if r.source == "model" or (r.env, r.task_id) not in solved]


def _play(
    wanted: Generation, spec: Spec, tasks: list[Task], journal: Journal, folder: Path, say: Say
) -> None:
    """Play what is missing of one environment."""
    if wanted.source == "expert":
        _play_expert(wanted, spec, tasks, journal, folder, say)
        return
    assert wanted.model is not None
    samples = range(wanted.model.samples)
    asyncio.run(_play_model(wanted, wanted.model, spec, tasks, journal, say))
    played = {
        task.id: [
            journal.records[key]
            for sample in samples
            if (key := (spec.name, "model", task.id, sample)) in journal.records
        ]
        for task in tasks
    }
    every = [record for records in played.values() for record in records]
    if every and all(record.again for record in every):
        raise DataError(f"{spec.name}: the model gave no episode: {every[0].reason}")
    if wanted.source == "mixed":
        # A model that could not be asked has not failed: the expert does not take its place.
        failed = [
            task
            for task in tasks
            if not any(r.again or not wanted.enough.fault(r) for r in played[task.id])
        ]
        _play_expert(wanted, spec, failed, journal, folder, say)


def _play_expert(
    wanted: Generation, spec: Spec, tasks: list[Task], journal: Journal, folder: Path, say: Say
) -> None:
    missing = [t for t in tasks if not journal.has((spec.name, "expert", t.id, 0))]
    if not missing:
        return
    score_range = ENVS.load(spec.name).score_range  # type: ignore[attr-defined]

    def note(played: demonstrate.Demonstration | demonstrate.Dropped) -> None:
        record = of_expert(spec.name, played, score_range, wanted.rollout.system_prompt)
        journal.add(record)

    aside = folder / f".expert.{os.getpid()}.jsonl"
    try:
        summary = demonstrate.generate(
            spec,
            missing,
            aside,
            num_workers=wanted.workers,
            timeout_s=wanted.expert_deadline_s,
            only_successful=False,
            format=wanted.rollout.format,
            on_episode=note,
        )
    finally:
        aside.unlink(missing_ok=True)
        demonstrate.dropped_path(aside).unlink(missing_ok=True)
    say(f"{spec.name}, expert: {summary}")


async def _play_model(
    wanted: Generation, model: Model, spec: Spec, tasks: list[Task], journal: Journal, say: Say
) -> None:
    work = [
        (task, EpisodeRecord(id=task.id, task_id=task.id, tier=task.tier, sample=sample))
        for task in tasks
        for sample in range(model.samples)
        if not journal.has((spec.name, "model", task.id, sample))
    ]
    if not work:
        return
    say(f"{spec.name}, {model.name}: {len(work)} episodes")
    timeout = model.turn_deadline_s
    async with Endpoint(model.base_url, model.name, model.api_key, timeout_s=timeout) as endpoint:
        agent = ChatAgent(endpoint, LocalEnvs(spec), wanted.rollout, wanted.seed)
        await RolloutJob(
            agent, work, on_episode=lambda episode: journal.add(of_model(spec.name, episode))
        ).run()


def _write(folder: Path, wanted: Generation, chosen: Chosen, cards: dict[str, EnvCard]) -> None:
    """The files of the data set, each whole or absent."""
    rows = [_row(record) for record in chosen.kept]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    told = {env: card.model_dump() for env, card in cards.items()}
    model = {"samples": wanted.model.samples} if wanted.model else {}
    selection = {"source": wanted.source, "keep": wanted.keep, "min_score": wanted.min_score}
    settings = {**selection, **model, **wanted.settings()}
    files = {
        "data.jsonl": lines,
        "card.json": json.dumps({"envs": told, "settings": settings}, indent=2),
        "README.md": render(cards, settings) + "\n",
    }
    if wanted.rollout.format != "tools":
        trajectories = [
            {"conversations": conversations_of(record.messages), "item_id": record.task_id}
            for record in chosen.kept
        ]
        files["agenttraj.json"] = json.dumps(trajectories, ensure_ascii=False, indent=1)
    for name, text in files.items():
        try:
            atomic_write(folder / name, text)
        except OSError as error:
            raise DataError(f"{folder / name}: cannot be written: {error.strerror}") from error


def _row(record: Record) -> dict[str, Any]:
    """A line of `data.jsonl`: what `sft.data` reads, and where it came from."""
    messages = [m.model_dump(mode="json", exclude_defaults=True) for m in record.messages]
    return {
        "messages": [{"content": "", **message} for message in messages],
        "reward": record.reward,
        "success": record.success,
        "score": record.score,
        "env": record.env,
        "task_id": record.task_id,
        "tier": record.tier,
        "source": record.source,
        "num_turns": record.num_turns,
    }
