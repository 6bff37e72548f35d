"""Train a run whose RL is in a host's hands (`backends.hosts`).

SFT, evaluation    here, with the local back end
RL                 in the host: its process plays and trains; steps are recorded here
evaluation         here, with the weights that the host left
"""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM

from ludus.backends.base import Backend
from ludus.backends.hosted import (
    EPISODES,
    EpisodesReader,
    HostedGroup,
    LinesReader,
    StepsReader,
)
from ludus.backends.hosts import HostPlay, is_hosted, open_host
from ludus.backends.local import LocalBackend
from ludus.config.schema import RLConfig, RunConfig
from ludus.core.errors import ConfigError, LudusError, TrainingError
from ludus.core.files import atomic_write, remove_folder
from ludus.core.seeds import derive_seed
from ludus.core.types import Group, Task
from ludus.loop.loop import annotated, credit_by_role, run_stage
from ludus.loop.metrics import group_metrics, part_metrics
from ludus.models.chat.template import load_template
from ludus.models.progress_bars import no_progress_bars
from ludus.models.vocabulary import fingerprint
from ludus.pipeline.build import Run
from ludus.pipeline.evaluation.evaluate import summarised
from ludus.pipeline.parts.companions import LaunchOptions
from ludus.pipeline.parts.host_process import HostProcess, running
from ludus.pipeline.training import BudgetSpent, Trainer
from ludus.rollout.source import require_fresh
from ludus.tasks.mixture import task_sampler
from ludus.train import ALGORITHMS
from ludus.train.checkpoint.export import export_hf
from ludus.train.checkpoint.state import random_state
from ludus.train.meter import memory

OPENER = "ludus.pipeline.hosted_worker:open_collector"
POLL_S = 0.1
PROGRESS = "progress.jsonl"


def check_host(config: RunConfig, options: LaunchOptions, note: Callable[[str], None]) -> None:
    """Check a configuration with its host, and tell the user what is adapted.

    Errors: ConfigError for keys that the host cannot honour, or without its environment.
    """
    if not is_hosted(config):
        return
    host = open_host(config)
    name = host.name
    if options.patient:
        raise ConfigError(f"--break: episodes are played in the workers of {name}; use local")
    if options.env_service is not None:
        raise ConfigError(
            f"--with-env-service: the workers of {name} play; start `ludus serve env` yourself, "
            "and use the environment `remote`"
        )
    for text in host.check(config):
        note(f"{name}: {text}")


