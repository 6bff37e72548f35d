"""Tokenizer and renderers of a run; texts that a new tokenizer is trained on."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError, EnvError, EpisodeError
from ludus.core.signals import run
from ludus.core.types import Message, Spec, Task, ToolSpec
from ludus.envs import ENVS
from ludus.envs.base import Env
from ludus.models import TOKENIZERS
from ludus.models.chat.renderer import Renderer
from ludus.models.chat.tokenizers import load_tokenizer, train_tokenizer
from ludus.rollout.host import HostedEnv, LocalEnvs
from ludus.rollout.threads import EnvThread

NUM_SAMPLE_TASKS = 512
"""Tasks whose opening observations a tokenizer is trained on."""

NUM_MISTAKES = 6
"""Wrong actions tried on each of these tasks, to collect the words of error messages."""


def make_tokenizer(config: RunConfig, tasks: Sequence[Task], messages: Iterable[Message]) -> Any:
    """Load the configured tokenizer, or train one on the texts of the recipe.

    The texts are `messages` (demonstrations), the prompts and opening observations of the first
    tasks, and the environment's answers to wrong actions: an expert's episodes contain no error
    message.
    """
    model = config.model
    spec = model.tokenizer
    if isinstance(spec, str) and spec in TOKENIZERS.names() and not Path(spec).is_dir():
        spec = Spec(name=spec)
    if not isinstance(spec, Spec):
        return load_tokenizer(spec or str(model.path))
    sources = list(messages)
    if tasks:  # a task without a demonstration may have words of its own
        actions = mistakes([m for m in sources if m.role == "assistant"])
        sources += environment_messages(config, tasks[:NUM_SAMPLE_TASKS], actions)
    texts = [text for message in sources for text in _texts(message)]
    if config.rollout.system_prompt:
        texts.append(config.rollout.system_prompt)
    return train_tokenizer(spec, texts, model.chat_template or "plain", tools_of(config))


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
    if config.env is None:
        return messages
    observed, errors = run(_observe(config, config.env, tasks, actions))
    if not observed:
        reason = errors[0] if errors else "its opening observations are empty"
        raise EnvError(f"environment {config.env.name!r} opens no episode: {reason}")
    return messages + observed


async def _observe(
    config: RunConfig, spec: Spec, tasks: Sequence[Task], actions: Sequence[Message]
) -> tuple[list[Message], list[str]]:
    """Returns the environment's messages, and the error of each task that failed."""
    observed: list[Message] = []
    errors: list[str] = []
    tried = cycle(actions)
    envs, thread = LocalEnvs(spec), EnvThread()
    for task in tasks:
        env = HostedEnv(envs.make, thread, config.rollout.step_deadline_s)
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


def make_renderer(config: RunConfig, tokenizer: Any) -> Renderer:
    """Returns the renderer of the configured template, with tools in the tool-call format."""
    return Renderer(tokenizer, config.model.chat_template, tools_of(config), config.model.thinking)


def make_renderers(config: RunConfig, tokenizer: Any) -> dict[str, Renderer]:
    """Returns a renderer for each part of a mixture, in the tool-call format; else none.

    A task shows only the tools of its own environment.
    """
    if config.rollout.format != "tools" or config.env is None:
        return {}
    model, members = config.model, ENVS.build(config.env, "env").members()
    return {
        name: Renderer(tokenizer, model.chat_template, _require_tools(member, name), model.thinking)
        for name, member in members.items()
    }


def tools_of(config: RunConfig) -> Sequence[ToolSpec]:
    """Returns the environment's tools in the tool-call format, else none. Errors: ConfigError."""
    if config.rollout.format != "tools":
        return ()
    if config.env is None:
        raise ConfigError("rollout.format: `tools` needs an `env` that has tools")
    return _require_tools(ENVS.build(config.env, "env"), config.env.name)


def _require_tools(env: Env, name: str) -> Sequence[ToolSpec]:
    if tools := env.tools():
        return tools
    raise ConfigError(f"rollout.format: environment {name!r} has no tools; use plain or react")
