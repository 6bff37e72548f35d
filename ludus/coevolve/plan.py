"""`--dry-run`: all stages with their counts, memory, time and cost. Nothing is written or trained.

Each run and player is estimated as `ludus plan` estimates a run (`diagnostics.plan`). The training
of the curriculum agent has, besides its own episodes, k answers of the executor to each proposal,
and both models in memory. The time of votes and of the clusters of questions is left out.

A role's model takes the shape of the model that it starts from: its own folder need not exist.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from ludus.coevolve.flow import StageId, stages_of
from ludus.coevolve.roles import Role, Roles, trains_curriculum
from ludus.config.schema import RunConfig
from ludus.core.types import Spec
from ludus.diagnostics import plan as planning
from ludus.diagnostics.episodes import Usage, measure
from ludus.diagnostics.hardware import Hardware, find_hardware
from ludus.diagnostics.plan import START_S, Plan
from ludus.tasks.benchmarks import BENCHMARKS

STAGE_S = 1.0
"""Seconds to open and close a small model: all stages run in one process, which starts once."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A stage: its work in words, seconds, and bytes by device.

    `parts`: seconds by part, where there are several.
    """

    name: str
    work: str
    seconds: float
    memory: Mapping[str, float]
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class CoevolutionPlan:
    """Stages before the first iteration, and those of each iteration.

    `pair`: an iteration's executor beside the next one's curriculum, where `side_by_side` is set.
    """

    first: Sequence[StagePlan]
    each: Sequence[StagePlan]
    iterations: int
    hardware: Mapping[str, Hardware]
    pair: StagePlan | None
    notes: Sequence[str]

    @property
    def seconds(self) -> float:
        """Of all stages, and of the process's start."""
        total = START_S + sum(stage.seconds for stage in self.first)
        total += self.iterations * sum(stage.seconds for stage in self.each)
        if self.pair is not None:
            alone = sum(s.seconds for s in self.each if s.name in ("curriculum", "executor"))
            total -= (self.iterations - 1) * (alone - self.pair.seconds)
        return total

    @property
    def too_large(self) -> list[tuple[str, str, float]]:
        """Stage, device and bytes, where they exceed the device's memory."""
        stages = [*self.first, *self.each, *([self.pair] if self.pair else [])]
        return [
            (stage.name, device, count)
            for stage in stages
            for device, count in stage.memory.items()
            if count > self.hardware[device].memory
        ]


def plan(
    roles: Roles,
    hardware: str = "here",
    fill: float | None = None,
    efficiency: float | None = None,
) -> CoevolutionPlan:
    """Estimate a co-evolution.

    Args:
        hardware, fill, efficiency: as `ludus plan` has them. The expert of a role's environment is
            played, else that of the start; without one and without `fill`, episodes use all turns
            and the whole context.

    Errors: ConfigError, DataError.
    """
    return _Planner(roles, hardware, fill, efficiency).plan()


