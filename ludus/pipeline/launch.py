"""Start and resume runs; record how they end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from itertools import chain

import torch

from ludus.backends import BACKENDS
from ludus.config.load import diff, dump_config, lookup
from ludus.config.messages import show
from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError, LudusError, MirrorError
from ludus.core.files import atomic_write
from ludus.core.modules import told
from ludus.core.system.signals import exit_code, handling, raise_stop, run
from ludus.data.splits import Splits, read_splits
from ludus.evaluate.results import read_evaluation
from ludus.models.decoders import native
from ludus.pipeline.breakpoints import patient
from ludus.pipeline.build import Run, build_training
from ludus.pipeline.changes import losses, refuse_changes, refuse_lost_checkpoints, require_files
from ludus.pipeline.hosted import check_host, trainer_of
from ludus.pipeline.monitoring.budget import Budget, Timings
from ludus.pipeline.monitoring.live import LiveRecord
from ludus.pipeline.monitoring.notify import notifying, resolved_urls
from ludus.pipeline.monitoring.progress import Display, Observer
from ludus.pipeline.parts.checks import check
from ludus.pipeline.parts.companions import PLAIN, LaunchOptions, check_options, companions
from ludus.pipeline.parts.policy_checks import check_policies
from ludus.pipeline.parts.versions import code_changes, versions, write_code
from ludus.pipeline.preflight.parts import check_parts
from ludus.pipeline.preflight.preflight import preflight
from ludus.pipeline.training import BudgetSpent, Trainer
from ludus.report.collect import report
from ludus.store import RunExists, RunStore
from ludus.store.folders import (
    RunFolder,
    check_runs_dir,
    create_run,
    disk_faults,
    find_run,
    read_facts,
    resume_command,
)
from ludus.store.mirror import RunMirror, fetch_run
from ludus.store.processes import recorded_processes
from ludus.store.settings import run_config
from ludus.telemetry.logs import get_logger, setup_logging
from ludus.telemetry.metrics import MetricsLog
from ludus.telemetry.sinks import build_sinks
from ludus.telemetry.span_export import exported
from ludus.train.checkpoint.listing import list_checkpoints

log = get_logger(__name__)


class Stopped(Exception):
    """The user, or the run's budget, stopped the run; it can be resumed."""

    def __init__(self, folder: RunFolder, stop: KeyboardInterrupt | BudgetSpent) -> None:
        exceeded = str(stop) if isinstance(stop, BudgetSpent) else ""
        override = f" {exceeded.partition(':')[0]}=..." if exceeded else ""
        reason = f"stopped before the next step: {exceeded}" if exceeded else "stopped"
        super().__init__(f"{reason}; resume with: {resume_command(folder)}{override}")
        self.exceeded = exceeded
        self.exit_code = 3 if isinstance(stop, BudgetSpent) else exit_code(stop)


def train(
    config: RunConfig,
    observer: Observer,
    *,
    skip_damaged: bool = False,
    options: LaunchOptions = PLAIN,
) -> RunFolder:
    """Train a new run, or the run that `config.mirror` holds, up to its report.

    `skip_damaged` applies to the mirror's run, as in `resume`.

    Errors: Stopped after Ctrl-C or SIGTERM, or where the budget is spent; LudusError.
    """
    _check_all(config, options, observer.note)
    urls = resolved_urls(config.notify, observer.note)
    if config.mirror is not None:
        with RunStore.open(config.store, config.runs_dir) as store:
            mirrored = fetch_run(config, store, observer.note, skip_damaged=skip_damaged)
        if mirrored is not None:
            with mirrored.lock():
                _resume(mirrored, config, observer, skip_damaged, options)
            return mirrored
    check_runs_dir(config.runs_dir)
    splits = read_splits(config)
    preflight(config, splits, options, observer.note)
    with RunStore.open(config.store, config.runs_dir) as store:
        folder = _create_run(config, store)
        with folder.lock():
            observer.note(f"run {folder.id} in {folder.path}; all settings: {folder.config}")
            with (
                _attended(folder, store, urls, observer),
                _recorded(folder, config, splits, store, observer, options) as trainer,
            ):
                run(trainer.train(), trainer.finish_step)
    return folder


def resume(
    run_id: str,
    runs_dir: str,
    observer: Observer,
    overrides: Sequence[str] = (),
    *,
    skip_damaged: bool = False,
    options: LaunchOptions = PLAIN,
) -> RunFolder:
    """Resume a run from its last checkpoint; a complete run stays as it is.

    `overrides` change its configuration from here on (more steps, say). Without overrides, the run
    ends with the same bits as if it had never stopped.
    """
    folder = find_run(runs_dir, run_id)
    with folder.lock():
        _resume(folder, run_config(folder, overrides), observer, skip_damaged, options)
    return folder


