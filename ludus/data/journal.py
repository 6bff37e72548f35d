"""Journal of played episodes, or of other work with a model, from which a killed run resumes.

The journal is append-only, one JSON line a record. A truncated last line is dropped, and its
episode is played again. The settings that episodes depend on lie beside the journal; a run with
other settings is refused.
"""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, Self, TypeVar

from pydantic import Field, ValidationError

from ludus.core.errors import DataError
from ludus.core.files import atomic_write
from ludus.core.types import Message, Status, Wire
from ludus.data.demonstrations import Dropped
from ludus.data.expert import Demonstration
from ludus.rollout.jobs import EpisodeRecord

Source = Literal["expert", "model"]
Key = tuple[str, str, str, int]

JOURNAL, SETTINGS = "episodes.jsonl", "settings.json"


class Record(Wire):
    """A played episode. `score` is the reward scaled to [0, 1] by the environment's score range;
    None: not scored, for `reason`. `again` marks an infrastructure failure: the next run plays the
    episode again.
    """

    env: str
    task_id: str
    tier: str | None = None
    source: Source
    sample: int = 0
    messages: list[Message] = Field(default_factory=list)
    reward: float | None = None
    score: float | None = None
    success: bool = False
    num_turns: int = 0
    reason: str | None = None
    again: bool = False

    @property
    def key(self) -> Key:
        return self.env, self.source, self.task_id, self.sample


def expert_record(
    env: str, played: Demonstration | Dropped, score_range: tuple[float, float], system: str | None
) -> Record:
    """The record of an expert's episode; it opens with the system prompt, as rollouts do."""
    base: dict[str, Any] = {"env": env, "task_id": played.task_id, "tier": played.tier}
    if isinstance(played, Dropped):
        return Record(**base, source="expert", reason=f"{played.kind}: {played.reason}")
    opening = [Message(role="system", content=system)] if system else []
    low, high = score_range
    return Record(
        **base,
        source="expert",
        messages=opening + played.messages,
        reward=played.reward,
        score=(played.reward - low) / (high - low),
        success=played.success,
        num_turns=played.num_turns,
    )


def model_record(env: str, episode: EpisodeRecord) -> Record:
    """The record of a model's episode."""
    return Record(
        env=env,
        task_id=episode.task_id,
        tier=episode.tier,
        source="model",
        sample=episode.sample,
        messages=episode.conversation,
        reward=episode.reward,
        score=episode.score if episode.scored else None,
        success=episode.success,
        num_turns=episode.num_turns,
        reason=None if episode.scored else f"{episode.status.value}: {episode.error}",
        again=episode.status.retryable or episode.status is Status.ABORTED,
    )


class Entry(Protocol):
    """A record of a journal, a model of pydantic; `again`: the next run makes it again."""

    again: bool

    @property
    def key(self) -> Any: ...

    def model_dump_json(self, *, exclude_defaults: bool) -> str: ...

    @classmethod
    def model_validate_json(cls, json_data: bytes) -> Self: ...


R = TypeVar("R", bound=Entry)


class Journal(Generic[R]):
    """The records of a folder, as a context manager. One process at a time.

    Args:
        settings: the settings that the records depend on.
        kind: the class of the records.
        name: the file's name.

    Errors: DataError if the folder has other settings, or cannot be used.
    """

    def __init__(
        self, folder: Path, settings: dict[str, Any], kind: type[R], name: str = JOURNAL
    ) -> None:
        self.records: dict[Any, R] = {}
        self._kind, self._path = kind, folder / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._check(folder / SETTINGS, settings)
            self._file = self._path.open("ab")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process
            self._file.truncate(self._read())
        except BlockingIOError:
            self._file.close()
            raise DataError(f"{folder}: another process writes to this folder") from None
        except OSError as error:
            raise DataError(f"{folder}: cannot be written: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def has(self, key: Any) -> bool:
        """True if the journal holds the record, and it need not be made again."""
        return key in self.records and not self.records[key].again

    def add(self, record: R) -> None:
        """Add a record; flushed to the file, so it survives the death of this process."""
        self.records[record.key] = record
        self._file.write(record.model_dump_json(exclude_defaults=True).encode() + b"\n")
        self._file.flush()

    def _check(self, path: Path, settings: dict[str, Any]) -> None:
        if not path.exists():
            if self._path.exists():
                raise DataError(f"{path} is missing beside {self._path.name}: use a new folder")
            atomic_write(path, json.dumps(settings, indent=2))
            return
        try:
            before = json.loads(path.read_text("utf-8"))
        except ValueError as error:
            raise DataError(f"{path} is not JSON: {error}") from None
        changed = [k for k in settings if before.get(k) != settings[k]]
        if changed:
            key = changed[0]
            raise DataError(
                f"{path.parent} was written with {key} = {before.get(key)!r:.80}, this run has "
                f"{settings[key]!r:.80}: use a new folder"
            )

    def _read(self) -> int:
        """Read the records; returns the length in bytes of the complete lines."""
        length = 0
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    record = self._kind.model_validate_json(line)
                except ValidationError as error:
                    what = error.errors()[0]["msg"]
                    raise DataError(f"{self._path}, line {number}: {what}") from None
                self.records[record.key] = record
                length += len(line)
        return length