class _Planner:
    def __init__(
        self, roles: Roles, hardware: str, fill: float | None, efficiency: float | None
    ) -> None:
        self.roles, self.config = roles, roles.config
        self._name, self._fill, self._efficiency = hardware, fill, efficiency
        self._hardware: dict[str, Hardware] = {}
        self._notes: dict[str, None] = {}

    def plan(self) -> CoevolutionPlan:
        stages = stages_of(self.config)
        first = [self._stage(stage) for stage in stages if stage.iteration == 0]
        each = [self._stage(stage) for stage in stages if stage.iteration == 1]
        found = {stage.name: stage for stage in each}
        pair = None
        if self.config.side_by_side and self.config.iterations > 1 and "curriculum" in found:
            pair = _beside(found["executor"], found["curriculum"])
        return CoevolutionPlan(
            first, each, self.config.iterations, self._hardware, pair, list(self._notes)
        )

    def _stage(self, stage: StageId) -> StagePlan:
        makers: dict[str, Callable[[], StagePlan]] = {
            "start": self._start,
            "curriculum": self._curriculum,
            "generate": self._generate,
            "score": self._score,
            "filter": self._filter,
            "executor": self._executor,
            "evaluate": partial(self._evaluate, stage.iteration),
        }
        return makers[stage.name]()

    # Stages

    def _start(self) -> StagePlan:
        config = self.roles.start()
        return self._row("start", _work(config), (config, self._run(config, self._started)))

    def _curriculum(self) -> StagePlan:
        config = self._shaped("curriculum", self.roles.training("curriculum", 1))
        rl = config.rl
        assert rl is not None
        proposals = rl.steps * rl.groups_per_step * rl.group_size
        answering = self._shaped("executor", self.roles.answering(0, 1))
        answers = self._played(answering, proposals, self._number, self._solves)
        work = f"{_work(config)}; {self._number} answers to each of {proposals:,} proposals"
        own = self._run(config, self._proposes)
        return self._row("curriculum", work, (config, own), (answering, answers), "answers")

    def _generate(self) -> StagePlan:
        config = self._shaped("curriculum", self.roles.proposing(1, 1))
        number = self.config.questions.proposals
        work = f"{number:,} proposals"
        return self._row(
            "generate", work, (config, self._played(config, number, 1, self._proposes))
        )

    def _score(self) -> StagePlan:
        config = self._shaped("executor", self.roles.answering(0, 1))
        number = self.config.questions.proposals
        work = f"{self._number} answers to each of {number:,} proposals at most"
        played = self._played(config, number, self._number, self._solves)
        return self._row("score", work, (config, played))

    def _filter(self) -> StagePlan:
        settings = self.config.questions
        work = (
            f"{self._problems:,} problems at most, p from {settings.min_consistency:g} to "
            f"{settings.max_consistency:g}"
        )
        return StagePlan("filter", work, 0.0, {}, {})

    def _executor(self) -> StagePlan:
        config = self._shaped("executor", self.roles.training("executor", 1))
        work = f"{_work(config)}; of {self._problems:,} problems at most"
        return self._row("executor", work, (config, self._run(config, self._solves)))

    def _evaluate(self, iteration: int) -> StagePlan:
        config = self._shaped("executor", self.roles.solving(0, "evaluate"))
        samples, work = config.evaluate.samples_per_task, []
        total: Counter[str] = Counter()
        players: list[tuple[RunConfig, Plan]] = []
        if config.tasks.heldout is not None:
            number = self._num_heldout(config)
            told = "?" if number is None else f"{number:,}"
            times = f", {samples} answers each" if samples > 1 else ""
            work.append(f"{told} held-out tasks{times}")
            players.append((config, self._played(config, number or 0, samples, self._solves)))
        if iteration and self.config.frontier.num_tasks:
            number = min(self.config.frontier.num_tasks, self._problems)
            work.append(f"{number:,} problems with executor-1")
            answering = self._shaped("executor", self.roles.answering(0, 1))
            players.append((answering, self._played(answering, number, 1, self._solves)))
        for player_config, player in players:  # one after the other: the larger one counts
            device = player_config.model.device
            total[device] = max(total[device], int(sum(player.memory.values())))
        seconds = sum(STAGE_S + sum(player.seconds.values()) for _, player in players)
        return StagePlan("evaluate", ", ".join(work) or "nothing", seconds, dict(total), {})

    def _row(
        self,
        name: str,
        work: str,
        main: tuple[RunConfig, Plan],
        other: tuple[RunConfig, Plan] | None = None,
        label: str = "",
    ) -> StagePlan:
        """Returns a stage of a run or player, and of a second model that plays in between."""
        memory: Counter[str] = Counter()
        parts = {"start": STAGE_S, **{k: s for k, s in main[1].seconds.items() if k != "start"}}
        for config, found in (main, *([other] if other else [])):
            memory[config.model.device] += int(sum(found.memory.values()))
        if other is not None:
            parts[label] = sum(other[1].seconds.values())
        return StagePlan(name, work, sum(parts.values()), dict(memory), parts)

    # Parts

    @property
    def _number(self) -> int:
        return self.config.answers.number

    @property
    def _problems(self) -> int:
        """The most problems of an iteration."""
        settings = self.config.questions
        return min(settings.proposals, settings.max_problems or settings.proposals)

    def _run(self, config: RunConfig, usage: Usage | None) -> Plan:
        self._note(config, usage)
        fill, on = self._fill, self._on(config)
        return planning.plan(config, on, fill=fill, efficiency=self._efficiency, usage=usage)

    def _played(self, config: RunConfig, num_tasks: int, samples: int, usage: Usage | None) -> Plan:
        fill, on = self._fill, self._on(config)
        return planning.playing(
            config, on, num_tasks, samples, fill=fill, efficiency=self._efficiency, usage=usage
        )

    def _on(self, config: RunConfig) -> Hardware:
        device = config.model.device
        if device not in self._hardware:
            self._hardware[device] = find_hardware(self._name, config.model)
        return self._hardware[device]

    def _note(self, config: RunConfig, usage: Usage | None) -> None:
        if usage is None and self._fill is None:
            self._notes[
                f"({config.name}: no expert: episodes are taken to use all turns and the whole "
                "context (--fill))"
            ] = None

    def _shaped(self, role: Role, config: RunConfig) -> RunConfig:
        """The configuration with the model that the role starts from, whose shape it keeps."""
        if self.config.start is not None:
            origin = self.roles.start().model
        elif role == "curriculum":
            origin = self.roles.proposing(0, 0).model
        else:
            origin = self.roles.answering(0, 0).model
        changes: dict[str, Any] = {
            key: getattr(origin, key) for key in ("path", "architecture", "tokenizer")
        }
        return config.model_copy(update={"model": config.model.model_copy(update=changes)})

    @cached_property
    def _started(self) -> Usage | None:
        """Sizes of the expert's episodes of the start."""
        if self.config.start is None or (config := self.roles.start()).env is None:
            return None
        return measure(config)

    @cached_property
    def _proposes(self) -> Usage | None:
        """Sizes of the curriculum agent's episodes: as its expert's, or as the start's."""
        config = self._shaped("curriculum", self.roles.proposing(1, 1))
        if config.env is None or not trains_curriculum(self.config):
            return self._started
        return measure(self._shaped("curriculum", self.roles.training("curriculum", 1)))

    @cached_property
    def _solves(self) -> Usage | None:
        """Sizes of the executor's episodes: as its expert's on the held-out tasks, because the
        problems that it trains on do not exist yet, or as the start's."""
        config = self._shaped("executor", self.roles.training("executor", 1))
        heldout = self.roles.solving(0, "evaluate").tasks.heldout
        if config.env is None or heldout is None:
            return self._started
        tasks = config.tasks.model_copy(update={"train": heldout})
        return measure(config.model_copy(update={"tasks": tasks})) or self._started

    def _num_heldout(self, config: RunConfig) -> int | None:
        """Held-out tasks; None where the hub would have to tell."""
        heldout = config.tasks.heldout
        assert heldout is not None
        limits = [config.evaluate.num_tasks] if config.evaluate.num_tasks else []
        found = _size_on_hub(heldout)
        if found is None and not _asks_hub(heldout):
            found = len(self.roles.heldout(config))
        return min([*limits, *([found] if found is not None else [])], default=None)


