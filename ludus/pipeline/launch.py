"""Starting, resuming and repeating runs: what stands between the command line and the pipeline."""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType

from ludus import __version__
from ludus.config.load import diff, dump_config, load_config, lookup
from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError, LudusError, MirrorError
from ludus.core.files import atomic_write
from ludus.pipeline import BudgetSpent, Interrupted, TrainingRun
from ludus.pipeline.assemble import check, read_splits
from ludus.pipeline.progress import Display, Observer
from ludus.report.collect import report
from ludus.store import RunExists, RunStore
from ludus.store.folders import RunFolder, create_run, find_run
from ludus.store.mirror import RunMirror, take_up
from ludus.tasks.readers import TaskList
from ludus.telemetry.logs import get_logger, setup_logging
from ludus.telemetry.metrics import MetricsLog
from ludus.telemetry.sinks import build_sinks

log = get_logger(__name__)

PACKAGES = ("torch", "transformers", "tokenizers", "peft", "numpy", "minigrid", "sqlalchemy")
DISK_FAULTS = {
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO
}  # fmt: skip


class Stopped(Exception):
    """The user, or the run's budget, stopped it; it can be resumed."""

    def __init__(self, folder: RunFolder, over: str = "") -> None:
        changed = f" {over.partition(':')[0]}=..." if over else ""
        told = f"stopped before the next step: {over}" if over else "stopped"
        super().__init__(f"{told}; go on with: {resume_command(folder)}{changed}")
        self.exit_code = 3 if over else 130


def resume_command(folder: RunFolder) -> str:
    """What to type to go on with a run."""
    elsewhere = "" if str(folder.path.parent) == "runs" else f" --runs-dir {folder.path.parent}"
    return f"ludus train --resume {folder.id}{elsewhere}"


def train(config: RunConfig, observer: Observer, *, skip_damaged: bool = False) -> RunFolder:
    """A new run, from the beginning to its report; or the one that `config.mirror` holds.

    `skip_damaged`: of the mirror's run, as in `resume`.
    Errors: Stopped after Ctrl-C; whatever LudusError ends the run.
    """
    _refuse_debug(config)
    check(config)
    if config.mirror is not None:
        with RunStore.open(config.store, config.runs_dir) as store:
            taken = take_up(config, store, observer.note, skip_damaged=skip_damaged)
        if taken is not None:
            with taken.lock():
                _go_on(taken, config, observer, skip_damaged)
            return taken
    splits = read_splits(config)
    with RunStore.open(config.store, config.runs_dir) as store:
        folder = _begin(config, store)
        with folder.lock():
            observer.note(f"run {folder.id} in {folder.path}")
            _run(folder, config, splits, store, observer)
    return folder


def resume(
    run: str,
    runs_dir: str,
    observer: Observer,
    overrides: Sequence[str] = (),
    *,
    skip_damaged: bool = False,
) -> RunFolder:
    """Go on with a run where its last checkpoint stands; a complete one is left as it is.

    `overrides` change its configuration from here on (more steps, say); without any, the run ends
    with the same bits as if it had never stopped.
    """
    folder = find_run(runs_dir, run)
    with folder.lock():
        _go_on(folder, load_config(folder.config, overrides), observer, skip_damaged)
    return folder


def _go_on(folder: RunFolder, config: RunConfig, observer: Observer, skip_damaged: bool) -> None:
    """Resume a run that this process has locked, with `config` in place of its own."""
    before = load_config(folder.config)
    _refuse_debug(config)
    check(config)
    changes = [key for key in diff(before, config) if key != "runs_dir"]  # where, not what
    for key in changes:
        observer.note(f"changed: {key} from {lookup(before, key)} to {lookup(config, key)}")
    with RunStore.open(config.store, folder.path.parent) as store:
        known = {row.id: row for row in store.runs()}
        if folder.id not in known:
            _create(store, folder, config)
        elif known[folder.id].status == "completed" and not changes:
            observer.note(f"run {folder.id} was complete already: nothing is left to do")
            return
        splits = read_splits(config)
        store.reopen_run(folder.id)
        with disk_faults(folder):
            atomic_write(folder.config, dump_config(config))
        _run(folder, config, splits, store, observer, before=before, skip_damaged=skip_damaged)


def _refuse_debug(config: RunConfig) -> None:
    if config.backend == "debug":
        raise ConfigError("backend: debug trains nothing and leaves no run; use `ludus debug`")


def _begin(config: RunConfig, store: RunStore) -> RunFolder:
    """A folder and a row of the first number that is free in both: a store may be shared."""
    while True:
        folder = create_run(config.runs_dir, config.name, store.run_ids())
        with disk_faults(folder):
            atomic_write(folder.config, dump_config(config))
        try:
            _create(store, folder, config)
        except RunExists:  # from another runs_dir, a moment ago
            shutil.rmtree(folder.path)
        else:
            return folder


