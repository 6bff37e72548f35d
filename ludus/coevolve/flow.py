"""The program of a co-evolution: its stages in order, each complete before the next.

    start                                   once: a first run, whose model both roles start from
    iteration-0/evaluate                    the executor before any iteration
    iteration-1/curriculum                  train the curriculum agent against the executor
               /generate /score /filter     proposals -> answers and votes -> problems with labels
               /executor                    train the executor on the problems
               /evaluate                    held-out tasks; the first executor on these problems

A stage's files are written atomically, then the stage is recorded. A killed stage runs again from
its last checkpoint (runs) or chunk (proposals and answers), and makes the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludus.coevolve import evaluation, questions
from ludus.coevolve.changes import check_changes
from ludus.coevolve.checks import check_all
from ludus.coevolve.child import Child, beside
from ludus.coevolve.report.page import try_report
from ludus.coevolve.roles import Role, Roles, has_heldout, run_name, trains_curriculum
from ludus.coevolve.storage import Storage
from ludus.config.coevolve import CoevolveConfig
from ludus.config.load import dump_config, load_as
from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError, did_you_mean
from ludus.core.files import atomic_write
from ludus.core.system.signals import exit_code
from ludus.pipeline import launch
from ludus.pipeline.evaluation.evaluate import export_checkpoint
from ludus.pipeline.monitoring.progress import Observer
from ludus.store.folders import RunFolder, disk_faults
from ludus.store.settings import run_config

STAGES = ("curriculum", "generate", "score", "filter", "executor", "evaluate")
"""The stages of an iteration, in order."""


class Stopped(Exception):
    """A signal, or a run's budget, stopped the co-evolution; it can be resumed."""

    def __init__(self, label: str, reason: str, exit_code: int) -> None:
        super().__init__(f"stopped in {label}{reason and ': '}{reason}")
        self.exit_code = exit_code


def storage_of(config: CoevolveConfig) -> Storage:
    """Returns the folder of a co-evolution."""
    return Storage(Path(config.storage) / config.name)


@dataclass(frozen=True, slots=True, order=True)
class StageId:
    """A stage of an iteration; `start` and the first evaluation belong to iteration 0."""

    iteration: int
    name: str

    @property
    def label(self) -> str:
        return "start" if self.name == "start" else f"iteration-{self.iteration}/{self.name}"


def stages_of(config: CoevolveConfig) -> list[StageId]:
    """Returns all stages in order."""
    stages = [StageId(0, "start")] if config.start is not None else []
    if has_heldout(config):
        stages.append(StageId(0, "evaluate"))
    for iteration in range(1, config.iterations + 1):
        stages += [StageId(iteration, name) for name in STAGES]
    if not trains_curriculum(config):
        stages = [stage for stage in stages if stage.name != "curriculum"]
    return stages


