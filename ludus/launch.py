"""Starting, resuming and repeating runs: what stands between the command line and the pipeline."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType

from ludus import __version__
from ludus.assemble import check
from ludus.core.config import diff, dump_config, load_config
from ludus.core.errors import ConfigError, LudusError
from ludus.core.logs import get_logger, setup_logging
from ludus.core.metrics import MetricsLog
from ludus.core.schema import RunConfig
from ludus.core.sinks import build_sinks
from ludus.models.tokenizers import load_tokenizer
from ludus.pipeline import Interrupted, TrainingRun
from ludus.progress import Observer
from ludus.reporting import report
from ludus.runs import RunFolder, create_run, find_run, write_text
from ludus.store import RunStore

log = get_logger(__name__)

PACKAGES = ("torch", "transformers", "tokenizers", "peft", "numpy", "minigrid", "sqlalchemy")


class Stopped(Exception):
    """The user stopped the run; it can be resumed."""

    def __init__(self, run_id: str) -> None:
        super().__init__(f"stopped; go on with: ludus train --resume {run_id}")


def train(config: RunConfig, observer: Observer) -> RunFolder:
    """A new run, from the beginning to its report.

    Errors: Stopped after Ctrl-C; whatever LudusError ends the run.
    """
    check(config)
    folder = create_run(config.runs_dir, config.name)
    write_text(folder.config, dump_config(config))
    store = RunStore.open(config.store, config.runs_dir)
    store.create_run(folder.id, config.name, config.model_dump(mode="json"), versions())
    observer.note(f"run {folder.id} in {folder.path}")
    return _run(folder, config, store, observer)


def resume(
    run: str,
    runs_dir: str,
    observer: Observer,
    overrides: Sequence[str] = (),
    *,
    skip_damaged: bool = False,
) -> RunFolder:
    """Go on with a run where its last checkpoint stands.

    `overrides` change its configuration from here on (more steps, say); without any, the run ends
    with the same bits as if it had never stopped.
    """
    folder = find_run(runs_dir, run)
    before = load_config(folder.config)
    config = load_config(folder.config, overrides)
    check(config)
    for change in diff(before, config):
        observer.note(f"changed: {change}")
    store = RunStore.open(config.store, config.runs_dir)
    if folder.id not in {row.id for row in store.runs()}:
        store.create_run(folder.id, config.name, config.model_dump(mode="json"), versions())
    store.reopen_run(folder.id)
    write_text(folder.config, dump_config(config))
    return _run(folder, config, store, observer, skip_damaged=skip_damaged)


def _run(
    folder: RunFolder,
    config: RunConfig,
    store: RunStore,
    observer: Observer,
    *,
    skip_damaged: bool = False,
) -> RunFolder:
    """Run, and leave the run's status true whatever happens."""
    with folder.lock():
        setup_logging(folder.path)
        metrics = MetricsLog(folder.metrics, build_sinks(config, folder.path))
        run = TrainingRun(folder, config, store, metrics, observer, skip_damaged=skip_damaged)
        try:
            with _interruptible(run, observer):
                asyncio.run(run.run())
            write_text(folder.path / "timings.json", json.dumps(run.timings))
            store.finish_run(folder.id, "completed")
            if config.report:
                report(folder, store)
        except (KeyboardInterrupt, Interrupted):
            store.finish_run(folder.id, "interrupted")
            raise Stopped(folder.id) from None
        except LudusError as error:
            _fail(store, folder, str(error))
            raise
        except Exception as error:
            _fail(store, folder, f"{type(error).__name__}: {error}")
            log.exception("the run failed")
            raise
        finally:
            metrics.close()
            store.close()
            observer.close()
    return folder


def _fail(store: RunStore, folder: RunFolder, message: str) -> None:
    """Note the failure in the store, unless the store is what failed."""
    try:
        store.finish_run(folder.id, "failed", message)
    except LudusError as error:
        log.error("the run's failure could not be stored", error=str(error))


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


def open_store(runs_dir: str, store: str | None) -> RunStore:
    """The run store, for reading. Errors: ConfigError where there is none yet."""
    if store is None and not (Path(runs_dir) / "ludus.db").exists():
        raise ConfigError(f"{runs_dir} holds no runs yet: start one with `ludus train RECIPE`")
    return RunStore.open(store, runs_dir, read_only=True)


def report_again(run: str, runs_dir: str, store: str | None) -> Path:
    """Write a run's report from what is stored."""
    folder = find_run(runs_dir, run)
    config = load_config(folder.config)
    with RunStore.open(store or config.store, runs_dir, read_only=True) as opened:
        return report(folder, opened)


def decoder(run: str, runs_dir: str) -> Callable[[list[int]], str] | None:
    """Ids to text with the run's tokenizer; None where its folder is gone (a remote store)."""
    try:
        folder = find_run(runs_dir, run)
    except ConfigError:
        return None
    if not folder.tokenizer.exists():
        return None
    tokenizer = load_tokenizer(str(folder.tokenizer))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
