"""Build a run: config -> tasks, conversations, tokenizer, back end, collector."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from ludus.backends import BACKENDS
from ludus.backends.base import Backend
from ludus.config.schema import RunConfig
from ludus.core.errors import DataError, EpisodeError
from ludus.core.files import atomic_folder
from ludus.core.types import Task, Trajectory
from ludus.data.conversations import Conversation, read_conversations
from ludus.data.demonstrations import (
    Demonstration,
    dropped_path,
    generate_demonstrations,
    load_demonstrations,
)
from ludus.data.splits import Splits, remember
from ludus.judges import JUDGES
from ludus.models.chat.renderer import Renderer
from ludus.models.chat.tokenizers import load_tokenizer
from ludus.models.decoders import native
from ludus.models.samplers.base import Sampler
from ludus.pipeline.budget import Timings
from ludus.pipeline.progress import Observer
from ludus.pipeline.tokenizer import make_renderer, make_renderers, make_tokenizer
from ludus.rollout.collect import Collector
from ludus.store.folders import RunFolder
from ludus.telemetry.logs import get_logger
from ludus.train.checkpoint.policy import build_policy, refuse_lost_tokenizer

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Run:
    """The parts of a run, complete: it can play, evaluate and train.

    Args:
        folder: holds the run's files.
        conversations: training data of SFT.
        renderers: by part of a mixture whose parts have tools of their own.
    """

    folder: RunFolder
    config: RunConfig
    splits: Splits
    conversations: Sequence[Conversation]
    tokenizer: Any
    renderer: Renderer
    renderers: Mapping[str, Renderer]
    backend: Backend
    collector: Collector


def build(
    config: RunConfig,
    folder: RunFolder,
    splits: Splits,
    tokenizer: Any,
    conversations: Sequence[Conversation] = (),
    *,
    on_episode: Callable[[Trajectory], None] | None = None,
    on_error: Callable[[EpisodeError], object] | None = None,
    inline: bool = False,
) -> Run:
    """Build all parts of a run. The caller closes `run.backend`; an error here closes it.

    Args:
        on_episode: receives each finished trajectory.
        on_error: receives each error that ended an episode.
        inline: play in the calling thread, without deadlines: for debuggers.

    Errors: ConfigError, MissingDependency.
    """
    renderer, renderers = make_renderer(config, tokenizer), make_renderers(config, tokenizer)
    backend = BACKENDS.build(
        config.backend,
        "backend",
        make_model=partial(build_policy, config.model, tokenizer, config.seed),
        renderer=renderer,
        config=config,
        run_dir=folder.path,
    )
    with ExitStack() as opened:
        opened.callback(backend.close)
        collector = make_collector(
            config,
            backend.sampler,
            renderer,
            renderers=renderers,
            on_episode=on_episode,
            on_error=on_error,
            inline=inline,
        )
        opened.pop_all()
    return Run(
        folder=folder,
        config=config,
        splits=splits,
        conversations=conversations,
        tokenizer=tokenizer,
        renderer=renderer,
        renderers=renderers,
        backend=backend,
        collector=collector,
    )


def make_collector(
    config: RunConfig, sampler: Sampler | None, renderer: Renderer | None, **options: Any
) -> Collector:
    """Returns a collector with the environment, judge and seed of a configuration.

    `options` go to the collector; with its `endpoint`, sampler and renderer are None.
    """
    return Collector(
        sampler,
        renderer,
        config.rollout,
        config.env,
        JUDGES.build(config.judge, "judge") if config.judge else None,
        seed=config.seed,
        **options,
    )


def build_training(
    config: RunConfig, folder: RunFolder, splits: Splits, observer: Observer, timings: Timings
) -> Run:
    """Build a run that trains: make demonstrations and tokenizer unless the folder has them."""
    if config.model.device == "cpu":
        _log_native(native.absence())
    _note_skipped(observer, "tasks.train", splits.train.skipped)
    _note_skipped(observer, "tasks.heldout", splits.heldout.skipped)
    if splits.note:
        observer.note(splits.note)
    remember(splits, config, folder)
    demonstrations = _demonstrations(config, folder, splits.train, observer, timings)
    conversations, skipped = read_conversations(config, demonstrations, splits.train)
    _note_skipped(observer, "sft.data", skipped)
    if not folder.tokenizer.exists():
        refuse_lost_tokenizer(folder)
        messages = [message for item in conversations for message in item.messages]
        tokenizer = make_tokenizer(config, splits.train, messages)
        with atomic_folder(folder.tokenizer) as path:
            tokenizer.save_pretrained(path)
    tokenizer = load_tokenizer(str(folder.tokenizer))
    return build(config, folder, splits, tokenizer, conversations, on_episode=observer.episode)


def _demonstrations(
    config: RunConfig,
    folder: RunFolder,
    train: Sequence[Task],
    observer: Observer,
    timings: Timings,
) -> list[Demonstration]:
    """Returns the expert's episodes; generates them if the folder has none."""
    settings = config.demonstrations
    if settings is None or config.env is None:
        return []
    path = folder.demonstrations
    if not path.exists():
        tasks = train[: settings.num_episodes]
        observer.stage("demonstrations", len(tasks))
        with timings.timed("demonstrations"):
            summary = generate_demonstrations(
                config.env,
                tasks,
                path,
                num_workers=settings.num_workers,
                timeout_s=settings.timeout_s,
                only_successful=settings.only_successful,
                format=config.rollout.format,
                on_episode=lambda *_: observer.tick(),
            )
        observer.note(str(summary))
    if demonstrations := list(load_demonstrations(path)):
        return demonstrations
    dropped = dropped_path(path)
    first = dropped.read_text(encoding="utf-8").partition("\n")[0]
    raise DataError(f"the expert gave no demonstration; {dropped} lists the reasons: {first}")


def _log_native(absence: str) -> None:
    """Log the path of the CPU's computations: native code, or torch and the reason."""
    if absence:
        log.warning("no native code, torch computes", reason=absence, remedy=native.REMEDY)
    else:
        log.info("native code computes")


def _note_skipped(observer: Observer, source: str, lines: Sequence[object]) -> None:
    """Report malformed lines that `tasks.on_bad_line: skip` excludes."""
    for line in lines:
        log.info("malformed line skipped", source=source, line=str(line))
    if lines:
        observer.note(f"{source}: {len(lines)} malformed lines skipped")
