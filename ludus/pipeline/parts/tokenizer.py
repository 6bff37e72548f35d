"""Tokenizer and renderers of a run; texts that a new tokenizer is trained on."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

from ludus.config.schema import MarkersConfig, RunConfig
from ludus.core.errors import ConfigError, DataError, EnvError, EpisodeError
from ludus.core.system.signals import run
from ludus.core.types import NO_ENV, Message, Spec, Task, ToolSpec
from ludus.envs import ENVS
from ludus.envs.base import Env
from ludus.models import TOKENIZERS
from ludus.models.chat.by_task import TaskRenderers
from ludus.models.chat.renderer import Renderer
from ludus.models.chat.tokenizers import load_tokenizer, train_tokenizer
from ludus.pipeline.parts.registries import parts_of
from ludus.rollout.hosts.host import HostedEnv, LocalEnvs
from ludus.rollout.hosts.threads import EnvThread
from ludus.rollout.tool_use import joined_functions, read_functions, unknown_function
from ludus.tasks.mixture import parts_of_mixture, settings_of
from ludus.tasks.readers import TaskList
from ludus.tasks.splits import place_of
from ludus.telemetry.logs import get_logger

log = get_logger(__name__)

NUM_SAMPLE_TASKS = 512
"""Tasks whose opening observations a tokenizer is trained on."""

OBSERVE_S = 60.0
"""Seconds after which no further task is opened. In an environment that reaches this limit, the
vocabulary depends on speed. The run stores its tokenizer, so a resumed run has the same."""

NUM_MISTAKES = 6
"""Wrong actions tried on each of these tasks, to collect the words of error messages."""


def make_tokenizer(
    config: RunConfig,
    tasks: Sequence[Task],
    messages: Iterable[Message],
    functions: Sequence[ToolSpec] = (),
) -> Any:
    """Load the configured tokenizer, or train one on the texts of the recipe.

    The texts are `messages` (demonstrations), the prompts and opening observations of the first
    tasks, and the environment's answers to wrong actions: an expert's episodes contain no error
    message. `functions` are shown in prompts besides those of the recipe.
    """
    model = config.model
    spec = model.tokenizer
    if isinstance(spec, str) and spec in TOKENIZERS.names() and not Path(spec).is_dir():
        spec = Spec(name=spec)
    if not isinstance(spec, Spec):
        return load_tokenizer(spec) if spec else load_tokenizer(str(model.path), "model.path")
    sources = list(messages)
    if tasks:  # a task without a demonstration may have words of its own
        actions = mistakes([m for m in sources if m.role == "assistant"])
        sources += environment_messages(config, tasks[:NUM_SAMPLE_TASKS], actions)
    texts = [text for message in sources for text in _texts(message)]
    prompts = [part.system_prompt for part in config.rollout.parts.values()]
    texts += [prompt for prompt in [config.rollout.system_prompt, *prompts] if prompt]
    for part in (None, *formats_of(config)):
        settings = settings_of(config.rollout, part)
        if settings.format == "code":
            texts += [f"\n{marker}\n" for _, marker in _markers(settings.markers)]
    parts = [part for part, format in formats_of(config).items() if format != config.rollout.format]
    tools = {tool.name: tool for part in [*parts, None] for tool in tools_of(config, part)}
    shown = [*tools.values(), *functions]
    return train_tokenizer(spec, texts, model.chat_template or "plain", shown)


def mistakes(actions: Sequence[Message]) -> list[Message]:
    """Returns the actions in shuffled order; each is followed by a mix with its successor."""
    shuffled = random.Random(0).sample(actions, len(actions))
    wrong: list[Message] = []
    for action, other in pairwise(shuffled):
        head, tail = action.content.split(" "), other.content.split(" ")
        words = head[: len(head) // 2 + 1] + tail[len(tail) // 2 :]
        wrong += [action, Message(role="assistant", content=" ".join(words))]
    return wrong


def _texts(message: Message) -> list[str]:
    """Returns all texts of a message that a model reads or writes, tool arguments included."""
    calls = [json.dumps(call.arguments) for call in message.tool_calls]
    return [message.content, *calls, *([message.thinking] if message.thinking else [])]


def environment_messages(
    config: RunConfig, tasks: Sequence[Task], actions: Sequence[Message] = ()
) -> list[Message]:
    """Returns prompts and opening observations of the tasks, and answers to `actions`.

    NUM_MISTAKES of the actions are tried on each task, in turn, whether they fit the task or not.

    Errors: EnvError where no task can be opened.
    """
    messages = [message for task in tasks for message in task.prompt]
    envs = LocalEnvs(config.env)
    played = [task for task in tasks if envs.spec_of(task) is not None]
    if not played:
        return messages
    observed, errors = run(_observe(config, envs, played, actions))
    if not observed:
        name = (config.env or envs.spec_of(played[0]) or NO_ENV).name
        reason = errors[0] if errors else "its opening observations are empty"
        raise EnvError(f"environment {name!r} opens no episode: {reason}")
    return messages + observed


async def _observe(
    config: RunConfig, envs: LocalEnvs, tasks: Sequence[Task], actions: Sequence[Message]
) -> tuple[list[Message], list[str]]:
    """Returns the environment's messages, and the error of each task that failed."""
    observed: list[Message] = []
    errors: list[str] = []
    tried = cycle(actions)
    thread, begun = EnvThread(), time.perf_counter()
    for number, task in enumerate(tasks):
        if time.perf_counter() - begun > OBSERVE_S:
            log.warning(
                "a slow environment: the tokenizer reads the openings of fewer tasks",
                tasks=number,
                of=len(tasks),
                seconds=OBSERVE_S,
            )
            break
        limit = config.rollout.step_deadline_s
        env = HostedEnv(partial(envs.make, task), thread, limit, prepares=True)
        try:
            observed += (await env.reset(task)).messages
            for action in islice(tried, NUM_MISTAKES):
                result = await env.step(action)
                observed += result.messages
                if result.done:
                    break
        except EpisodeError as error:  # recorded again when the task is played
            errors.append(f"task {task.id}: {error}")
            tried = cycle(())  # an environment that fails may also hang: try no more actions
        await env.close()
    thread.close()
    return observed, errors