def _resume(
    folder: RunFolder,
    config: RunConfig,
    observer: Observer,
    skip_damaged: bool,
    options: LaunchOptions,
) -> None:
    """Resume a run that this process has locked, with `config` in place of its own."""
    require_files(folder)
    before = run_config(folder)
    _check_all(config, options, observer.note)
    urls = resolved_urls(config.notify, observer.note)
    changes = [key for key in diff(before, config) if key != "runs_dir"]  # a location, no setting
    for key in changes:
        old, new = (show(lookup(c, key), bare=True, width=200) for c in (before, config))
        observer.note(f"changed: {key} from {old} to {new}")
    with RunStore.open(config.store, folder.path.parent) as store:
        refuse_changes(folder, before, config, changes)
        row = next((row for row in store.runs() if row.id == folder.id), None)
        complete = row is not None and row.status == "completed"
        if complete and not changes:
            observer.note(f"run {folder.id} was complete already: nothing to do")
            return
        refuse_lost_checkpoints(folder, before, complete=complete)
        for loss in losses(folder, known=row is not None):
            observer.note(loss)
        for change in code_changes(config, folder):
            observer.note(
                f"changed since the run started: {change}; earlier results are of the old"
            )
        for *_, path in folder.evaluation_files():
            read_evaluation(path)  # a damaged one would end the run after its training
        read_facts(folder.path / "timings.json")
        splits = read_splits(config, folder)
        if not list_checkpoints(folder.checkpoints):
            check_parts(config, folder)
        if row is None:  # after all checks: a refused resume leaves no row that says "running"
            _insert_row(store, folder, config)
        store.reopen_run(folder.id)
        with disk_faults(folder):
            atomic_write(folder.config, dump_config(config))
        with (
            _attended(folder, store, urls, observer),
            _recorded(
                folder,
                config,
                splits,
                store,
                observer,
                options,
                before=before,
                complete=complete,
                skip_damaged=skip_damaged,
            ) as trainer,
        ):
            run(trainer.train(), trainer.finish_step)


def _check_all(config: RunConfig, options: LaunchOptions, note: Callable[[str], None]) -> None:
    """Check a configuration before a run is created.

    Errors: ConfigError for a fault of its own, and for keys that the back end or the host cannot
    honour.
    """
    if config.backend.name == "debug":
        raise ConfigError("backend: debug trains nothing and leaves no run; use `ludus debug`")
    refuse = getattr(BACKENDS.load(config.backend.name), "refuse", None)
    check_policies(config)
    if refuse is not None:
        refuse(config, BACKENDS.check(config.backend, "backend"))
    check(config)
    check_options(options, config.env)
    check_host(config, options, note)


def _create_run(config: RunConfig, store: RunStore) -> RunFolder:
    """Create folder and row with the first number free in both; a store may be shared."""
    while True:
        folder = create_run(config.runs_dir, config.name, dump_config(config), store.run_ids())
        try:
            _insert_row(store, folder, config)
        except RunExists:  # another runs_dir took the number meanwhile
            shutil.rmtree(folder.path)
        else:
            return folder


def _insert_row(store: RunStore, folder: RunFolder, config: RunConfig) -> None:
    facts = versions()
    facts["threads"] = str(config.threads or torch.get_num_threads())
    if config.model.device == "cpu":
        absence = native.absence()
        facts["native code"] = f"none, torch computes: {absence}" if absence else "compiled"
    if config.sampler.name == "in_process" and config.sampler.args.get("dtype") == "bfloat16":
        facts["sampler's weights"] = "its own, in bfloat16"
    store.create_run(folder.id, config.name, config.model_dump(mode="json"), facts)


@contextmanager
def _attended(
    folder: RunFolder, store: RunStore, urls: Sequence[str], observer: Observer
) -> Iterator[None]:
    """Record the run's processes, and end those that an earlier process of the run left; tell the
    URLs how the run ends."""
    with recorded_processes(folder) as left, notifying(folder, store, urls, observer.note):
        if left:
            observer.note(f"ended what the run had left: {', '.join(map(str, left))}")
        yield