def _work(config: RunConfig) -> str:
    """The counts of a run."""
    parts = []
    if config.sft is not None:
        parts.append(f"sft: {config.sft.steps:,} steps of {config.sft.episodes_per_step:,}")
    if config.rl is not None:
        rl = config.rl
        parts.append(f"rl: {rl.steps:,} steps of {rl.groups_per_step:,} x {rl.group_size:,}")
    return "; ".join(parts)


def _beside(executor: StagePlan, curriculum: StagePlan) -> StagePlan:
    """Both stages at the same time."""
    memory: Counter[str] = Counter()
    for stage in (executor, curriculum):
        memory.update({device: int(count) for device, count in stage.memory.items()})
    work = "executor of an iteration, and curriculum of the next"
    seconds = max(executor.seconds, curriculum.seconds)
    return StagePlan("side by side", work, seconds, dict(memory), {})


def _size_on_hub(spec: Spec) -> int | None:
    """The size of a published benchmark that is read from the hub."""
    benchmark = BENCHMARKS.get(str(spec.args.get("name")))
    if spec.name != "benchmark" or spec.args.get("path") is not None or benchmark is None:
        return None
    limit = spec.args.get("limit")
    return min(benchmark.size, limit) if isinstance(limit, int) else benchmark.size


def _asks_hub(value: object) -> bool:
    """True for a reader of the hub, or a mixture with one."""
    if isinstance(value, Spec):
        value = {"name": value.name, "args": value.args}
    if isinstance(value, Mapping):
        own = value.get("name") == "hf" or (
            value.get("name") == "benchmark" and (value.get("args") or {}).get("path") is None
        )
        return own or any(map(_asks_hub, value.values()))
    return False
