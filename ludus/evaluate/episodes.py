"""The episodes of an evaluation as JSON lines: conversations with scores, to be read.

{"model": "qwen3@http://127.0.0.1:8000/v1", "task_id": "q-1", "answer": "42",
 "status": "completed", "reward": 1.0, "scores": {"exact_match": 1.0}, "explanation": null,
 "error": null, "metrics": {"tool_calls": 1.0},
 "messages": [{"role": "user", "content": "..."}, ...]}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

from ludus.core.errors import ConfigError
from ludus.core.types import Message, Task, Trajectory


class EpisodeFile:
    """Writes a line for each episode as it ends. Episodes that could not be scored are there too.

    Errors: ConfigError where the file cannot be written; an existing file is not overwritten.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # a lone surrogate is invalid in UTF-8; backslashreplace gives its JSON escape
            self._file = path.open("x", encoding="utf-8", errors="backslashreplace")
        except FileExistsError:
            raise ConfigError(f"--out {path}: the file exists; name a new one") from None
        except OSError as error:
            raise ConfigError(f"--out {path}: cannot be written: {error.strerror}") from None

    def __enter__(self) -> EpisodeFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        empty = self._file.tell() == 0
        self._file.close()
        if empty:  # nothing was played: the same command may run again
            self.path.unlink(missing_ok=True)

    def recorder(self, model: str, tasks: Iterable[Task]) -> Callable[[Trajectory], None]:
        """Returns a function that writes an episode of `model` with one of these tasks."""
        answers = {task.id: task.answer for task in tasks}

        def write(trajectory: Trajectory) -> None:
            row = {
                "model": model,
                "task_id": trajectory.task_id,
                "answer": answers.get(trajectory.task_id),
                "status": trajectory.status.value,
                "reward": trajectory.reward,
                "scores": trajectory.scores,
                "explanation": trajectory.explanation,
                "error": trajectory.error,
                "metrics": trajectory.metrics,
                "messages": [_chat(message) for message in messages_of(trajectory)],
            }
            try:
                self._file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
                self._file.flush()
            except OSError as error:
                raise ConfigError(f"--out {self.path}: {error.strerror}") from error

        return write


def messages_of(trajectory: Trajectory) -> list[Message]:
    """The conversation: messages from the root to the last segment."""
    segments = (trajectory.segments[i] for i in trajectory.path())
    return [segment.message for segment in segments if segment.message is not None]


def _chat(message: Message) -> dict[str, object]:
    fields = message.model_dump(mode="json", exclude_defaults=True)
    return {"role": message.role, "content": "", **fields}
