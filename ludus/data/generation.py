"""Generates SFT data: episodes of an expert, of a model by rejection sampling, or of both.

source    kept of each task
expert    the expert's episode, if it succeeds
model     the best of `samples` episodes of the model, if good enough
mixed     the model's; the expert's where no episode of the model is good enough

The folder holds:

    data.jsonl       {"messages": [...], "reward": ..., "success": ..., ...}, read by `sft.data`
    agenttraj.json   the same conversations in AgentTraj's format (not with tool calls)
    card.json        counts, success and lengths by environment; README.md is its readable form
    episodes.jsonl   the journal of all played episodes; a stopped run resumes from it
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ludus.config.schema import RolloutConfig
from ludus.core.errors import ConfigError, DataError
from ludus.core.files import atomic_write
from ludus.core.system.signals import run
from ludus.core.types import Spec, Task
from ludus.data.cards import EnvCard, KeepRule, Selection, build_cards, render, select
from ludus.data.demonstrations import Dropped, dropped_path, generate_demonstrations, require_pool
from ludus.data.expert import Demonstration
from ludus.data.journal import Journal, Record, expert_record, model_record
from ludus.envs import ENVS
from ludus.envs.base import limits_of
from ludus.models.endpoint.client import Endpoint
from ludus.rollout.hosts.host import LocalEnvs
from ludus.rollout.jobs import EpisodeRecord, RolloutJob
from ludus.rollout.requests import agentgym_spec, tasks_of
from ludus.tasks.agentgym import conversations_of, has_items, read_agentgym
from ludus.tasks.readers import read_env

Log = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class TaskSelection:
    """Tasks of each environment: AgentGym's `ids` or `items` (a file), or tiers and seeds."""

    num_tasks: int = 100
    first_seed: int = 0
    tiers: list[str] | None = None
    ids: Sequence[int | str] = ()
    items: str | None = None


@dataclass(frozen=True, slots=True)
class EndpointModel:
    """The model to sample from, `samples` episodes a task."""

    name: str
    base_url: str
    api_key: str | None = None
    samples: int = 4
    turn_deadline_s: float = 120.0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """The settings of a data set. `rollout` sets the turn format of expert and model."""

    envs: Sequence[Spec]
    source: Literal["expert", "model", "mixed"]
    selection: TaskSelection
    rollout: RolloutConfig
    model: EndpointModel | None = None
    keep: int = 1
    min_score: float | None = None
    seed: int = 0
    workers: int = 2
    expert_deadline_s: float = 60.0

    def __post_init__(self) -> None:
        if self.rollout.format == "code":
            raise ConfigError(
                "format: code needs a recipe's tools, which run the code: `ludus train` with "
                "`rollout.format: code` makes such demonstrations, and `ludus export --what sft` "
                "writes them to a file; here choose plain, react or tools"
            )

    @property
    def keep_rule(self) -> KeepRule:
        """The rule for kept episodes; a rollout could not play more than `max_turns` turns."""
        limit = self.rollout.max_turns
        return KeepRule(self.min_score, limit if isinstance(limit, int) else None)

    def settings(self) -> dict[str, Any]:
        """The settings that episodes depend on; the same for all episodes of a folder."""
        rollout = self.rollout
        keys = ("format", "system_prompt", "max_turns", "max_tokens_per_turn", "temperature")
        return {
            "envs": {spec.name: spec.args for spec in map(self.spec, self.envs)},
            "model": self.model.name if self.model else None,
            "seed": self.seed,
            **{key: getattr(rollout, key) for key in (*keys, "top_p")},
        }

    def spec(self, spec: Spec) -> Spec:
        """The environment, with AgentGym's arguments if the tasks are AgentGym's."""
        selection = self.selection
        agentgym = selection.ids or (selection.items and has_items(selection.items))
        return agentgym_spec(spec, None) if agentgym else spec

    def tasks(self, spec: Spec) -> list[Task]:
        """Returns the tasks of an environment. Errors: ConfigError, DataError."""
        selection = self.selection
        if selection.ids:
            return list(tasks_of(spec, selection.ids, None))
        if selection.items:
            return list(
                read_agentgym(selection.items, name=spec.name, maker=LocalEnvs(spec).make())
            )
        env = LocalEnvs(spec).make()
        return list(read_env(selection.num_tasks, selection.tiers, selection.first_seed, env))


def generate_dataset(request: GenerationRequest, folder: Path, log: Log = lambda _: None) -> int:
    """Play the episodes that the folder does not have yet, select, and write the data set.

    Returns the number of kept episodes.
    Errors: ConfigError for wrong settings; MissingDependency; DataError where the folder was
    written with other settings, where the endpoint answered no episode, and where no episode is
    good enough.
    """
    if request.source != "expert" and request.model is None:
        raise ConfigError(f"--source {request.source} needs --model and --base-url")
    for spec in request.envs:  # refuse wrong arguments before the first episode
        ENVS.build(request.spec(spec), "env")
    if request.source != "model":
        require_pool()
    tasks = {spec.name: request.tasks(spec) for spec in map(request.spec, request.envs)}
    with Journal(folder, request.settings(), Record) as journal:
        generator = _Generator(request, journal, folder, log)
        try:
            for spec in map(request.spec, request.envs):
                generator.run(spec, tasks[spec.name])
        except KeyboardInterrupt as stop:
            raise type(stop)("stopped; the same command continues the data set") from None
        records = generator.records(tasks)
    selection = select(records, request.keep, request.keep_rule)
    cards = build_cards(records, selection)
    if not selection.kept:
        reasons = {env: card.left_out for env, card in cards.items()}
        raise DataError(f"{folder}: no episode is good enough to be kept: {json.dumps(reasons)}")
    _write(folder, request, selection, cards)
    return len(selection.kept)