def make_renderer(config: RunConfig, tokenizer: Any, part: str | None = None) -> Renderer:
    """Returns the renderer of the configured template, with the tools that `tools_of` returns.

    Errors: ConfigError, also where the tokenizer cannot write the markers of `format: code`.
    """
    model, settings = config.model, settings_of(config.rollout, part)
    code, tools = settings.format == "code", tools_of(config, part)
    inside = settings.markers.result if code else None
    renderer = Renderer(tokenizer, model.chat_template, tools, model.thinking, inside)
    for key, marker in _markers(settings.markers) if code else ():
        written = renderer.text(tokenizer.encode(marker, add_special_tokens=False))
        if marker not in written:
            own = settings.markers != config.rollout.markers
            place = f"rollout.parts.{part}" if own else "rollout"
            raise ConfigError(
                f"{place}.markers.{key}: the tokenizer cannot write {marker!r}, it writes "
                f"{written!r}: choose a marker of its tokens"
            )
    return renderer


def make_renderers(config: RunConfig, tokenizer: Any) -> TaskRenderers:
    """Returns the renderers of tasks, with one for each part of a mixture that needs its own.

    In the tool-call format, a task shows only the tools of its own environment, and those of the
    run. In the format `code`, a part may have markers of its own.
    """
    common = config.rollout
    parts = {
        part: make_renderer(config, tokenizer, part)
        for part, format in formats_of(config).items()
        if format == "tools"
        or format != common.format
        or settings_of(common, part).markers != common.markers
    }
    functions = [function.name for function in functions_of(config)]
    return TaskRenderers(make_renderer(config, tokenizer), parts, functions)


def formats_of(config: RunConfig) -> dict[str, str]:
    """Returns the format of each part of a mixture."""
    return {part: settings_of(config.rollout, part).format for part in sorted(parts_of(config))}


def tools_of(config: RunConfig, part: str | None = None) -> Sequence[ToolSpec]:
    """Returns the functions that the chat template shows: the environment's, and those of `tools`.

    The environment's only in the tool-call format; none in the format `code`. With `part`, those of
    a part of a mixture. Errors: ConfigError.
    """
    format = settings_of(config.rollout, part).format
    if format == "code":
        return ()
    functions = functions_of(config)
    if format != "tools":
        return functions
    env = ENVS.build(config.env, "env") if config.env else None
    name = config.env.name if config.env else ""
    if part is not None and env is not None:
        own = parts_of(config).get(part)
        alone = own is not None and own.env is not None
        env, name = None if alone else env.members().get(part, env), part
    if env is not None:
        return joined_functions(_require_tools(env, name), functions)
    if not functions:
        place = "rollout" if part is None else f"rollout.parts.{part}"
        raise ConfigError(f"{place}.format: `tools` needs an `env` that has tools, or `tools`")
    return functions


def functions_of(config: RunConfig) -> Sequence[ToolSpec]:
    """Returns the functions that `tools` offer. Opens the tools once in a process.

    Errors: ConfigError, LudusError.
    """
    if not config.tools:
        return ()
    return _functions(json.dumps([tool.model_dump() for tool in config.tools]))


def check_functions(config: RunConfig, *lists: TaskList, others: Iterable[Task] = ()) -> None:
    """Check `Task.tools` of lists of tasks, and of other tasks, whose ids are their places.

    Errors: DataError with the place of a task that names a function that no tool offers;
    ConfigError with the key of a part of a mixture that does.
    """
    names = [function.name for function in functions_of(config)]
    for where, spec in (("train", config.tasks.train), ("heldout", config.tasks.heldout)):
        for name, part in parts_of_mixture(spec).items():
            if fault := unknown_function(Task(id=name, tools=part.tools), names):
                raise ConfigError(f"tasks.{where}.args.parts.{name}.{fault}")
    for tasks in (*lists, TaskList(others)):
        for task in tasks:
            if fault := unknown_function(task, names):
                raise DataError(f"{place_of(task, tasks.rows)}: {fault}")


@cache
def _functions(tools: str) -> list[ToolSpec]:
    opening = read_functions([Spec(**tool) for tool in json.loads(tools)])
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run(opening)
    with ThreadPoolExecutor(1) as pool:  # a judge opens a player in the event loop of a run
        return pool.submit(asyncio.run, opening).result()


def _markers(markers: MarkersConfig) -> list[tuple[str, str]]:
    """The markers of `format: code`, each with its key."""
    return [(key, text) for key, pair in markers if key != "tool" for text in pair]


def _require_tools(env: Env, name: str) -> Sequence[ToolSpec]:
    if tools := env.tools():
        return tools
    raise ConfigError(f"rollout.format: environment {name!r} has no tools; use plain or react")
