"""From the configuration to its objects: tasks, tokenizer, renderer, judge."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from typing import Any

from ludus.core.config import check_specs
from ludus.core.errors import ConfigError
from ludus.core.schema import RunConfig
from ludus.core.types import Message, Spec, Task, ToolSpec
from ludus.envs import ENVS
from ludus.models.renderer import Renderer
from ludus.models.tokenizers import load_tokenizer, train_tokenizer
from ludus.registries import REGISTRIES
from ludus.tasks.readers import read_tasks
from ludus.tasks.splits import check_disjoint

NUM_SAMPLE_TEXTS = 512  # opening observations that a tokenizer is trained on without an expert


def check(config: RunConfig) -> None:
    """Refuse plug-ins that do not exist and arguments that they do not take, all at once."""
    check_specs(config, REGISTRIES)


def read_splits(config: RunConfig) -> tuple[list[Task], list[Task]]:
    """Training and held-out tasks, which share none."""
    env_class: Any = ENVS.load(config.env.name) if config.env else None
    lines = config.tasks.on_bad_line
    train = read_tasks(config.tasks.train, "tasks.train", env_class=env_class, on_bad_line=lines)
    if config.tasks.heldout is None:
        return train, []
    heldout = read_tasks(
        config.tasks.heldout, "tasks.heldout", env_class=env_class, on_bad_line=lines
    )
    check_disjoint(train, heldout)
    return train, heldout


def make_tokenizer(config: RunConfig, tasks: Sequence[Task], shown: Iterable[Message]) -> Any:
    """The tokenizer that the configuration names, loaded or trained on the recipe's own texts.

    Those are the demonstrations; without any, the tasks' prompts and opening observations.
    """
    model = config.model
    if isinstance(model.tokenizer, Spec):
        messages = list(shown) or opening_messages(config, tasks[:NUM_SAMPLE_TEXTS])
        texts = [text for message in messages for text in _texts(message)]
        if config.rollout.system_prompt:
            texts.append(config.rollout.system_prompt)
        template = model.chat_template or "plain"
        return train_tokenizer(model.tokenizer, texts, template, tools_of(config))
    return load_tokenizer(model.tokenizer or str(model.path))


def _texts(message: Message) -> list[str]:
    """What a model may have to write or read of a message, tool calls included."""
    calls = [json.dumps(call.arguments) for call in message.tool_calls]
    return [message.content, *calls, *([message.thinking] if message.thinking else [])]


def make_renderer(config: RunConfig, tokenizer: Any) -> Renderer:
    """The renderer of the configured template, with the environment's tools where they are used."""
    return Renderer(tokenizer, config.model.chat_template, tools_of(config), config.model.thinking)


def tools_of(config: RunConfig) -> Sequence[ToolSpec]:
    """The tools that the model is shown: the environment's, in the tool-call format."""
    if config.rollout.format != "tools":
        return ()
    if config.env is None:
        raise ConfigError("rollout.format: `tools` needs an `env` that has tools")
    tools = ENVS.build(config.env, "env").tools()
    if not tools:
        raise ConfigError(
            f"rollout.format: environment {config.env.name!r} has no tools; use plain or react"
        )
    return tools


def opening_messages(config: RunConfig, tasks: Sequence[Task]) -> list[Message]:
    """The tasks' prompts, and what the environment says first."""
    messages = [message for task in tasks for message in task.prompt]
    if config.env is None:
        return messages
    spec = config.env

    async def look() -> list[Message]:
        seen: list[Message] = []
        for task in tasks:
            env = ENVS.build(spec, "env")
            seen += (await env.reset(task)).messages
            await env.close()
        return seen

    return messages + asyncio.run(look())