class HostTrainer(Trainer):
    """Trains one run with a host, from the newest checkpoint, or from the start.

    Args:
        rebuild: builds the run again, after the host has trained: its model is not kept in memory
            meanwhile.
    """

    def __init__(self, run: Run, *args: Any, rebuild: Callable[[], Run]) -> None:
        super().__init__(run, *args)
        self._rebuild = rebuild
        self._host = open_host(run.config)
        self._own = run.folder.path / self._host.name
        self._waiting: list[HostedGroup] = []

    @property
    def _rl(self) -> RLConfig:
        assert self.run.config.rl is not None
        return self.run.config.rl

    async def train(self) -> None:
        """Run what is left of SFT, RL and the evaluations.

        Errors: BudgetSpent; LudusError, also where the host's process fails.
        """
        config, steps = self.run.config, self._rl.steps
        try:
            done = min(self._host.steps_done(self._own), steps)
            if done:
                self._continue(done)
            else:
                await self._begin()
            self._release()
            if done < steps:
                await self._train_rl(done)
            self._take_weights(steps)
            await self._evaluate("after", config.evaluate.num_tasks)
        finally:
            self._budget.keep()
            await self.run.collector.close()
            self.run.backend.close()

    # Before RL

    async def _begin(self) -> None:
        """Train SFT, evaluate, and write the model for the host."""
        if self._own.exists():
            remove_folder(self._own)
        config, backend = self.run.config, self.run.backend
        found = [info for info in backend.checkpoints.list() if info.stage == "sft"]
        resumed = found[-1] if found else None
        keep: dict[str, int] = {}
        if resumed is None:
            self._rewind(None, keep)
        else:
            keep = {"sft": resumed.step - 1, "evaluate/start": 0}
            self._observer.note(f"{self.run.folder.id}: resuming after step {resumed.step} of sft")
        if config.sft is not None:
            await self._evaluate_before_sft(resumed)
            stage, start = self._begin_stage("sft", resumed)
            if resumed is not None:
                self._rewind(resumed, keep)
            if start < stage.steps:
                self.started = self._in_stage = True
                await run_stage(stage, backend, self, start)
                self._in_stage = False
        await self._evaluate("before", config.evaluate.num_tasks)
        self._write_job()

    def _write_job(self) -> None:
        """Write the model that RL starts from."""
        run, template = self.run, self.run.config.model.chat_template
        backend = cast(LocalBackend, run.backend)
        self._own.mkdir(exist_ok=True)
        export_hf(
            backend.model,
            run.tokenizer,
            self._own / "model",
            overwrite=True,
            chat_template=load_template(template) if template else None,
            stop_token_ids=run.renderers.default.stop_token_ids,
            name=f"{run.folder.id}, before RL",
        )

    def _continue(self, done: int) -> None:
        """Continue after `done` RL steps: forget the results of later ones."""
        config, checkpoints = self.run.config, self.run.backend.checkpoints
        found = [info for info in checkpoints.list() if info.stage == "sft"]
        keep = {"rl": done - 1, "evaluate/rl": done, "evaluate/before": 0}
        keep["evaluate/start"] = 0
        keep["sft"] = config.sft.steps if config.sft else 0
        self._observer.note(f"{self.run.folder.id}: resuming after step {done} of rl")
        self._rewind(found[-1] if found else None, keep)
        self._restore(done)
        self._recover(done)

    def _release(self) -> None:
        """Free the model's memory: the host needs it."""
        run = self.run
        run.backend.close()
        collector = replace(run.collector, sampler=None)
        without = cast(Backend, _Released())
        self.run = replace(run, backend=without, collector=collector)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # RL

    async def _train_rl(self, done: int) -> None:
        """Run the host's process, and record its steps."""
        config, steps = self.run.config, self._rl.steps
        play = HostPlay(
            run=self.run.folder.path.resolve(),
            model=(self._own / "model").resolve(),
            env=self.run.collector.env,
            train=self._write_tasks("train", self._training_tasks()),
            heldout=self._write_tasks("heldout", self._heldout() or self.run.splits.train[:1]),
            opener=OPENER,
            evaluate_first=self._lacks_evaluation(done),
        )
        job = self._host.prepare(config, self._own.resolve(), play)
        shutil.rmtree(job.episodes, ignore_errors=True)
        job.steps.unlink(missing_ok=True)
        self._observer.stage("rl", steps, done)
        self._budget.begin_stage()
        if exceeded := self._budget.exceeded():
            raise BudgetSpent(exceeded)
        self.started = True
        self._observer.note(f"{self._host.name} starts: {job.log}")
        episodes, lines = EpisodesReader(job.episodes), StepsReader(job.steps)
        with running(job, self._host.name) as process:
            while True:
                code = process.exit_code  # before the last reading
                complete = lines.steps()  # before the episodes, which were written before
                self._receive(episodes.groups())
                for number, values in complete:
                    self._complete(number, values)
                    done = max(done, number)
                if code is not None:
                    break
                await asyncio.sleep(POLL_S)
            if code or done < steps:
                raise self._failure(process, code, done)
        shutil.rmtree(job.episodes, ignore_errors=True)

    def _failure(self, process: HostProcess, code: int, done: int) -> LudusError:
        where = f"after step {done} of {self._rl.steps}"
        text = f"rl: {self._host.name} ended with exit code {code} {where}"
        failed = [t.dropped or t.error for g in self._waiting for t in g.group.trajectories]
        reasons = [reason for reason in failed if reason]
        if reasons and len(reasons) == len(failed):
            text += f"; all episodes of the next step had failed: {reasons[0]}"
        return LudusError(f"{text}; {process.errors()}")

    def _receive(self, groups: Sequence[HostedGroup]) -> None:
        self._waiting += groups
        for hosted in groups:
            for trajectory in hosted.group.trajectories:
                self._observer.episode(trajectory)

    def _take(self, stage: str, step: int) -> list[Group]:
        """Take the groups of a step from those that were received, in their order."""
        taken = [g.group for g in self._waiting if (g.stage, g.step) == (stage, step)]
        self._waiting = [g for g in self._waiting if (g.stage, g.step) != (stage, step)]
        return sorted(taken, key=lambda group: group.id)

    def _complete(self, number: int, values: Mapping[str, Any]) -> None:
        """Record a complete step of the host, the first of which is 1; 0 is an evaluation."""
        heldout = self._take("evaluate/rl", number)
        if number and (groups := self._take("rl", number - 1)):
            self._record_rl(groups, number, self._host.metrics(values))
            self._remember(number)
        if heldout:
            self._record_heldout(heldout, number)
        if number < self._rl.steps and (exceeded := self._budget.exceeded()):
            raise BudgetSpent(exceeded)

    def _record_rl(self, groups: list[Group], number: int, trained: dict[str, float]) -> None:
        require_fresh(groups, number - 1, 0)
        algorithm = ALGORITHMS.build(self._rl.algorithm, "rl.algorithm")
        screening = algorithm.screen(groups)
        # Terms that the host computes itself (importance, KL) are left out here.
        plain = replace(algorithm, importance=None, reference=None)
        credited = credit_by_role(plain, screening.groups)
        steps = self._rl.epochs * self._rl.minibatches if credited.pairs else 0
        metrics = group_metrics(groups) | part_metrics(groups) | {"rollout/rounds": 1.0} | trained
        seconds = metrics.setdefault("time/step_s", 0.0)  # 0: a step whose metrics were lost
        metrics.setdefault("time/rollout_s", 0.0)
        metrics.setdefault("time/train_s", 0.0)
        metrics |= {
            "train/optimizer_steps": float(steps),
            "train/policy_version": float(number),
            "time/tokens_per_s": metrics["rollout/tokens"] / seconds if seconds else 0.0,
            "time/wall_s": seconds,
        }
        shown = annotated(groups, credited, screening.excluded)
        self.record("rl", number - 1, shown, metrics)

    def _machine_metrics(
        self, groups: Sequence[Group], metrics: Mapping[str, float]
    ) -> dict[str, float]:
        if "time/sample_s" not in metrics:  # the host's devices computed it
            return memory(torch.device("cpu"))
        return super()._machine_metrics(groups, metrics)

    def _record_heldout(self, groups: list[Group], number: int) -> None:
        run, settings = self.run, self.run.config.evaluate
        tasks = [group.task for group in groups]
        result = summarised(
            groups, run.collector, tasks, run.config.env, settings, "rl", number, 0.0
        )
        result = result.model_copy(update={"policy_version": number})
        self._record_evaluation("rl", number, groups, result)

    def _training_tasks(self) -> list[Task]:
        """The tasks of all steps, in the order of `local`."""
        run, train, rl = self.run, self.run.splits.train, self._rl
        sampler = task_sampler(
            train,
            derive_seed(run.config.seed, "rl"),
            shuffle=run.config.tasks.shuffle,
            ratios=train.ratios,
            batch_size=rl.groups_per_step,
            distinct=train.distinct,
        )
        return list(islice(sampler, rl.steps * rl.groups_per_step))

    def _heldout(self) -> list[Task]:
        """The tasks of the evaluations between steps."""
        evaluate = self.run.config.evaluate
        return self.run.splits.heldout[: evaluate.num_tasks_between or evaluate.num_tasks]

    def _write_tasks(self, name: str, tasks: Sequence[Task]) -> Path:
        path = self._own.resolve() / f"{name}.jsonl"
        lines = (task.model_dump_json(exclude_defaults=True) + "\n" for task in tasks)
        atomic_write(path, "".join(lines))
        return path

    # Progress of earlier processes: the host's checkpoints have none of it

    def _remember(self, number: int) -> None:
        """Note the progress after a step; one line is written at once."""
        progress = {"timings": dict(self.timings.seconds), "episodes": self._num_episodes}
        line = json.dumps({"step": number, **progress}) + "\n"
        with (self._own / PROGRESS).open("a", encoding="utf-8") as file:
            file.write(line)

    def _restore(self, done: int) -> None:
        """Restore the progress after `done` steps, or what is known of fewer."""
        lines = LinesReader().lines(self._own / PROGRESS)
        known = [line for line in map(json.loads, lines) if line["step"] <= done]
        if known:
            self.timings.restore(known[-1]["timings"])
            self._num_episodes = int(known[-1]["episodes"])

    def _recover(self, done: int) -> None:
        """Record the last step of the host's checkpoint where the run ended between its save and
        its record: the workers' files have its episodes, its metrics of training are lost."""
        recorded = [row.step for row in self._store.steps(self.run.folder.id) if row.stage == "rl"]
        if done - 1 in recorded:
            return
        self._waiting = EpisodesReader(self._own / EPISODES).groups()
        if groups := self._take("rl", done - 1):
            self._record_rl(groups, done, {})
            self._remember(done)
        self._waiting = []

    def _lacks_evaluation(self, done: int) -> bool:
        """True where the run ended between a step's checkpoint and its evaluation."""
        config, store = self.run.config, self._store
        every = config.evaluate.every if config.tasks.heldout is not None else 0
        recorded = {(row.stage, row.step) for row in store.steps(self.run.folder.id)}
        return bool(done and every) and done % every == 0 and ("evaluate/rl", done) not in recorded

    # After RL

    def _take_weights(self, steps: int) -> None:
        """Build the run again, with the host's last weights, and save them as a checkpoint."""
        path = self._host.weights(self._own, steps)
        self.run = run = self._rebuild()
        backend = cast(LocalBackend, run.backend)
        with no_progress_bars():
            trained = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        try:
            backend.model.load_state_dict(trained.state_dict())
        except RuntimeError as error:
            raise TrainingError(f"{path}: not the weights of this run: {error}") from error
        state = {
            "loop": {"timings": dict(self.timings.seconds), "episodes": self._num_episodes},
            "optimizer_step": 0,
            "policy_version": steps,
            "random": random_state(),
            "tokenizer": fingerprint(run.tokenizer),
        }
        saved = backend.checkpoints.save("rl", steps, model=backend.model, state=state, pin=True)
        backend.load_weights(saved)
        self._saved = "rl", steps
        self._on_saved()


class _Released:
    """In place of the back end while the host trains."""

    def close(self) -> None:
        """Nothing is open."""


def trainer_of(config: RunConfig, rebuild: Callable[[], Run]) -> Callable[..., Trainer]:
    """Returns what makes the trainer of a configuration."""
    return partial(HostTrainer, rebuild=rebuild) if is_hosted(config) else Trainer