def _create(store: RunStore, folder: RunFolder, config: RunConfig) -> None:
    store.create_run(folder.id, config.name, config.model_dump(mode="json"), versions())


def _run(
    folder: RunFolder,
    config: RunConfig,
    splits: tuple[TaskList, TaskList],
    store: RunStore,
    observer: Observer,
    *,
    before: RunConfig | None = None,
    skip_damaged: bool = False,
) -> None:
    """Run in a folder that this process has locked; the run's status is true whatever happens.

    `before`: the configuration that stays the run's if it fails before a step of the new one.
    """
    setup_logging(folder.path, observer.console if isinstance(observer, Display) else None)
    run: TrainingRun | None = None
    mirror: RunMirror | None = None
    try:
        with disk_faults(folder), MetricsLog(folder.metrics, build_sinks(config, folder.path)) as m:
            mirror = _mirror(folder, config, store, observer)
            run = TrainingRun(
                folder,
                config,
                store,
                m,
                observer,
                skip_damaged=skip_damaged,
                on_saved=mirror.after_checkpoint if mirror else lambda: None,
            )
            with _interruptible(run, observer):
                run.run(*splits)
            atomic_write(folder.path / "timings.json", json.dumps(run.timings))
            if config.report:
                report(folder, store)
            store.finish_run(folder.id, "completed")
            if mirror is not None:
                mirror.push()
    except (KeyboardInterrupt, Interrupted) as stop:
        over = str(stop) if isinstance(stop, BudgetSpent) else ""
        _finish(store, folder, "interrupted", over or None)
        if mirror is not None:
            mirror.push()
        raise Stopped(folder, over) from None
    except LudusError as error:
        _finish(store, folder, "failed", str(error))
        if before is not None and (run is None or not run.started):
            with suppress(OSError):
                atomic_write(folder.config, dump_config(before))
        observer.note(f"run {folder.id} failed; once that is mended: {resume_command(folder)}")
        if mirror is not None and not isinstance(error, MirrorError):
            with suppress(MirrorError):  # the first error is the one to tell
                mirror.push()
        raise
    except Exception as error:
        _finish(store, folder, "failed", f"{type(error).__name__}: {error}")
        log.exception("the run failed")
        raise
    finally:
        observer.close()
        setup_logging()  # what follows in this process is not the run's


def _mirror(
    folder: RunFolder, config: RunConfig, store: RunStore, observer: Observer
) -> RunMirror | None:
    """The run's mirror, which has taken the run's beginning: so a wrong URL fails at once."""
    if config.mirror is None:
        return None
    rows = config.store is None or config.store.startswith("sqlite")
    mirror = RunMirror(config.mirror, folder, store, rows, observer.note)
    mirror.push()
    return mirror


def _finish(store: RunStore, folder: RunFolder, status: str, message: str | None = None) -> None:
    """Note how the run ended in the store, unless the store is what failed."""
    try:
        store.finish_run(folder.id, status, message)
    except LudusError as error:
        log.error("the end of the run could not be stored", status=status, error=str(error))


@contextmanager
def disk_faults(folder: RunFolder) -> Iterator[None]:
    """What the disk refuses is the user's to mend, not a bug of ours.

    Errors: LudusError in place of an OSError that says so.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FAULTS:
            raise
        raise LudusError(
            f"{error.filename or folder.path}: {error.strerror}. What was saved before is intact: "
            "make room, or mend the rights, and resume the run"
        ) from error


@contextmanager
def _interruptible(run: TrainingRun, observer: Observer) -> Iterator[None]:
    """The first Ctrl-C inside a stage ends it after the step under way; any other stops at once."""

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        if run.in_stage and not run.stop_requested:
            run.stop_requested = True
            observer.note("finishing this step, then saving; Ctrl-C again stops at once")
        else:
            raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGINT, on_interrupt)
    except ValueError:  # not the main thread: whoever runs us handles signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def versions() -> dict[str, str]:
    """The machine, Python, and the packages that results depend on."""
    facts = {
        "ludus": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": str(os.cpu_count()),
    }
    for package in PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    return facts


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def report_again(run: str, runs_dir: str, store: str | None) -> Path:
    """Write a run's report from what is stored."""
    folder = find_run(runs_dir, run)
    config = load_config(folder.config)
    url = store or config.store
    with (
        RunStore.open(url, folder.path.parent, read_only=True) as opened,
        disk_faults(folder),
    ):
        return report(folder, opened)
