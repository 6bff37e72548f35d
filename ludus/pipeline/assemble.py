"""From the configuration to its objects: tasks, tokenizer, renderer, judge."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

from ludus.config.load import check_specs
from ludus.config.schema import RunConfig
from ludus.core.errors import (
    ConfigError,
    DataError,
    EnvError,
    EpisodeError,
    LudusError,
    did_you_mean,
)
from ludus.core.types import Message, Spec, Task, ToolSpec, Trajectory
from ludus.data.demonstrations import Demonstration
from ludus.envs import ENVS
from ludus.envs.base import Env
from ludus.judges import JUDGES
from ludus.models import TOKENIZERS
from ludus.models.chat.renderer import Renderer
from ludus.models.chat.tokenizers import load_tokenizer, train_tokenizer
from ludus.pipeline.registries import REGISTRIES
from ludus.rollout.host import HostedEnv
from ludus.rollout.replay import replay
from ludus.rollout.session import with_system_prompt
from ludus.rollout.threads import EnvThread
from ludus.tasks.agentgym import is_agentgym, read_trajectories
from ludus.tasks.mixture import part_of
from ludus.tasks.readers import OnBadLine, TaskList, read_json, read_tasks
from ludus.tasks.splits import check_disjoint

NUM_SAMPLE_TEXTS = 512  # tasks whose opening a tokenizer is trained on
MISPLACED = 6  # mistakes made on each of them, to hear what is answered


def check(config: RunConfig) -> None:
    """Refuse plug-ins that do not exist and arguments that they do not take, all at once.

    An environment is built on trial, for it may refuse values that fit its signature.
    """
    check_specs(config, REGISTRIES)
    _check_distribution(config)
    if config.env is not None:
        try:
            env = ENVS.build(config.env, "env")
            _check_parts(config, env.members())
        except LudusError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise ConfigError(f"env: {config.env.name!r} cannot be built: {what}") from error


def _check_parts(config: RunConfig, known: Mapping[str, Env]) -> None:
    """Settings by environment speak of those that the mixture has."""
    limit, grown = config.rollout.max_turns, config.rl.horizon if config.rl else None
    for place, setting in {"rollout.max_turns": limit, "rl.horizon": grown}.items():
        for name in setting if isinstance(setting, dict) else ():
            if name not in known:
                raise ConfigError(
                    f"{place}.{name}: {name!r} is no environment of a mixture"
                    f"{did_you_mean(name, known)}"
                )
    if isinstance(grown, dict) and isinstance(limit, int):
        raise ConfigError(
            "rollout.max_turns must be by environment, or null, where rl.horizon is by environment"
        )


def _check_distribution(config: RunConfig) -> None:
    """RL compares the learner's log-probabilities with the sampler's: of the same distribution.

    Not in the schema, because a run of old has to stay readable.
    """
    if config.rl is None or config.rl.algorithm.name == "sft":
        return
    off = {"top_p": 1.0, "top_k": 0}
    given = {key: getattr(config.rollout, key) for key in off}
    faults = [
        f"rollout.{key} must be {off[key]:g} where `rl` trains, got {given[key]:g}: the sampler's "
        "log-probabilities would be those of the cut distribution, the learner's of the whole one"
        for key in off
        if given[key] != off[key]
    ]
    if faults:
        remedy = "leave it out, or lower rollout.temperature for fewer unlikely tokens"
        raise ConfigError("\n".join(f"{fault} ({remedy})" for fault in faults))


def read_splits(config: RunConfig) -> tuple[TaskList, TaskList]:
    """Training and held-out tasks, which share none.

    Errors: DataError for files and lines, ConfigError for a judge that a task names wrongly.
    """
    env = ENVS.build(config.env, "env") if config.env else None
    lines = config.tasks.on_bad_line
    train = read_tasks(config.tasks.train, "tasks.train", maker=env, on_bad_line=lines)
    _check_judges(train, "tasks.train")
    if config.tasks.heldout is None:
        return train, TaskList()
    heldout = read_tasks(config.tasks.heldout, "tasks.heldout", maker=env, on_bad_line=lines)
    _check_judges(heldout, "tasks.heldout")
    check_disjoint(train, heldout)
    return train, heldout


def _check_judges(tasks: Iterable[Task], where: str) -> None:
    judges = {task.judge.model_dump_json(): task.judge for task in tasks if task.judge}
    for spec in judges.values():
        JUDGES.check(spec, f"{where}: judge")


@dataclass(frozen=True, slots=True)
class Conversation:
    """What SFT learns from: the assistant's turns of `messages`, which open as rollouts do."""

    task: Task
    messages: Sequence[Message]
    reward: float | None
    success: bool | None