@dataclass(frozen=True, slots=True)
class _Generator:
    """Plays the missing episodes of a request and adds them to its journal."""

    request: GenerationRequest
    journal: Journal[Record]
    folder: Path
    log: Log

    def records(self, tasks: dict[str, list[Task]]) -> list[Record]:
        """The records of `tasks`, in order. The journal may hold others, from earlier runs."""
        num_samples = self._num_samples
        keys = []
        for env, env_tasks in tasks.items():
            for task in env_tasks:
                keys += [(env, "model", task.id, sample) for sample in range(num_samples)]
                if self.request.source != "model":
                    keys.append((env, "expert", task.id, 0))
        records = [self.journal.records[key] for key in keys if key in self.journal.records]
        solved = {
            (r.env, r.task_id) for r in records if r.source == "model" and self._good_enough(r)
        }
        return [r for r in records if r.source == "model" or (r.env, r.task_id) not in solved]

    def run(self, spec: Spec, tasks: list[Task]) -> None:
        """Play the missing episodes of one environment."""
        if self.request.source == "expert":
            self._play_expert(spec, tasks)
            return
        run(self._play_model(spec, tasks))
        played = [r for r in self.records({spec.name: tasks}) if r.source == "model"]
        if played and all(record.again for record in played):
            raise DataError(f"{spec.name}: the model gave no episode: {played[0].reason}")
        if self.request.source == "mixed":
            # An infrastructure failure is not the model's: the expert does not replace it.
            settled = {r.task_id for r in played if r.again or self._good_enough(r)}
            self._play_expert(spec, [task for task in tasks if task.id not in settled])

    @property
    def _num_samples(self) -> int:
        model = self.request.model
        return model.samples if model and self.request.source != "expert" else 0

    def _good_enough(self, record: Record) -> bool:
        return self.request.keep_rule.rejection(record) is None

    def _play_expert(self, spec: Spec, tasks: list[Task]) -> None:
        missing = [t for t in tasks if not self.journal.has((spec.name, "expert", t.id, 0))]
        if not missing:
            return
        score_range, _ = limits_of(LocalEnvs(spec).make())
        system_prompt = self.request.rollout.system_prompt

        def add(result: Demonstration | Dropped) -> None:
            self.journal.add(expert_record(spec.name, result, score_range, system_prompt))

        scratch = self.folder / f".expert.{os.getpid()}.jsonl"
        try:
            summary = generate_demonstrations(
                spec,
                missing,
                scratch,
                num_workers=self.request.workers,
                timeout_s=self.request.expert_deadline_s,
                only_successful=False,
                format=self.request.rollout.format,
                on_episode=add,
            )
        finally:
            scratch.unlink(missing_ok=True)
            dropped_path(scratch).unlink(missing_ok=True)
        self.log(f"{spec.name}, expert: {summary}")

    async def _play_model(self, spec: Spec, tasks: list[Task]) -> None:
        model, request = self.request.model, self.request
        assert model is not None
        work = [
            (task, EpisodeRecord(id=task.id, task_id=task.id, tier=task.tier, sample=sample))
            for task in tasks
            for sample in range(model.samples)
            if not self.journal.has((spec.name, "model", task.id, sample))
        ]
        if not work:
            return
        self.log(f"{spec.name}, {model.name}: {len(work)} episodes")

        def add(episode: EpisodeRecord) -> None:
            self.journal.add(model_record(spec.name, episode))

        key, timeout = model.api_key, model.turn_deadline_s
        async with Endpoint(model.base_url, model.name, key, timeout_s=timeout) as endpoint:
            envs, seed = LocalEnvs(spec), request.seed
            job = RolloutJob(endpoint, envs, request.rollout, work, seed=seed, on_episode=add)
            await job.run()


def _write(
    folder: Path, request: GenerationRequest, selection: Selection, cards: dict[str, EnvCard]
) -> None:
    """Write the files of the data set, each atomically."""
    rows = [_row(record) for record in selection.kept]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    card_rows = {env: card.model_dump() for env, card in cards.items()}
    model = {"samples": request.model.samples} if request.model else {}
    rule = {"source": request.source, "keep": request.keep, "min_score": request.min_score}
    settings = {**rule, **model, **request.settings()}
    files = {
        "data.jsonl": lines,
        "card.json": json.dumps({"envs": card_rows, "settings": settings}, indent=2),
        "README.md": render(cards, settings) + "\n",
    }
    if request.rollout.format != "tools":
        trajectories = [
            {"conversations": conversations_of(record.messages), "item_id": record.task_id}
            for record in selection.kept
        ]
        files["agenttraj.json"] = json.dumps(trajectories, ensure_ascii=False, indent=1)
    for name, text in files.items():
        try:
            atomic_write(folder / name, text)
        except OSError as error:
            raise DataError(f"{folder / name}: cannot be written: {error.strerror}") from error


def _row(record: Record) -> dict[str, Any]:
    """A line of `data.jsonl`: the fields that `sft.data` reads, and the episode's origin."""
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
