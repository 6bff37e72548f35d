"""Train a run: SFT, evaluation, RL, evaluation.

Results depend on the configuration and its seed, never on time or on earlier processes: a run
that was killed and resumed ends with the same bits as an uninterrupted run. For that, every file
in the run's folder is written atomically, and a resumed run forgets all steps after its checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ludus.core.debugging.breaks import let_go
from ludus.core.errors import ConfigError
from ludus.core.files import atomic_write
from ludus.core.seeds import derive_seed
from ludus.core.system.signals import Terminated
from ludus.core.types import Group, by_role
from ludus.evaluate import Evaluation
from ludus.loop.loop import Stage, run_stage
from ludus.pipeline import sft_end
from ludus.pipeline.build import Run
from ludus.pipeline.evaluation.evaluate import evaluate
from ludus.pipeline.monitoring.budget import Budget, Timings
from ludus.pipeline.monitoring.diagnosis import (
    Doctor,
    gain_metrics,
    sft_metrics,
    unknown_id,
    unknown_metrics,
)
from ludus.pipeline.monitoring.progress import Observer, evaluation_line, stop_line
from ludus.pipeline.monitoring.rl_end import METRIC, Signal
from ludus.pipeline.monitoring.watchdog import IdleWatchdog
from ludus.pipeline.stages import rl_stage, sft_stage
from ludus.store import RunStore
from ludus.store.folders import resume_command
from ludus.telemetry.metrics import MetricsLog
from ludus.telemetry.occupancy import busy
from ludus.train.checkpoint.listing import CheckpointInfo
from ludus.train.checkpoint.state import seed_random

UNTRAINED = "left"
"""`rl/left` in the store: RL episodes that finished after the last training step."""


class BudgetSpent(Exception):
    """One more step would exceed a limit of `budget`; the message names the limit.

    Everything up to the last complete step is saved.
    """


class Trainer:
    """Trains one run from its newest checkpoint, or from the start.

    Args:
        store: has a row for the run.
        budget: counts since the start of this process.
        timings: seconds by part of the run so far.
        on_saved: called after each checkpoint.
        skip_damaged: resume from an older checkpoint where the newest is damaged.
    """

    def __init__(
        self,
        run: Run,
        store: RunStore,
        metrics: MetricsLog,
        observer: Observer,
        budget: Budget,
        timings: Timings,
        on_saved: Callable[[], None],
        skip_damaged: bool = False,
    ) -> None:
        self.run = run
        self.timings = timings
        self.started = self.rewound = False
        self._in_stage = False
        self._stop: KeyboardInterrupt | None = None
        self._num_signals = 0
        self._store = store
        self._metrics = metrics
        self._observer = observer
        self._budget = budget
        self._on_saved = on_saved
        self._skip_damaged = skip_damaged
        self._watchdog = IdleWatchdog(observer.note)
        self._doctor = Doctor(run.config, run.folder, observer.note)
        self._unknown = unknown_id(run.tokenizer)
        self._excluded: list[tuple[str, str]] = []
        self._signal = Signal(None)  # of SFT
        self._num_episodes = 0
        self._latest: dict[str, float] = {}
        self._record_s = 0.0  # of the step before: its own is not over when it is recorded
        self._saved: tuple[str, int] | None = None  # stage and steps of the newest checkpoint
        self._recorded: tuple[str, int] | None = None  # of the newest step
        self._num_steps: dict[str, int] = {}  # of the stages that began; SFT may end early
        self._sft_end: sft_end.Decision | None = None

    async def train(self) -> None:
        """Run all remaining stages and evaluations.

        Errors: BudgetSpent; KeyboardInterrupt, with the last step saved, after `finish_step`;
        LudusError.
        """
        config, backend = self.run.config, self.run.backend
        try:
            resumed, keep = self._newest()
            if resumed is None:
                self._rewind(None, keep)
            skip_sft = resumed is not None and resumed.stage == "rl"
            for name in ("sft", "rl"):
                if getattr(config, name) is None or (name == "sft" and skip_sft):
                    continue
                if name == "sft":
                    await self._evaluate_before_sft(resumed)
                elif not skip_sft:
                    await self._evaluate("before", config.evaluate.num_tasks)
                checkpoint = resumed if resumed and resumed.stage == name else None
                stage, start = self._begin_stage(name, checkpoint)
                if checkpoint is not None:  # loaded, so the run can go on from it
                    self._rewind(checkpoint, keep)
                if start < stage.steps:
                    self.started = self._in_stage = True
                    await run_stage(stage, backend, self, start)
                    self._in_stage = False
            await self._evaluate("after", config.evaluate.num_tasks)
        finally:
            self._budget.keep()
            await self.run.collector.close()

    @property
    def stops_at_once(self) -> bool:
        """True after a second signal."""
        return self._num_signals > 1

    def finish_step(self, stop: KeyboardInterrupt) -> bool:
        """Handle a signal: the first of a stage lets the step finish, saves, then raises `stop`.

        Returns False where nothing is left to finish: the signal ends the run at once.
        """
        self._num_signals += 1
        let_go()  # a step that waits at a breakpoint would never finish
        if not self._in_stage or self._stop is not None:
            if self._in_stage and self._num_signals == 2:
                command = resume_command(self.run.folder)
                self._observer.note(stop_line(self._saved, self._recorded, command))
            return False
        self._stop = stop
        again = "another signal" if isinstance(stop, Terminated) else "Ctrl-C again"
        self._observer.note(
            f"finishing this step, then saving; {again} stops at once, without saving"
        )
        return True

    def _newest(self) -> tuple[CheckpointInfo | None, dict[str, int]]:
        """Returns the newest checkpoint, and the last step of each stage that it keeps."""
        folder, config = self.run.folder, self.run.config
        resumed = self.run.backend.checkpoints.latest(skip_damaged=self._skip_damaged)
        keep: dict[str, int] = {}
        if resumed is not None:
            if getattr(config, resumed.stage) is None:
                raise ConfigError(
                    f"{resumed.stage}: null, but the newest checkpoint, {resumed.path.name}, is of "
                    "that stage"
                )
            keep = {resumed.stage: resumed.step - 1, f"evaluate/{resumed.stage}": resumed.step}
            keep["evaluate/start"] = 0
            keep[f"{resumed.stage}/{UNTRAINED}"] = resumed.step - 1
            if resumed.stage == "rl":
                sft_steps = config.sft.steps if config.sft else 0
                keep |= {"sft": sft_steps, "evaluate/sft": sft_steps, "evaluate/before": 0}
            self._observer.note(
                f"{folder.id}: resuming after step {resumed.step} of {resumed.stage}"
            )
        return resumed, keep

    def _rewind(self, resumed: CheckpointInfo | None, keep: Mapping[str, int]) -> None:
        """Forget all results after a checkpoint: the run computes them again, bit for bit."""
        folder = self.run.folder
        self.rewound = True
        self.run.backend.checkpoints.discard_after(resumed)
        self._metrics.rewind(keep)
        self._store.rewind(folder.id, keep)
        for stage, step, path in folder.evaluation_files():
            if step > keep.get(f"evaluate/{stage}", -1):
                path.unlink()
        self._doctor.restore(MetricsLog.read(self._metrics.path))

    # Stages

    def _begin_stage(self, name: str, checkpoint: CheckpointInfo | None) -> tuple[Stage, int]:
        """Returns a stage, restored from its checkpoint if given, and its next step.

        The next step is `stage.steps` where nothing is left to do. Errors: BudgetSpent.
        """
        run = self.run
        if name == "sft":
            stage, self._excluded = sft_stage(run, self._observer.note)
        else:
            stage = rl_stage(self._with_unused_sft())
        start = 0 if checkpoint is None else checkpoint.step
        if name == "sft" and run.config.sft is not None:
            found = sft_end.measured(run.folder, start)
            self._sft_end = sft_end.decided(run.config, found)
            if self._sft_end is not None:
                stage.settings = replace(stage.settings, steps=self._sft_end.last)
        self._num_steps[name] = stage.steps
        run.backend.begin_stage(stage.settings, stage.algorithm)
        seed_random(derive_seed(run.config.seed, "stage", name))  # e.g. LoRA's dropout
        if name == "rl" and run.config.rl is not None:
            minimum = run.config.rl.min_signal
            self._signal = Signal.restored(minimum, self._metrics.path, start)
        if checkpoint is not None:
            success = self._load(stage, checkpoint)
            ended = self._suffices(stage, success) or stage.source.finished
            if lost := self._signal.reason:
                self._observer.note(f"rl: ended after step {start}: {lost}; null goes on")
            ended = ended or lost is not None
            if ended or start >= stage.steps:
                return stage, stage.steps
        self._observer.stage(name, stage.steps, start)
        self._budget.begin_stage()
        if exceeded := self._budget.exceeded():  # by earlier processes of the run
            raise BudgetSpent(exceeded)
        stage.after_step = partial(self._after_step, stage)
        return stage, start

    def _with_unused_sft(self) -> Run:
        """Returns the run, with the steps of RL that SFT has left to it, from now on."""
        run, rl = self.run, self.run.config.rl
        assert rl is not None
        if (steps := sft_end.rl_steps(run.config, run.folder)) > rl.steps:
            self._observer.note(
                f"rl: {steps - rl.steps} more steps in the time that SFT has left, {steps} in all "
                "(rl.steps_per_unused_sft_step)"
            )
            longer = rl.model_copy(update={"steps": steps})
            self.run = replace(run, config=run.config.model_copy(update={"rl": longer}))
        return self.run

    def _load(self, stage: Stage, resumed: CheckpointInfo) -> float | None:
        """Restore a checkpoint of the stage; returns the success that it was saved with."""
        state = self.run.backend.load(resumed.path)
        stage.source.load_state_dict({**state, "step": resumed.step})
        self._saved = stage.name, resumed.step
        prefetched = state.get("ahead", {}).get("again")
        if prefetched and not stage.source.max_staleness:
            self._observer.note(
                f"{stage.name}: rl.max_staleness is now 0; {len(prefetched)} prefetched tasks are "
                "dropped"
            )
        self.timings.restore(state["timings"])
        self._num_episodes = int(state["episodes"])
        success: float | None = state["success"]
        return success

    async def _after_step(self, stage: Stage, step: int) -> bool:
        """Evaluate and save where due. Returns whether the stage continues."""
        success: float | None = None
        evaluation = self.run.config.evaluate
        every = evaluation.every
        if stage.name == "rl" and every and step % every == 0 and step < stage.steps:
            num_tasks = evaluation.num_tasks_between or evaluation.num_tasks
            result = await self._evaluate("rl", num_tasks, step)
            success = result.success.value if result else None
        await self._measure_sft(stage, step)
        if finished := stage.source.finished:
            self._observer.note(
                f"{stage.name}: the last tier of tasks.curriculum met its criteria at step {step}"
            )
        if lost := self._signal.reason:
            self._observer.note(f"rl: ends after step {step}: {lost}")
        ended = step == stage.steps or finished or bool(lost)
        ended = ended or self._suffices(stage, success)
        exceeded = None if ended else self._budget.exceeded()
        if ended:
            self._record_untrained(stage, step, await stage.source.close())
        measured = success is not None and self._is_measured_by_evaluation
        due = measured or step % self.run.config.checkpoint.every == 0
        if ended or exceeded or self._stop or due:
            with busy("checkpoint"), self.timings.timed("checkpoints"):
                self._save(stage, step, success, pin=ended)
        if exceeded:
            raise BudgetSpent(exceeded)
        if self._stop:
            raise self._stop
        return not ended

    def _save(self, stage: Stage, step: int, success: float | None, *, pin: bool) -> None:
        config = self.run.config
        state = {
            **stage.source.state_dict(),
            "timings": dict(self.timings.seconds),
            "episodes": self._num_episodes,
            "success": success,
        }
        last = stage.name == "rl" or config.rl is None
        metric = self._latest.get(config.best_by or "") if last else None
        self.run.backend.save(stage.name, step, state, metric, pin=pin)
        self._saved = stage.name, step
        self._on_saved()

    @property
    def _is_measured_by_evaluation(self) -> bool:
        """True if evaluations select the checkpoints to keep."""
        config = self.run.config
        return config.checkpoint.keep_best > 0 and (config.best_by or "").startswith("evaluate/")

    def _suffices(self, stage: Stage, success: float | None) -> bool:
        """Returns whether an evaluation reached `rl.min_success_to_stop`."""
        if stage.name != "rl" or success is None or self.run.config.rl is None:
            return False
        minimum = self.run.config.rl.min_success_to_stop
        return minimum is not None and success >= minimum

    async def _measure_sft(self, stage: Stage, step: int) -> None:
        """Measure the policy where `sft.until` asks for it, and set the last step where it is
        decided."""
        sft = self.run.config.sft
        if sft is None or sft.until is None or stage.name != "sft":
            return
        is_last = step == stage.steps
        if not is_last and (self._sft_end is not None or step % sft.until.every):
            return
        with busy("evaluate"), self.timings.timed("evaluation"):
            groups, result = await sft_end.measure(self.run, sft.until, step)
        self._record_evaluation(sft_end.LABEL, step, groups, result)
        found = sft_end.measured(self.run.folder, step)
        self._sft_end = decision = self._sft_end or sft_end.decided(self.run.config, found)
        if is_last or decision is not None:
            successes = [evaluation.success.value for _, evaluation in found]
            self._observer.note(sft_end.told(sft.until, decision, step, successes))
        if decision is not None:
            stage.settings = replace(stage.settings, steps=decision.last)
            self._num_steps[stage.name] = decision.last
            if step < decision.last:
                self.run.backend.shorten_stage(decision.last)
                self._observer.stage(stage.name, decision.last, step)

    # Results

    def record(
        self, stage: str, step: int, groups: Sequence[Group], metrics: dict[str, float]
    ) -> None:
        """Record a step: first in the store, then in the sinks, then on the display."""
        started = time.perf_counter()
        run = self.run
        trajectories = [t for group in groups for t in group.trajectories]
        for name in ("rollout", "train"):
            self.timings.add(f"{stage}/{name}", metrics[f"time/{name}_s"])
        self._num_episodes += int(metrics["rollout/episodes"])
        metrics = {
            **metrics,
            "time/elapsed_s": self._budget.spent.seconds,
            "time/record_s": self._record_s,
            "rollout/episodes_total": float(self._num_episodes),
            "rollout/dropped": float(
                sum(t.dropped is not None and not (t.fixed or t.without_turn) for t in trajectories)
            ),
        }
        metrics |= self._machine_metrics(groups, metrics) | unknown_metrics(groups, self._unknown)
        if (stage, step) == ("sft", 0):
            too_long = len(self._excluded)
            metrics |= sft_metrics(len(run.conversations) - too_long, too_long, run.folder)
        self._signal.add(metrics.get(METRIC))
        num_steps = self._num_steps.get(stage) or getattr(run.config, stage).steps
        metrics |= self._budget.step(metrics["rollout/tokens"], num_steps - step - 1)
        self._latest = metrics
        self._store.record_step(
            run.folder.id,
            stage,
            step,
            groups,
            metrics,
            seconds=metrics["time/step_s"],
            policy_version=int(metrics["train/policy_version"]),
            dropped=self._excluded if (stage, step) == ("sft", 0) else (),
        )
        self._metrics.log(stage, step, metrics)
        self._recorded = stage, step + 1
        self._observer.step(stage, step, metrics)
        self._doctor.step(stage, step, metrics)
        trained = bool(metrics["train/optimizer_steps"])
        self._watchdog.step(stage, groups, trained, num_steps)
        self._record_s = time.perf_counter() - started

    def _machine_metrics(
        self, groups: Sequence[Group], metrics: Mapping[str, float]
    ) -> dict[str, float]:
        """Tokens, utilisation and memory of the devices that computed a step."""
        return self.run.backend.meter.metrics(groups, metrics)

    def _record_untrained(self, stage: Stage, step: int, groups: Sequence[Group]) -> None:
        """Store the prefetched groups that no step is left to train on."""
        if groups:
            name = f"{stage.name}/{UNTRAINED}"
            metrics = {"time/elapsed_s": self._budget.spent.seconds}
            self._store.record_step(self.run.folder.id, name, step - 1, by_role(groups), metrics)
            count = sum(len(group.trajectories) for group in groups)
            self._observer.note(f"{stage.name}: {count} prefetched episodes were not trained on")

    async def _evaluate_before_sft(self, resumed: CheckpointInfo | None) -> None:
        """Evaluate what the policy can do at the start, where asked; a resumed run has done it."""
        if self.run.config.evaluate.before_sft and resumed is None:
            await self._evaluate("start", self.run.config.evaluate.num_tasks)

    async def _evaluate(
        self, label: str, num_tasks: int | None, step: int = 0
    ) -> Evaluation | None:
        """Evaluate held-out tasks and record the result; None where there are no such tasks."""
        run = self.run
        if not run.splits.heldout:
            return None
        settings = run.config.evaluate.model_copy(update={"num_tasks": num_tasks})
        with busy("evaluate"), self.timings.timed("evaluation"):
            groups, result = await evaluate(run, settings, label, step)
        self._record_evaluation(label, step, groups, result)
        return result

    def _record_evaluation(
        self, label: str, step: int, groups: Sequence[Group], result: Evaluation
    ) -> None:
        """Record an evaluation in the store, the sinks and the run's folder."""
        run, stage = self.run, f"evaluate/{label}"
        metrics = {
            "evaluate/success": result.success.value,
            "evaluate/score": result.score.value,
            "time/elapsed_s": self._budget.spent.seconds,
        }
        for part in sorted({o.part for o in result.outcomes if o.part in result.tiers}):
            metrics[f"evaluate/success_{part}"] = result.tiers[part].success.value
        metrics |= unknown_metrics(groups, self._unknown)
        if label != "start":
            earlier = "before" if label != "before" and run.config.rl else "start"
            metrics |= gain_metrics(run.folder.evaluations / f"{earlier}-000000.json", result)
        if label not in (sft_end.LABEL, "start"):  # these choose no checkpoint
            self._latest |= metrics
        self._store.record_step(
            run.folder.id, stage, step, by_role(groups), metrics, seconds=result.seconds
        )
        self._metrics.log(stage, step, metrics)
        run.folder.evaluations.mkdir(parents=True, exist_ok=True)
        path = run.folder.evaluations / f"{label}-{step:06d}.json"
        atomic_write(path, result.model_dump_json())
        measured = metrics.get(run.config.best_by or "")
        if label in ("before", "after") and self._saved and measured is not None:
            # Before and after RL, the checkpoint of these weights is saved already.
            run.backend.checkpoints.set_metric(*self._saved, measured)
        last_stage = "rl" if run.config.rl else "sft"
        self._observer.note(evaluation_line(label, step, result, last_stage))
        self._doctor.step(stage, step, metrics)
        self._budget.keep()