def read_conversations(
    config: RunConfig, demonstrations: Iterable[Demonstration], train: Iterable[Task]
) -> tuple[list[Conversation], list[str]]:
    """The conversations of `sft.data`, or else the demonstrations; and the lines left out.

    A line of the file is an object with `messages`; `reward` and `success` may stand beside them.
    That is what `ludus export --what sft` writes, and what most trainers read.
    """
    system_prompt = config.rollout.system_prompt
    if config.sft is None or config.sft.data is None:
        known = {task.id: task for task in train}
        conversations = []
        for shown in demonstrations:
            task = known.get(shown.task_id) or Task(id=shown.task_id, tier=shown.tier)
            messages = with_system_prompt([*task.prompt, *shown.messages], system_prompt)
            conversations.append(Conversation(task, messages, shown.reward, shown.success))
        return conversations, []
    if is_agentgym(config.sft.data):
        return _read_agenttraj(config.sft.data, config.tasks.on_bad_line, system_prompt)
    lines = read_json(
        config.sft.data, "messages", answer=None, on_bad_line=config.tasks.on_bad_line
    )
    if not lines:
        raise DataError(f"sft.data: {config.sft.data} holds no conversation")
    conversations = [
        Conversation(
            Task(id=line.id, source=line.source),
            with_system_prompt(line.prompt, system_prompt),
            _number(line.data.get("reward")),
            _truth(line.data.get("success")),
        )
        for line in lines
    ]
    return conversations, [str(line) for line in lines.skipped]


def _read_agenttraj(
    path: str, on_bad_line: OnBadLine, system_prompt: str | None
) -> tuple[list[Conversation], list[str]]:
    """AgentTraj's conversations. A system prompt of the configuration replaces its instructions:
    rollouts will open with that one."""
    recorded, left_out = read_trajectories(path, on_bad_line)
    conversations = []
    for known in recorded:
        own = known.messages[0].role == "system" and system_prompt is not None
        messages = with_system_prompt(known.messages[own:], system_prompt)
        task = Task(id=known.item_id, source="agentgym")
        conversations.append(Conversation(task, messages, None, None))
    return conversations, left_out