@contextmanager
def _recorded(
    folder: RunFolder,
    config: RunConfig,
    splits: Splits,
    store: RunStore,
    observer: Observer,
    options: LaunchOptions,
    *,
    before: RunConfig | None = None,
    complete: bool = False,
    skip_damaged: bool = False,
) -> Iterator[Trainer]:
    """Build the trainer of a folder that this process has locked; record how the training ends.

    `before`: the configuration to restore if the run fails before its first step with `config`.
    `complete`: the run was; it stays so if it fails before any result was discarded.
    """
    console = observer.console if isinstance(observer, Display) else None
    observer = LiveRecord(folder.live, observer)
    trainers: list[Trainer] = []
    mirror: RunMirror | None = None
    budget: Budget | None = None

    def finish(status: str, message: str | None = None) -> None:
        elapsed_s = None if budget is None else budget.spent.seconds
        _finish(store, folder, status, message, elapsed_s)

    def fail(message: str) -> None:
        intact = complete and not any(trainer.rewound for trainer in trainers)
        finish(*(("completed",) if intact else ("failed", message)))
        if before is not None and not any(trainer.started for trainer in trainers):
            with suppress(OSError):
                atomic_write(folder.config, dump_config(before))
        if intact:
            observer.note(f"run {folder.id} stays as it was: complete")
        elif not folder.removed:
            observer.note(f"run {folder.id} failed; once that is fixed: {resume_command(folder)}")

    try:
        setup_logging(folder.path, console)
        with (
            disk_faults(folder),
            MetricsLog(folder.metrics, build_sinks(config, folder.path)) as m,
            exported(config.traces, run=folder.id, model=_model_name(config)),
            ExitStack() as opened,
        ):
            budget, timings = Budget(config.budget, folder.budget), Timings()
            mirror = _mirror(folder, config, store, observer)
            on_saved = mirror.after_checkpoint if mirror else lambda: None
            with handling(raise_stop):  # a script starts background jobs with SIGINT ignored
                played = patient(config) if options.patient else config
                beside = opened.enter_context(companions(options, played, folder, observer.note))

                def make() -> Run:
                    built = build_training(played, folder, splits, observer, timings)
                    tasks = chain(splits.train, splits.heldout)
                    return replace(built, collector=beside.attach(built.collector, tasks))

                built, make_trainer = make(), trainer_of(config, make)
                with closing(built.backend):
                    on_saved()
                    trainers.append(
                        make_trainer(
                            built, store, m, observer, budget, timings, on_saved, skip_damaged
                        )
                    )
                    write_code(config, folder)
                    yield trainers[0]
            timings.add("other", max(budget.spent.seconds - timings.total, 0.0))
            atomic_write(folder.path / "timings.json", json.dumps(timings.seconds))
            if config.report:
                report(folder, store)
            budget.keep()
            store.finish_run(folder.id, "completed", elapsed_s=budget.spent.seconds)
            if mirror is not None:
                mirror.push()
    except (KeyboardInterrupt, BudgetSpent) as stop:
        stopped = Stopped(folder, stop)
        finish("interrupted", stopped.exceeded or None)
        if mirror is not None and not any(trainer.stops_at_once for trainer in trainers):
            with suppress(KeyboardInterrupt):  # another signal ends the upload
                mirror.push()
        raise stopped from None
    except LudusError as error:
        fail(str(error))
        if mirror is not None and not isinstance(error, MirrorError):
            with suppress(MirrorError):  # the first error counts
                mirror.push()
        raise
    except SystemExit as error:  # a user's code: its exit code 0 would tell of a success
        fail(told(error))
        raise LudusError(
            f"run {folder.id} failed: {told(error)}: code that ludus calls must not exit"
        ) from error
    except Exception as error:
        fail(f"{type(error).__name__}: {error}")
        log.exception("the run failed")
        raise
    finally:
        observer.close()
        setup_logging()  # later log lines of this process do not belong to the run


def _model_name(config: RunConfig) -> str:
    architecture = config.model.architecture
    return config.model.path or (architecture.name if architecture else config.name)


def _mirror(
    folder: RunFolder, config: RunConfig, store: RunStore, observer: Observer
) -> RunMirror | None:
    """Returns the run's mirror after a first push, so that a wrong URL fails at once."""
    if config.mirror is None:
        return None
    rows = config.store is None or config.store.startswith("sqlite")
    mirror = RunMirror(config.mirror, folder, store, rows, observer.note)
    mirror.push()
    return mirror


def _finish(
    store: RunStore,
    folder: RunFolder,
    status: str,
    message: str | None,
    elapsed_s: float | None,
) -> None:
    """Record how the run ended, unless the store itself failed. Another signal waits."""
    try:
        with handling(lambda _: None):
            store.finish_run(folder.id, status, message, elapsed_s)
    except LudusError as error:
        log.error("cannot record the end of the run", status=status, error=str(error))