class Coevolution:
    """A co-evolution in its folder.

    Args:
        stand_ins: problems of a test where the filter keeps none (`test_mode`).
    """

    def __init__(
        self, config: CoevolveConfig, storage: Storage, observer: Observer, stand_ins: int = 0
    ) -> None:
        """Errors: ConfigError for a wrong section, before anything runs."""
        self.config, self.storage, self.observer = config, storage, observer
        self._stand_ins = stand_ins
        self.roles = Roles(config, storage)
        check_all(self.roles)

    def run(self, only: str | None = None, iteration: int | None = None) -> None:
        """Run the stages that are not complete; with `only`, one of them.

        Errors: Stopped after a signal; LudusError. What is complete stays.
        """
        if only is not None:
            self._named(only, iteration)  # before there is a folder
        with self.storage.locked(), disk_faults(RunFolder(self.storage.root)):
            self._remember()
            if only is None:
                chosen = [stage for stage in stages_of(self.config) if not self._is_complete(stage)]
            else:
                chosen = [self._single(only, iteration)]
            for stage in chosen:
                if not self._is_complete(stage):  # it may have run beside the one before
                    self._run(stage, alone=only is not None)

    def _is_complete(self, stage: StageId) -> bool:
        return stage.label in self.storage.complete()

    def _named(self, name: str, iteration: int | None) -> list[StageId]:
        """The stages of this name, or that of `iteration` alone. Errors: ConfigError: none."""
        named = [stage for stage in stages_of(self.config) if stage.name == name]
        if not named:
            raise ConfigError(f"{name}: this recipe has no such stage{_why_absent(name)}")
        found = [stage for stage in named if iteration in (None, stage.iteration)]
        if not found:
            counts = f"{named[0].iteration} to {named[-1].iteration}"
            raise ConfigError(f"--iteration {iteration}: {name} has the iterations {counts}")
        return found

    def _single(self, name: str, iteration: int | None) -> StageId:
        """The stage of this name that is next, or that of `iteration`. Errors: ConfigError."""
        stages, named = stages_of(self.config), self._named(name, iteration)
        left = [stage for stage in named if not self._is_complete(stage)]
        if not left and iteration is None:
            raise ConfigError(f"{name}: complete in all iterations ({self.config.iterations})")
        if not left:
            raise ConfigError(f"{named[0].label} is complete: its files are in {self.storage.root}")
        chosen = left[0]
        before = [stage for stage in stages[: stages.index(chosen)] if not self._is_complete(stage)]
        needed = [stage for stage in before if stage.name != "evaluate"]
        if needed:
            raise ConfigError(f"{chosen.label} needs {needed[0].label}, which is not complete")
        return chosen

    def _run(self, stage: StageId, *, alone: bool) -> None:
        later = StageId(stage.iteration + 1, "curriculum")
        paired = self.config.side_by_side and stage.name == "executor" and not alone
        child = None
        if paired and later in stages_of(self.config) and not self._is_complete(later):
            self.observer.note(f"{self.config.name}: {stage.label} beside {later.label}")
            log = self.storage.root / f"{run_name('curriculum', later.iteration)}.log"
            child = Child(self.storage.recipe, "curriculum", later.iteration, log)
        else:
            self.observer.note(f"{self.config.name}: {stage.label}")
        started = time.perf_counter()
        work: Callable[[], Mapping[str, Any]] = {
            "start": lambda: self._train(self.roles.start(), run_name("start", 0)),
            "curriculum": lambda: self.train_role("curriculum", stage.iteration),
            "executor": lambda: self.train_role("executor", stage.iteration),
            "generate": lambda: questions.generate(self.roles, stage.iteration, self.observer),
            "score": lambda: questions.score(self.roles, stage.iteration, self.observer),
            "filter": lambda: questions.select_problems(
                self.roles, stage.iteration, self._stand_ins
            ),
            "evaluate": lambda: evaluation.evaluate(self.roles, stage.iteration, self.observer),
        }[stage.name]
        try:
            with beside(child):
                result = work()
        except launch.Stopped as stopped:
            raise Stopped(stage.label, stopped.exceeded, stopped.exit_code) from None
        except KeyboardInterrupt as stop:
            raise Stopped(stage.label, "", exit_code(stop)) from None
        seconds = round(time.perf_counter() - started, 3)
        self.storage.record(stage.label, {**result, "seconds": seconds})
        told = ", ".join(f"{key} {_told(value)}" for key, value in result.items())
        self.observer.note(f"{stage.label}: {told} ({seconds:.0f} s)")
        if stage.name == "evaluate":
            planned = [stage.label for stage in stages_of(self.config)]
            try_report(self.storage, planned, stage.iteration, self.observer)
        if child is not None:
            run = self._newest_run(run_name("curriculum", later.iteration))
            assert run is not None
            self.storage.record(later.label, {"run": run.name, "beside": stage.label})

    # Training

    def train_role(self, role: Role, iteration: int) -> Mapping[str, Any]:
        if role == "curriculum":
            self.roles.write_opponent(iteration)
        return self._train(self.roles.training(role, iteration), run_name(role, iteration))

    def _train(self, config: RunConfig, name: str) -> Mapping[str, Any]:
        """Train a run, or resume it; export its model."""
        run = self._newest_run(name)
        if run is not None and (_has_steps(run) or run_config(RunFolder(run)) == config):
            folder = launch.resume(run.name, str(self.storage.runs), self.observer)
        else:
            folder = launch.train(config, self.observer)
        model = self.storage.model(name)
        model.parent.mkdir(parents=True, exist_ok=True)
        runs_dir = str(self.storage.runs)
        export_checkpoint(
            folder.id, runs_dir, None, model, merge=config.model.lora is not None, overwrite=True
        )
        return {"run": folder.id, "steps": _num_steps(config)}

    def _newest_run(self, name: str) -> Path | None:
        """The folder of a training; it has a higher number if an earlier one failed at once."""
        runs = [path.parent for path in self.storage.runs.glob(f"{name}-*/config.yaml")]
        numbered = {int(end): run for run in runs if (end := run.name[len(name) + 1 :]).isdigit()}
        return numbered[max(numbered)] if numbered else None

    def _remember(self) -> None:
        """Write the recipe, or compare it with that of an earlier process. Errors: ConfigError."""
        if self.storage.recipe.exists():
            before = load_as(CoevolveConfig, self.storage.recipe)
            begun = [stage.label for stage in stages_of(before) if self._has_begun(stage)]
            for line in check_changes(before, self.config, self.storage, begun):
                self.observer.note(f"changed: {line}")
        atomic_write(self.storage.recipe, dump_config(self.config))

    def _has_begun(self, stage: StageId) -> bool:
        """Returns whether the stage is complete, or has files that depend on the recipe."""
        if self._is_complete(stage):
            return True
        if stage.name in ("start", "curriculum", "executor"):
            run = self._newest_run(run_name(stage.name, stage.iteration))
            return run is not None and _has_steps(run)
        chunks = {"generate": "proposals", "score": "answers"}.get(stage.name)
        return (
            chunks is not None
            and self.storage.temporary(stage.iteration, f"{chunks}-00000").is_file()
        )


def _has_steps(run: Path) -> bool:
    return any((run / "checkpoints").glob("*/manifest.json"))


def _num_steps(config: RunConfig) -> int:
    return sum(stage.steps for stage in (config.sft, config.rl) if stage is not None)


def _why_absent(name: str) -> str:
    reasons = {
        "start": " (`start` is null)",
        "curriculum": " (`curriculum.rl` is null: the agent does not train)",
        "evaluate": " (`executor.tasks.heldout` is null)",
    }
    return reasons.get(name, did_you_mean(name, ("start", *STAGES, "report", "show")))


def _told(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
