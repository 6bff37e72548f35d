"""A training run, from its tasks to its report: what `ludus train` does.

    tasks -> demonstrations -> tokenizer -> model -> SFT -> evaluation -> RL -> evaluation -> report

Each part leaves its result in the run's folder, written aside and renamed; a resumed run takes up
what is there. What is computed depends on the configuration and its seed alone, never on time or
on what ran before: so a run that was killed and resumed ends with the same bits as one that was
not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError, DataError
from ludus.core.files import atomic_folder, atomic_write
from ludus.core.seeds import derive_seed
from ludus.core.types import Group, Task
from ludus.data.demonstrations import Demonstration, dropped_path, generate, load
from ludus.evaluate import Evaluation
from ludus.loop.loop import Stage, run_stage
from ludus.pipeline.assemble import Conversation, make_tokenizer, read_conversations
from ludus.pipeline.budget import Budget
from ludus.pipeline.prepared import PreparedRun
from ludus.pipeline.progress import Observer
from ludus.pipeline.watchdog import Watch
from ludus.store import RunStore
from ludus.store.folders import RunFolder
from ludus.tasks.readers import TaskList
from ludus.telemetry.logs import get_logger
from ludus.telemetry.metrics import MetricsLog
from ludus.telemetry.occupancy import busy
from ludus.train.checkpoint.state import seed_random
from ludus.train.checkpoint.store import CheckpointInfo

log = get_logger(__name__)

LEFT = "left"
"""`rl/left` holds the episodes of `rl` that no step was left to train on."""


class Interrupted(Exception):
    """The user asked to stop; everything up to the last complete step is saved."""


class BudgetSpent(Interrupted):
    """One more step would pass a limit of `budget`; the message says which."""


class TrainingRun(PreparedRun):
    """One run in one folder.

    Args:
        folder: where everything goes; its configuration is stored already.
        store: the run store, in which the run exists already; None: for reading only.
        metrics: the sinks; None: for reading only.
        observer: told of progress.
        skip_damaged: resume from an older checkpoint where the newest is damaged.
        on_saved: called when there is something new to go on from: a checkpoint, the beginnings.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: RunConfig,
        store: RunStore | None,
        metrics: MetricsLog | None,
        observer: Observer,
        *,
        skip_damaged: bool = False,
        on_saved: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(folder, config, observer)
        self._store = store
        self._metrics = metrics
        self.stop_requested = False
        self.started = self.in_stage = False
        self.timings: dict[str, float] = {}
        self.num_episodes = 0
        self._latest: dict[str, float] = {}
        self._watch = Watch(observer.note)
        self._skip_damaged = skip_damaged
        self._on_saved = on_saved
        self._budget = Budget(config.budget, folder.budget)

    def run(self, train: TaskList, heldout: TaskList) -> None:
        """Everything that is still to do. Errors: Interrupted, and whatever LudusError arises."""
        self._tell_skipped("tasks.train", [str(line) for line in train.skipped])
        self._tell_skipped("tasks.heldout", [str(line) for line in heldout.skipped])
        self.ratios = train.ratios
        conversations = self._conversations(train)
        if not self.folder.tokenizer.exists():
            shown = [message for known in conversations for message in known.messages]
            tokenizer = make_tokenizer(self.config, train, shown)
            with atomic_folder(self.folder.tokenizer) as folder:
                tokenizer.save_pretrained(folder)
        self.build(heldout)
        self._on_saved()
        try:
            asyncio.run(self._stages(train, conversations))
        finally:
            self.backend.close()
            self._budget.keep()

    async def _stages(self, train: Sequence[Task], conversations: Sequence[Conversation]) -> None:
        resumed = self.backend.checkpoints.latest(skip_damaged=self._skip_damaged)
        self._rewind(resumed)
        first = resumed.stage if resumed else None
        if resumed and getattr(self.config, resumed.stage) is None:
            raise ConfigError(
                f"{first}: null, but the newest checkpoint, {resumed.path.name}, is of that stage"
            )
        if self.config.sft and first in (None, "sft"):
            await self._run_stage(self._sft_stage(conversations), resumed)
        if self.config.rl and first in (None, "sft"):
            await self.evaluate("before", self.config.evaluate.num_tasks)
        if self.config.rl:
            await self._run_stage(self._rl_stage(train), resumed if first == "rl" else None)
        await self.evaluate("after", self.config.evaluate.num_tasks)

    @property
    def store(self) -> RunStore:
        """The run store. Errors: RuntimeError where the run was opened for reading."""
        if self._store is None:
            raise RuntimeError("this run was opened for reading")
        return self._store

    @property
    def metrics(self) -> MetricsLog:
        """The sinks. Errors: RuntimeError where the run was opened for reading."""
        if self._metrics is None:
            raise RuntimeError("this run was opened for reading")
        return self._metrics

    # Set-up

    def _conversations(self, train: Sequence[Task]) -> list[Conversation]:
        """What SFT learns from, or a tokenizer alone: demonstrations, or `sft.data`."""
        demonstrations = self._demonstrations(train)
        conversations, skipped = read_conversations(self.config, demonstrations, train)
        self._tell_skipped("sft.data", skipped)
        return conversations

    def _demonstrations(self, train: Sequence[Task]) -> list[Demonstration]:
        """The expert's episodes: generated once, then read from the run's folder."""
        settings = self.config.demonstrations
        if settings is None or self.config.env is None:
            return []
        path = self.folder.demonstrations
        if not path.exists():
            tasks = train[: settings.num_episodes]
            self.observer.stage("demonstrations", len(tasks))
            with self.timed("demonstrations"):
                summary = generate(
                    self.config.env,
                    tasks,
                    path,
                    num_workers=settings.num_workers,
                    timeout_s=settings.timeout_s,
                    only_successful=settings.only_successful,
                    format=self.config.rollout.format,
                    on_episode=lambda *_: self.observer.tick(),
                )
            self.observer.note(str(summary))
        if demonstrations := list(load(path)):
            return demonstrations
        first = dropped_path(path).read_text(encoding="utf-8").partition("\n")[0]
        raise DataError(
            f"the expert left no demonstration; {dropped_path(path)} has the reasons: {first}"
        )

    def _tell_skipped(self, what: str, skipped: Sequence[str]) -> None:
        """Report malformed lines that were left out, as `tasks.on_bad_line: skip` asks."""
        for line in skipped:
            log.info("malformed line left out", source=what, line=line)
        if skipped:
            self.observer.note(f"{what}: {len(skipped)} malformed lines left out")

    def _rewind(self, resumed: CheckpointInfo | None) -> None:
        """Forget what came after the checkpoint: it will be done again, to the same bits."""
        keep: dict[str, int] = {}
        if resumed is not None:
            keep = {resumed.stage: resumed.step - 1, f"evaluate/{resumed.stage}": resumed.step}
            keep[f"{resumed.stage}/{LEFT}"] = resumed.step - 1
            if resumed.stage == "rl":
                keep |= {"sft": self.config.sft.steps if self.config.sft else 0}
                keep |= {"evaluate/before": 0}
            self.observer.note(
                f"{self.folder.id}: going on after step {resumed.step} of {resumed.stage}"
            )
        self.backend.checkpoints.forget_after(resumed)
        self.metrics.rewind(keep)
        self.store.rewind(self.folder.id, keep)
        for path in self.folder.evaluations.glob("*.json"):
            stage, _, step = path.stem.rpartition("-")
            if int(step) > keep.get(f"evaluate/{stage}", -1):
                path.unlink()

    # Stages

    async def _run_stage(self, stage: Stage, resumed: CheckpointInfo | None) -> None:
        """Run a stage from its checkpoint on, or from its beginning."""
        self.backend.begin_stage(
            stage.optimizer, stage.optimizer_steps, stage.temperature, stage.algorithm
        )
        seed_random(derive_seed(self.config.seed, "stage", stage.name))  # LoRA's dropout, say
        start = 0
        if resumed is not None:
            state = self.backend.load(resumed.path)
            stage.tasks.load_state_dict(state["tasks"])
            if stage.ahead is not None:
                fresh = {"next_number": resumed.step * stage.groups_per_step, "again": []}
                stage.ahead.load_state_dict(state.get("ahead", fresh))
            elif left := state.get("ahead", {}).get("again"):
                told = f"{stage.name}: {len(left)} tasks were under way ahead of their steps"
                self.observer.note(f"{told}; rl.max_staleness is 0 now, and they are left out")
            self.timings, self.num_episodes = dict(state["timings"]), int(state["episodes"])
            start = resumed.step
            if start >= stage.steps or self._suffices(stage, state["success"]):
                return
        self.observer.stage(stage.name, stage.steps, start)
        self._budget.begin_stage()
        if over := self._budget.exceeded():  # by the sittings before
            raise BudgetSpent(over)

        async def after_step(step: int) -> bool:
            return await self._after_step(stage, step)

        stage.after_step = after_step
        self.started = self.in_stage = True
        await run_stage(stage, self.backend, self, start)
        self.in_stage = False

    async def _after_step(self, stage: Stage, step: int) -> bool:
        """Evaluate and save where it is due. Returns whether the stage goes on."""
        success: float | None = None
        every = self.config.evaluate.every
        if stage.name == "rl" and every and step % every == 0 and step < stage.steps:
            success = await self._evaluate_between(step)
        ended = step == stage.steps or self._suffices(stage, success)
        over = None if ended else self._budget.exceeded()
        if ended and stage.ahead is not None:
            self._keep_left(stage, step, await stage.ahead.close())
        if ended or over or self.stop_requested or step % self.config.checkpoint.every == 0:
            with busy("checkpoint"), self.timed("checkpoints"):
                state = {
                    "tasks": stage.tasks.state_dict(),
                    "timings": self.timings,
                    "episodes": self.num_episodes,
                    "success": success,
                }
                if stage.ahead is not None:
                    state["ahead"] = stage.ahead.state_dict()
                last = stage.name == "rl" or self.config.rl is None
                metric = self._latest.get(self.config.checkpoint.metric) if last else None
                self.backend.save(stage.name, step, state, metric, pin=ended)
                self._on_saved()
        if over:
            raise BudgetSpent(over)
        if self.stop_requested and not ended:
            raise Interrupted
        return not ended

    def _keep_left(self, stage: Stage, step: int, groups: Sequence[Group]) -> None:
        """Store what was played ahead of the stage's end, under a name of its own."""
        if groups:
            left = f"{stage.name}/{LEFT}"
            self.store.record_step(self.folder.id, left, step - 1, groups, {})
            count = sum(len(group.trajectories) for group in groups)
            self.observer.note(f"{stage.name}: {count} episodes were played ahead of its end")

    def _suffices(self, stage: Stage, success: float | None) -> bool:
        """Whether an evaluation between steps was good enough to end the stage."""
        if stage.name != "rl" or success is None or self.config.rl is None:
            return False
        wanted = self.config.rl.min_success_to_stop
        return wanted is not None and success >= wanted

    def record(
        self, stage: str, step: int, groups: Sequence[Group], metrics: dict[str, float]
    ) -> None:
        """Keep a step's results: the store first, then the sinks, then the display."""
        for name in ("rollout", "train"):
            part = f"{stage}/{name}"
            self.timings[part] = self.timings.get(part, 0.0) + metrics[f"time/{name}_s"]
        self.num_episodes += sum(len(group.trajectories) for group in groups)
        metrics["time/elapsed_s"] = sum(self.timings.values())
        metrics["rollout/episodes_total"] = float(self.num_episodes)
        metrics["rollout/dropped"] = float(
            sum(t.dropped is not None for group in groups for t in group.trajectories)
        )
        metrics |= self.meter.metrics(groups, metrics)
        left = getattr(self.config, stage).steps - step - 1
        metrics |= self._budget.step(metrics["rollout/tokens"], left)
        if self.config.verify and stage == "rl":
            metrics["rollout/verified_tokens"] = float(self._verified)
            self._verified = 0
        self._latest = metrics
        self.store.record_step(
            self.folder.id,
            stage,
            step,
            groups,
            metrics,
            seconds=metrics["time/step_s"],
            policy_version=int(metrics["train/policy_version"]),
            dropped=self._left_out if (stage, step) == ("sft", 0) else (),
        )
        self.metrics.log(stage, step, metrics)
        self.observer.step(stage, step, metrics)
        self._watch.step(stage, groups, bool(metrics["train/optimizer_steps"]))

    # Evaluation

    async def _evaluate_between(self, step: int) -> float | None:
        settings = self.config.evaluate
        result = await self.evaluate("rl", settings.num_tasks_between or settings.num_tasks, step)
        return result.success.value if result else None

    async def evaluate(self, label: str, num_tasks: int | None, step: int = 0) -> Evaluation | None:
        """Play held-out tasks and keep the result; None where there are no held-out tasks."""
        if not self.heldout:
            return None
        settings = self.config.evaluate.model_copy(update={"num_tasks": num_tasks})
        with busy("evaluate"), self.timed("evaluation"):
            groups, result = await self.play(label, step, settings)
        stage = f"evaluate/{label}"
        metrics = {"evaluate/success": result.success.value, "evaluate/score": result.score.value}
        for part in sorted({o.part for o in result.outcomes if o.part in result.tiers}):
            metrics[f"evaluate/success_{part}"] = result.tiers[part].success.value
        self._latest |= metrics
        self.store.record_step(self.folder.id, stage, step, groups, metrics, seconds=result.seconds)
        self.metrics.log(stage, step, {**metrics, "time/elapsed_s": sum(self.timings.values())})
        self.folder.evaluations.mkdir(parents=True, exist_ok=True)
        path = self.folder.evaluations / f"{label}-{step:06d}.json"
        atomic_write(path, result.model_dump_json())
        self.observer.note(str(result))
        self._budget.keep()
        return result

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the wall time of a block to a part of the run."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.timings[part] = self.timings.get(part, 0.0) + time.perf_counter() - started
