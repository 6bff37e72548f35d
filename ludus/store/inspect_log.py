"""Trajectories as an Inspect log, which `inspect view` opens (extra `inspect`).

A trajectory is a sample: its group is the id, its place in the group the epoch. A sampled turn is a
model event with the messages before it and its log-probabilities; calls, step rewards and
advantages are events between the turns. The whole log is in memory: choose a stage or a step of a
long run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ludus.core.errors import MissingDependency
from ludus.core.types import Message, Segment
from ludus.store.rows import Record, RunRow, RunStatus

Decode = Callable[[list[int]], str]

MAX_LOGPROBS = 4000
"""Tokens of a turn whose log-probabilities are written."""

STATUSES = {
    RunStatus.RUNNING: "started",
    RunStatus.COMPLETED: "success",
    RunStatus.INTERRUPTED: "cancelled",
    RunStatus.FAILED: "error",
}


def write_inspect_log(
    run: RunRow, records: Iterable[Record], path: Path, decode: Decode | None
) -> int:
    """Write the log to `path` and return the number of samples. Errors: MissingDependency."""
    try:
        from inspect_ai import log as inspect
    except ModuleNotFoundError as error:
        raise MissingDependency("inspect-ai", "inspect", "export as an Inspect log") from error
    members: Counter[str] = Counter()
    samples = []
    for record in records:
        group = f"{record.row.stage}-{record.row.step}/{record.row.group_id}"
        members[group] += 1
        samples.append(_Sample(record, decode, run).build(group, members[group]))
    created = run.created.isoformat()
    rewards = [s.scores["reward"].as_float() for s in samples if "reward" in (s.scores or {})]
    mean = inspect.EvalMetric(name="mean", value=math.fsum(rewards) / max(len(rewards), 1))
    results = inspect.EvalResults(
        total_samples=len(samples),
        completed_samples=sum(sample.error is None for sample in samples),
        scores=[inspect.EvalScore(name="reward", scorer="reward", metrics={"mean": mean})]
        if rewards
        else [],
    )
    failure = None
    if run.error:
        failure = inspect.EvalError(message=_text(run.error), traceback="", traceback_ansi="")
    log = inspect.EvalLog(
        status=STATUSES[run.status],
        eval=inspect.EvalSpec(
            created=created,
            task=_text(run.name),
            task_id=_text(run.id),
            run_id=_text(run.id),
            dataset=inspect.EvalDataset(name=_text(run.name), samples=len(samples)),
            model=_model(run),
            config=inspect.EvalConfig(epochs=max(members.values(), default=1)),
            metadata={"ludus": _text(str(run.versions.get("ludus", "")))},
            tags=["ludus"],
        ),
        results=results,
        stats=inspect.EvalStats(
            started_at=created, completed_at=run.finished.isoformat() if run.finished else ""
        ),
        error=failure,
        samples=samples,
    )
    inspect.write_eval_log(log, str(path), format="eval")
    return len(samples)


class _Sample:
    """Builds the sample of one trajectory."""

    def __init__(self, record: Record, decode: Decode | None, run: RunRow) -> None:
        self._record, self._decode, self._run = record, decode, run
        self._model = f"{_model(run)}:{_text(record.row.policy)}"

    def build(self, id: str, epoch: int) -> Any:
        from inspect_ai import log as inspect

        row, trajectory = self._record.row, self._record.trajectory
        messages = self._messages(trajectory.path())
        error = None
        if row.error and not row.status.trainable:
            error = inspect.EvalError(message=_text(row.error), traceback="", traceback_ansi="")
        facts = {
            "trajectory": row.id, "stage": row.stage, "step": row.step, "task": row.task_id,
            "tier": row.tier, "role": row.role, "policy": row.policy, "status": row.status.value,
            "dropped": row.dropped, "turns": row.num_turns, "tokens": row.num_tokens,
        }  # fmt: skip
        metrics = {name: _number(value) for name, value in row.metrics.items()}
        answer = self._record.task.answer
        return inspect.EvalSample(
            id=_text(id),
            epoch=epoch,
            input=[m for m in messages if m.role != "assistant"][:2] or "",
            target="" if answer is None else _text(str(answer)),
            messages=messages,
            output=self._last_output(),
            scores=self._scores(),
            metadata={k: _text(v) if isinstance(v, str) else v for k, v in facts.items()} | metrics,
            events=list(self._events()),
            total_time=row.metrics.get("seconds"),
            error=error,
        )

    def _scores(self) -> dict[str, Any]:
        from inspect_ai.scorer import Score

        row = self._record.row
        scores = {}
        if row.reward is not None and math.isfinite(row.reward):
            why = _text(row.explanation) if row.explanation else None
            scores["reward"] = Score(value=row.reward, explanation=why)
        for name, value in row.scores.items():
            if math.isfinite(value) and name != "reward":
                scores[_text(name)] = Score(value=value)
        return scores

    def _events(self) -> Iterator[Any]:
        from inspect_ai.event import InfoEvent, ModelEvent, ScoreEvent, ToolEvent
        from inspect_ai.model import GenerateConfig

        trajectory, when = self._record.trajectory, self._run.created
        for index, segment in enumerate(trajectory.segments):
            message = segment.message
            if segment.parent != index - 1:
                told = {"branch": index, "continues_after": segment.parent}
                yield InfoEvent(source="branch", data=told, timestamp=when)
            if segment.sampled:
                before = trajectory.path(segment.parent) if segment.parent >= 0 else []
                yield ModelEvent(
                    model=self._model,
                    input=self._messages(before),
                    tools=[],
                    tool_choice="auto",
                    config=GenerateConfig(),
                    output=self._output(index, segment),
                    timestamp=when,
                )
                if facts := _credit(segment):
                    yield InfoEvent(source="credit", data=facts, timestamp=when)
            elif message is not None and message.role == "tool":
                yield ToolEvent(
                    id=_text(message.tool_call_id or f"segment-{index}"),
                    function=_text(message.name or "tool"),
                    arguments={},
                    result=_text(message.content),
                    timestamp=when,
                )
        for score in self._scores().values():
            yield ScoreEvent(score=score, timestamp=when)

    def _last_output(self) -> Any:
        from inspect_ai.model import ModelOutput

        segments = self._record.trajectory.segments
        path = self._record.trajectory.path()
        last = next((index for index in reversed(path) if segments[index].sampled), None)
        if last is None:
            return ModelOutput(model=self._model, choices=[])
        return self._output(last, segments[last])

    def _output(self, index: int, segment: Segment) -> Any:
        from inspect_ai.model import ChatCompletionChoice, Logprob, Logprobs, ModelOutput

        probabilities = None
        if segment.token_ids and segment.logprobs:
            pairs = list(zip(segment.token_ids, segment.logprobs, strict=True))[:MAX_LOGPROBS]
            content = [
                Logprob(token=self._token(token), logprob=value)
                for token, value in pairs
                if math.isfinite(value)
            ]
            probabilities = Logprobs(content=content)
        choice = ChatCompletionChoice(
            message=self._message(index, segment), stop_reason="stop", logprobs=probabilities
        )
        return ModelOutput(model=self._model, choices=[choice])

    def _token(self, id: int) -> str:
        return _text(self._decode([id])) if self._decode is not None else str(id)

    def _messages(self, path: Iterable[int]) -> list[Any]:
        segments = self._record.trajectory.segments
        return [
            self._message(index, segments[index])
            for index in path
            if segments[index].message is not None or segments[index].sampled
        ]

    def _message(self, index: int, segment: Segment) -> Any:
        from inspect_ai.model import (
            ChatMessageAssistant,
            ChatMessageSystem,
            ChatMessageTool,
            ChatMessageUser,
        )
        from inspect_ai.tool import ToolCall

        message = segment.message
        if message is None:
            ids = segment.token_ids
            text = self._decode(ids) if self._decode is not None else " ".join(map(str, ids))
            message = Message(role="assistant", content=text)
        content, id = _content(message), f"{self._record.row.id}/{index}"
        if message.role == "system":
            return ChatMessageSystem(id=id, content=content)
        if message.role == "user":
            return ChatMessageUser(id=id, content=content)
        if message.role == "tool":
            return ChatMessageTool(
                id=id,
                content=content,
                tool_call_id=_text(message.tool_call_id or f"segment-{index}"),
                function=_text(message.name or "tool"),
            )
        calls = [
            ToolCall(
                id=_text(call.id or f"segment-{index}-{number}"),
                function=_text(call.name),
                arguments=_clean(call.arguments),
            )
            for number, call in enumerate(message.tool_calls)
        ]
        source = "generate" if segment.sampled else "input"
        return ChatMessageAssistant(
            id=id, content=content, tool_calls=calls or None, model=self._model, source=source
        )


def _credit(segment: Segment) -> dict[str, Any]:
    """The step reward, the mean advantage and the versions of a turn."""
    facts: dict[str, Any] = {}
    if segment.reward is not None:
        facts["reward"] = _number(segment.reward)
    if segment.advantages:
        facts["advantage"] = _number(math.fsum(segment.advantages) / len(segment.advantages))
    if segment.policy_version is not None:
        facts["policy_version"] = segment.policy_version
    return facts


def _content(message: Message) -> Any:
    """The text; with thinking, a list of two parts."""
    from inspect_ai.model import ContentReasoning, ContentText

    if not message.thinking:
        return _text(message.content)
    parts = [ContentReasoning(reasoning=_text(message.thinking))]
    return [*parts, ContentText(text=_text(message.content))]


def _model(run: RunRow) -> str:
    return f"ludus/{_text(run.id)}"


def _text(text: str) -> str:
    """Text that UTF-8 can hold: a lone surrogate becomes a question mark."""
    return text.encode("utf-8", "replace").decode()


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _clean(value: Any) -> Any:
    """A value of JSON without lone surrogates and numbers that are not finite."""
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, dict):
        return {_text(str(key)): _clean(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return value
