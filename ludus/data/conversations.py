"""Conversations that SFT trains on: demonstrations, or the file `sft.data`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ludus.config.schema import RunConfig
from ludus.core.errors import DataError
from ludus.core.types import Message, Task, Trajectory
from ludus.data.demonstrations import Demonstration
from ludus.models.chat.renderer import Renderer
from ludus.rollout.replay import replay
from ludus.rollout.session import with_system_prompt
from ludus.tasks.agentgym import is_agentgym, read_trajectories
from ludus.tasks.mixture import part_of
from ludus.tasks.readers import OnBadLine, read_json


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that open like a rollout; SFT trains on the assistant's turns.

    `trained` tells for each of these turns if it is trained; None: all.
    """

    task: Task
    messages: Sequence[Message]
    reward: float | None
    success: bool | None
    trained: Sequence[bool] | None = None


def read_conversations(
    config: RunConfig, demonstrations: Iterable[Demonstration], train: Iterable[Task]
) -> tuple[list[Conversation], list[str]]:
    """Returns the conversations of `sft.data`, or else the demonstrations; and skipped lines.

    A line of the file is an object with `messages` and optionally `reward` and `success`: the
    format of `ludus export --what sft` and of most trainers.
    """
    system_prompt = config.rollout.system_prompt
    if config.sft is None or config.sft.data is None:
        tasks = {task.id: task for task in train}
        conversations = []
        for demo in demonstrations:
            task = tasks.get(demo.task_id) or Task(id=demo.task_id, tier=demo.tier)
            messages = with_system_prompt([*task.prompt, *demo.messages], system_prompt)
            conversations.append(Conversation(task, messages, demo.reward, demo.success))
        return conversations, []
    if is_agentgym(config.sft.data):
        return _read_agenttraj(config.sft.data, config.tasks.on_bad_line, system_prompt)
    on_bad_line = config.tasks.on_bad_line
    lines = read_json(config.sft.data, "messages", answer=None, on_bad_line=on_bad_line)
    if not lines:
        raise DataError(f"sft.data: {config.sft.data} holds no conversation")
    conversations = [
        Conversation(
            Task(id=line.id, source=line.source),
            with_system_prompt(line.prompt, system_prompt),
            _number(line.data.get("reward")),
            _boolean(line.data.get("success")),
        )
        for line in lines
    ]
    return conversations, [str(line) for line in lines.skipped]


def _read_agenttraj(
    path: str, on_bad_line: OnBadLine, system_prompt: str | None
) -> tuple[list[Conversation], list[str]]:
    """Read AgentTraj's conversations. A configured system prompt replaces their instructions,
    because rollouts open with the configured prompt."""
    trajectories, skipped = read_trajectories(path, on_bad_line)
    conversations = []
    for recorded in trajectories:
        replaced = recorded.messages[0].role == "system" and system_prompt is not None
        messages = with_system_prompt(recorded.messages[replaced:], system_prompt)
        task = Task(id=recorded.item_id, source="agentgym")
        conversations.append(Conversation(task, messages, None, None, recorded.trained))
    return conversations, skipped


def replay_all(
    conversations: Iterable[Conversation],
    renderer: Renderer,
    context_length: int,
    renderers: Mapping[str, Renderer] | None = None,
) -> tuple[list[Task], list[Trajectory], list[tuple[str, str]]]:
    """Returns tasks and trajectories of the conversations that fit; (task id, reason) of the rest.

    `renderers` holds the renderer of each part of a mixture whose tools differ.
    """
    tasks: list[Task] = []
    trajectories: list[Trajectory] = []
    excluded: list[tuple[str, str]] = []
    for conversation in conversations:
        task = conversation.task
        trajectory = Trajectory("", "", task.id, reward=conversation.reward)
        if conversation.success is not None:
            trajectory.metrics["success"] = float(conversation.success)
        part_renderer = (renderers or {}).get(part_of(task) or "", renderer)
        where, trained = f"{task.id}: ", conversation.trained
        replay(conversation.messages, part_renderer, trajectory, where, trained)
        if (length := trajectory.num_tokens) > context_length:
            reason = f"{length} tokens exceed model.context_length = {context_length}"
            excluded.append((task.id, reason))
        else:
            tasks.append(task)
            trajectories.append(trajectory)
    return tasks, trajectories, excluded


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _boolean(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None
