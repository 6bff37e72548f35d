"""Build a run: config -> tasks, conversations, tokenizer, back end, collector."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ludus.backends import BACKENDS
from ludus.backends.base import Backend
from ludus.backends.hosts import is_hosted
from ludus.config.load import load_config
from ludus.config.schema import RunConfig
from ludus.core.errors import DataError, EpisodeError
from ludus.core.files import atomic_folder
from ludus.core.modules import require
from ludus.core.system.signals import run as run_async
from ludus.core.types import Group, Spec, Task, Trajectory
from ludus.data.conversations import Conversation, functions_brought, read_conversations
from ludus.data.demonstrations import dropped_path, generate_demonstrations, load_demonstrations
from ludus.data.expert import Demonstration
from ludus.data.splits import Splits, remember
from ludus.judges import JUDGES
from ludus.models.chat.by_task import TaskRenderers
from ludus.models.chat.tokenizers import load_tokenizer
from ludus.models.decoders import native
from ludus.models.samplers.base import Sampler
from ludus.pipeline.monitoring.budget import Timings
from ludus.pipeline.monitoring.progress import Observer
from ludus.pipeline.parts.policies import open_policies
from ludus.pipeline.parts.policy_checks import check_tokenizers
from ludus.pipeline.parts.registries import check_judges
from ludus.pipeline.parts.tokenizer import (
    check_functions,
    formats_of,
    functions_of,
    make_renderers,
    make_tokenizer,
)
from ludus.pipeline.rollout_processes import start_processes
from ludus.rollout.collect import Collector, Finish
from ludus.rollout.hosts.host import LocalEnvs
from ludus.rollout.sessions.agent_session import Gateway
from ludus.rollout.tool_use import argument_of, by_address, run_tools
from ludus.rollout.workflow import Agent
from ludus.store.folders import RunFolder
from ludus.tasks.mixture import part_of, settings_of
from ludus.tasks.readers import TaskList
from ludus.tasks.splits import place_of
from ludus.telemetry.logs import get_logger
from ludus.tools.limits.limiter import Limits, is_endpoint
from ludus.train import ALGORITHMS
from ludus.train.checkpoint.policy import build_policy, refuse_lost_tokenizer

log = get_logger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Run:
    """The parts of a run, complete: it can play, evaluate and train.

    Args:
        folder: holds the run's files.
        conversations: training data of SFT.
    """

    folder: RunFolder
    config: RunConfig
    splits: Splits
    conversations: Sequence[Conversation]
    tokenizer: Any
    renderers: TaskRenderers
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
    endpoints: Sequence[str] = (),
    processes: bool = False,
) -> Run:
    """Build all parts of a run. The caller closes `run.backend`; an error here closes it.

    Args:
        on_episode: receives each finished trajectory.
        on_error: receives each error that ended an episode.
        inline: play in the calling thread, without deadlines: for debuggers.
        endpoints: URLs that a limit may name besides those of the judges.
        processes: start the processes of `rollout.processes`; `folder` has the tokenizer.

    Errors: ConfigError, MissingDependency; DataError for a task with an unknown function.
    """
    known = (conversation.task for conversation in conversations)
    check_functions(config, splits.train, splits.heldout, others=known)
    _check_consistency(config, splits.train)
    limits = make_limits(config, splits, endpoints)
    renderers = make_renderers(config, tokenizer)
    check_tokenizers(config, tokenizer)  # before a back end starts processes
    backend = BACKENDS.build(
        engine_of(config),
        "backend",
        make_model=partial(build_policy, config.model, tokenizer, config.seed),
        renderer=renderers.default,
        config=config,
        run_dir=folder.path,
    )
    with ExitStack() as opened:
        opened.callback(limits.close)
        closing = opened.enter_context(ExitStack())
        closing.callback(backend.close)
        policies = open_policies(config, backend, renderers.default, folder.path)
        closing.pop_all()
        backend = policies.backend
        opened.callback(backend.close)
        collector = make_collector(
            config,
            backend.sampler,
            renderers,
            limits,
            roles=policies.roles,
            evaluated_roles=policies.evaluated,
            endpoints=policies.endpoints,
            on_episode=on_episode,
            on_error=on_error,
            inline=inline,
            make_envs=backend.make_envs,
            host_judge=backend.host_judge,
        )
        if processes:
            collector.processes = start_processes(config, folder, backend)
        opened.pop_all()
    return Run(
        folder=folder,
        config=config,
        splits=splits,
        conversations=conversations,
        tokenizer=tokenizer,
        renderers=renderers,
        backend=backend,
        collector=collector,
    )


def engine_of(config: RunConfig) -> Spec:
    """The back end that plays and trains here: `local` where a host trains."""
    return Spec(name="local") if is_hosted(config) else config.backend


def _check_consistency(config: RunConfig, train: TaskList) -> None:
    """Errors: DataError for a task without `consistency`, where the algorithm needs it."""
    if config.rl is None:
        return
    algorithm = ALGORITHMS.build(config.rl.algorithm, "rl.algorithm")
    lacking = next((task for task in train if task.consistency is None), None)
    if lacking is not None and getattr(algorithm, "needs_consistency", False):
        raise DataError(
            f"{place_of(lacking, train.rows)} has no `consistency`, which the algorithm "
            f"{config.rl.algorithm.name} needs: set the reader's `consistency` to the field with "
            "the share of answers that agree with the task's answer"
        )


class Player:
    """Plays tasks with a model that does not train, and with the settings of its configuration.

    Make it outside of an event loop: the tools' functions are read in one.

    Its trajectories have a reward where the configuration has a judge or the tasks name one.
    """

    def __init__(
        self, config: RunConfig, on_episode: Callable[[Trajectory], None] | None = None
    ) -> None:
        """Load the model. Errors: ConfigError, MissingDependency."""
        config = config.model_copy(update={"sft": None, "rl": None, "demonstrations": None})
        tokenizer = make_tokenizer(config, (), ())
        folder, none = RunFolder(Path(os.devnull)), Splits(TaskList(), TaskList())
        self.run = build(config, folder, none, tokenizer, on_episode=on_episode)

    @classmethod
    def open(cls, path: str) -> Player:
        """Open the model of a configuration file."""
        return cls(load_config(path))

    async def __call__(
        self, tasks: Sequence[Task], label: str, step: int, k: int, first_group: int = 0
    ) -> list[Group]:
        """Play each task `k` times; returns a group for each task, in order.

        The seeds derive from label, step, place and the configuration's seed.
        """
        collector = self.run.collector.with_config(label)
        with self.run.backend.meter.rollout():
            return await collector.collect(tasks, step, k, first_group=first_group)

    async def stream(
        self,
        tasks: Iterable[Task],
        label: str,
        step: int,
        k: int,
        finish: Finish,
        first_group: int = 0,
    ) -> None:
        """Play the same episodes, and run `finish` with each complete group: `Collector.stream`."""
        collector = self.run.collector.with_config(label)
        with self.run.backend.meter.rollout():
            await collector.stream(tasks, step, k, finish, first_group)

    @classmethod
    def run_with(
        cls,
        config: RunConfig,
        play: Callable[[Player], Coroutine[Any, Any, T]],
        on_episode: Callable[[Trajectory], None] | None = None,
    ) -> T:
        """Open a player, run `play` with it in an event loop, and close it."""
        player = cls(config, on_episode)

        async def main() -> T:
            try:
                return await play(player)
            finally:
                await player.close()

        return run_async(main())

    async def close(self) -> None:
        """Release tools, judges and model."""
        try:
            await self.run.collector.close()
        finally:
            self.run.backend.close()


def make_limits(config: RunConfig, splits: Splits, endpoints: Sequence[str] = ()) -> Limits:
    """Returns the rate limits of a run: of its tools' functions, and of endpoints.

    Endpoints are those of the judges (their argument `base_url`) and `endpoints`.

    Errors: ConfigError where nothing uses a limit, or two limits have the same endpoint.
    """
    functions = [function.name for function in functions_of(config)]
    limits = by_address(config.limits)
    if not any(map(is_endpoint, limits)):
        return Limits(limits, functions)
    from ludus.models.endpoint.client import check_url

    judges = (task.judge for task in (*splits.train, *splits.heldout))
    asked = {check_url(url) for url in (*endpoints, *urls_in([config.judge, *judges]))}
    return Limits(limits, [*functions, *asked])


def urls_in(value: Any) -> Iterator[str]:
    """The endpoints in judges, whose arguments may hold other judges."""
    if isinstance(value, Spec):
        value = value.args
    if isinstance(value, Mapping):
        if isinstance(url := value.get("base_url"), str):
            yield url
        value = list(value.values())
    for part in value if isinstance(value, list) else ():
        yield from urls_in(part)


def make_collector(
    config: RunConfig,
    sampler: Sampler | None,
    renderers: TaskRenderers | None,
    limits: Limits,
    **options: Any,
) -> Collector:
    """Returns a collector with the environment, judge and seed of a configuration.

    `options` go to the collector; with its `endpoint`, sampler and renderers are None.
    """
    functions = functions_of(config)
    for part in (None, *formats_of(config)):
        if (settings := settings_of(config.rollout, part)).format == "code":
            own = config.rollout.parts.get(part or "")
            where = f"rollout.parts.{part}" if own is not None and own.markers else "rollout"
            argument_of(settings.markers.tool, functions, f"{where}.markers.tool")
    agent = Agent.build(config.agent) if config.agent else None
    judge = None
    if config.judge:
        judge = JUDGES.build(config.judge, "judge", limits=limits, make_player=Player.open)
        if (host_judge := options.get("host_judge")) is not None:
            judge = host_judge(config.judge, judge)
    return Collector(
        sampler,
        renderers,
        config.rollout,
        config.env,
        judge,
        seed=config.seed,
        limits=limits,
        tools=run_tools(config, functions, limits),
        agent=agent,
        gateway=_gateway(agent) if agent else None,
        **options,
    )


def _gateway(agent: Agent) -> Gateway:
    for package in ("fastapi", "uvicorn"):
        require(package, "serve", "an `agent`")
    from ludus.services.gateway.gateway import HttpGateway

    return HttpGateway(unix=agent.needs_socket)


def build_training(
    config: RunConfig, folder: RunFolder, splits: Splits, observer: Observer, timings: Timings
) -> Run:
    """Build a run that trains: make demonstrations and tokenizer unless the folder has them."""
    check_judges(config)
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
        tokenizer = make_tokenizer(config, splits.train, messages, functions_brought(conversations))
        with atomic_folder(folder.tokenizer) as path:
            tokenizer.save_pretrained(path)
    tokenizer = load_tokenizer(str(folder.tokenizer))
    return build(
        config,
        folder,
        splits,
        tokenizer,
        conversations,
        on_episode=observer.episode,
        processes=not is_hosted(config),
    )


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
        envs = LocalEnvs(config.env)
        tasks = [task for task in train if envs.spec_of(task)][: settings.num_episodes]
        observer.stage("demonstrations", len(tasks))
        with timings.timed("demonstrations"):
            summary = generate_demonstrations(
                config.env,
                tasks,
                path,
                num_workers=settings.num_workers,
                timeout_s=settings.timeout_s,
                only_successful=settings.only_successful,
                format=lambda task: settings_of(config.rollout, part_of(task)).format,
                mistakes=settings.mistakes,
                code_share=settings.code_share,
                tools=config.tools,
                markers=lambda task: settings_of(config.rollout, part_of(task)).markers,
                on_episode=lambda *_: observer.tick(),
            )
        observer.note(str(summary))
    try:
        demonstrations = list(load_demonstrations(path))
    except DataError as error:
        raise DataError(f"{error}; remove {path.name}, and the expert plays again") from error
    if demonstrations:
        return demonstrations
    dropped = dropped_path(path)
    first = dropped.read_text(encoding="utf-8").partition("\n")[0]
    raise DataError(f"the expert gave no demonstration; {dropped} lists the reasons: {first}")


def _log_native(absence: str) -> None:
    """Log the path of the CPU's computations: native code, or torch and the reason."""
    if absence:
        log.warning("no native code, torch computes", reason=absence, remedy=native.REMEDY)
    else:
        log.debug("native code computes")


def _note_skipped(observer: Observer, source: str, lines: Sequence[object]) -> None:
    """Report malformed lines that `tasks.on_bad_line: skip` excludes."""
    for line in lines:
        log.info("malformed line skipped", source=source, line=str(line))
    if lines:
        observer.note(f"{source}: {len(lines)} malformed lines skipped")