def replay_all(
    conversations: Iterable[Conversation],
    renderer: Renderer,
    context_length: int,
    renderers: Mapping[str, Renderer] | None = None,
) -> tuple[list[Task], list[Trajectory], list[tuple[str, str]]]:
    """Tasks and trajectories of the conversations that fit; (task id, reason) of the others.

    `renderers` are those of the parts of a mixture that have one of their own.
    """
    tasks: list[Task] = []
    played: list[Trajectory] = []
    left_out: list[tuple[str, str]] = []
    for known in conversations:
        trajectory = Trajectory("", "", known.task.id, reward=known.reward)
        if known.success is not None:
            trajectory.metrics["success"] = float(known.success)
        own = (renderers or {}).get(part_of(known.task) or "", renderer)
        replay(known.messages, own, trajectory, f"{known.task.id}: ")
        if (length := trajectory.num_tokens) > context_length:
            reason = f"{length} tokens exceed model.context_length = {context_length}"
            left_out.append((known.task.id, reason))
        else:
            tasks.append(known.task)
            played.append(trajectory)
    return tasks, played, left_out


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _truth(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def make_tokenizer(config: RunConfig, tasks: Sequence[Task], shown: Iterable[Message]) -> Any:
    """The tokenizer that the configuration names, loaded or trained on the recipe's own texts.

    Those are the demonstrations, the prompts and opening observations of the first tasks, and what
    the environment answers there to actions out of place: an expert hears no error message.
    """
    model = config.model
    spec = model.tokenizer
    if isinstance(spec, str) and spec in TOKENIZERS.names() and not Path(spec).is_dir():
        spec = Spec(name=spec)
    if isinstance(spec, Spec):
        # The openings, because a task without a demonstration may have words of its own.
        messages = list(shown)
        if tasks:
            actions = mistakes([m for m in messages if m.role == "assistant"])
            messages += environment_messages(config, tasks[:NUM_SAMPLE_TEXTS], actions)
        texts = [text for message in messages for text in _texts(message)]
        if config.rollout.system_prompt:
            texts.append(config.rollout.system_prompt)
        template = model.chat_template or "plain"
        return train_tokenizer(spec, texts, template, tools_of(config))
    return load_tokenizer(spec or str(model.path))


def mistakes(actions: Sequence[Message]) -> list[Message]:
    """The actions in another order, and between them halves of two put together."""
    shuffled = random.Random(0).sample(actions, len(actions))
    made: list[Message] = []
    for action, other in pairwise(shuffled):
        head, tail = action.content.split(" "), other.content.split(" ")
        words = head[: len(head) // 2 + 1] + tail[len(tail) // 2 :]
        made += [action, Message(role="assistant", content=" ".join(words))]
    return made


def _texts(message: Message) -> list[str]:
    """What a model may have to write or read of a message, tool calls included."""
    calls = [json.dumps(call.arguments) for call in message.tool_calls]
    return [message.content, *calls, *([message.thinking] if message.thinking else [])]


def make_renderer(config: RunConfig, tokenizer: Any) -> Renderer:
    """The renderer of the configured template, with the environment's tools where they are used."""
    return Renderer(tokenizer, config.model.chat_template, tools_of(config), config.model.thinking)


def make_renderers(config: RunConfig, tokenizer: Any) -> dict[str, Renderer]:
    """Of a mixture in the tool-call format, a renderer for each part: a task shows the tools of its
    own environment only."""
    if config.rollout.format != "tools" or config.env is None:
        return {}
    env = ENVS.build(config.env, "env")
    made = {}
    for name, member in env.members().items():
        if not (tools := member.tools()):
            raise ConfigError(
                f"rollout.format: environment {name!r} has no tools; use plain or react"
            )
        made[name] = Renderer(tokenizer, config.model.chat_template, tools, config.model.thinking)
    return made


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


def environment_messages(
    config: RunConfig, tasks: Sequence[Task], actions: Sequence[Message] = ()
) -> list[Message]:
    """The tasks' prompts, what the environment says first, and its answers to `actions`.

    Those are tried one after another, MISPLACED of them on each task, whether they suit it or not.
    """
    messages = [message for task in tasks for message in task.prompt]
    if config.env is None:
        return messages
    spec, faults = config.env, []

    async def look() -> list[Message]:
        seen: list[Message] = []
        tried = cycle(actions)
        seat = EnvThread()
        for task in tasks:
            env = HostedEnv(lambda: ENVS.build(spec, "env"), seat, config.rollout.step_deadline_s)
            try:
                seen += (await env.reset(task)).messages
                for action in islice(tried, MISPLACED):
                    result = await env.step(action)
                    seen += result.messages
                    if result.done:
                        break
            except EpisodeError as error:  # such a task will be put on record when it is played
                faults.append(f"task {task.id}: {error}")
                tried = cycle(())  # one that fails may also hang: it is not provoked any further
            await env.close()
        seat.close()
        return seen

    seen = asyncio.run(look())
    if not seen:
        why = faults[0] if faults else "its opening observations are empty"
        raise EnvError(f"environment {spec.name!r} opens no episode: {why}")
    return messages + seen
