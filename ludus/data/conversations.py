"""Conversations that SFT trains on: demonstrations, or the file `sft.data`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from ludus.config.schema import RunConfig
from ludus.core.errors import DataError, first_fault
from ludus.core.types import Message, Task, ToolSpec, Trajectory
from ludus.data.expert import Demonstration
from ludus.models.chat.by_task import TaskRenderers
from ludus.rollout.replay import replay
from ludus.rollout.sessions.session import with_system_prompt
from ludus.tasks.agentgym import is_agentgym, read_trajectories
from ludus.tasks.mixture import PART, part_of, settings_of
from ludus.tasks.readers import OnBadLine, read_json


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that open like a rollout; SFT trains on the assistant's turns.

    `trained` tells for each of these turns if it is trained; None: all. `functions` are those that
    its prompt shows; None: the task's.
    """

    task: Task
    messages: Sequence[Message]
    reward: float | None
    success: bool | None
    trained: Sequence[bool] | None = None
    functions: Sequence[ToolSpec] | None = None


def read_conversations(
    config: RunConfig, demonstrations: Iterable[Demonstration], train: Iterable[Task]
) -> tuple[list[Conversation], list[str]]:
    """Returns the conversations of `sft.data`, or else the demonstrations; and skipped lines.

    A line of the file is an object with `messages` and optionally `reward` and `success`, as
    `ludus export --what sft` and most trainers write them, and `tools` and `part`: the functions on
    offer (names of the run's, or functions with their schemas, as an agent sends them), and the
    part of a mixture whose settings hold.
    """
    system_prompt = config.rollout.system_prompt
    if config.sft is None or config.sft.data is None:
        tasks = {task.id: task for task in train}
        conversations = []
        for demo in demonstrations:
            task = tasks.get(demo.task_id) or Task(id=demo.task_id, tier=demo.tier)
            opening = settings_of(config.rollout, part_of(task)).system_prompt
            messages = with_system_prompt([*task.prompt, *demo.messages], opening)
            trained = _trained(messages, demo) if demo.mistakes else None
            conversations.append(Conversation(task, messages, demo.reward, demo.success, trained))
        return conversations, []
    if is_agentgym(config.sft.data):
        return _read_agenttraj(config.sft.data, config.tasks.on_bad_line, system_prompt)
    on_bad_line = config.tasks.on_bad_line
    lines = read_json(config.sft.data, "messages", answer=None, on_bad_line=on_bad_line)
    if not lines:
        raise DataError(f"sft.data: {config.sft.data} holds no conversation")
    conversations = []
    for line in lines:
        task = _task(line)
        opening = settings_of(config.rollout, part_of(task)).system_prompt
        conversations.append(
            Conversation(
                task,
                with_system_prompt(line.prompt, opening),
                _number(line.data.get("reward")),
                _boolean(line.data.get("success")),
                functions=_functions(line.data.get("tools"), line.id),
            )
        )
    return conversations, [str(line) for line in lines.skipped]


def _task(line: Task) -> Task:
    """The task of a line: its functions and its part select the renderer."""
    part = line.data.get(PART)
    data = {PART: part} if isinstance(part, str) else {}
    return Task(id=line.id, source=line.source, data=data, tools=_names(line.data.get("tools")))


def _functions(value: Any, place: str) -> list[ToolSpec] | None:
    """The functions of a line in OpenAI's form; None for names, or nothing. Errors: DataError."""
    if not isinstance(value, list) or not any(isinstance(tool, dict) for tool in value):
        return None
    found = []
    for number, tool in enumerate(value):
        own = tool.get("function", tool) if isinstance(tool, dict) else tool
        try:
            found.append(ToolSpec.model_validate(own, extra="ignore"))
        except ValidationError as error:
            raise DataError(
                f"sft.data: {place}: tools.{number} is no function: {first_fault(error)}"
            ) from None
    return found


def functions_brought(conversations: Iterable[Conversation]) -> list[ToolSpec]:
    """The different functions that the conversations bring along."""
    found = (tool for item in conversations for tool in item.functions or ())
    return list({tool.model_dump_json(): tool for tool in found}.values())


def _trained(messages: Sequence[Message], demo: Demonstration) -> list[bool]:
    """For each assistant's turn, False if it is one of the demonstration's mistakes."""
    earlier = sum(message.role == "assistant" for message in messages) - demo.num_turns
    return [turn - earlier not in demo.mistakes for turn in range(earlier + demo.num_turns)]


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
    conversations: Iterable[Conversation], renderers: TaskRenderers, context_length: int
) -> tuple[list[Task], list[Trajectory], list[tuple[str, str]]]:
    """Returns tasks and trajectories of the conversations that fit; (task id, reason) of the rest.

    Each is rendered as a rollout of its task would be.
    """
    tasks: list[Task] = []
    trajectories: list[Trajectory] = []
    excluded: list[tuple[str, str]] = []
    for conversation in conversations:
        task = conversation.task
        trajectory = Trajectory("", "", task.id, reward=conversation.reward)
        if conversation.success is not None:
            trajectory.metrics["success"] = float(conversation.success)
        where, trained = f"{task.id}: ", conversation.trained
        renderer = renderers.of(task, conversation.functions)
        replay(conversation.messages, renderer, trajectory, where, trained)
        if (length := trajectory.num_tokens) > context_length:
            reason = f"{length} tokens exceed model.context_length = {context_length}"
            excluded.append((task.id, reason))
        else:
            tasks.append(task)
            trajectories.append(trajectory)
    return tasks, trajectories, excluded


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _names(value: Any) -> list[str] | None:
    is_names = isinstance(value, list) and all(isinstance(name, str) for name in value)
    return value if is_names else None


def _boolean(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None
