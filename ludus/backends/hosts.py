"""Hosts: trainers of other frameworks that own their loop, with ludus as their agent loop.

An engine (`backends.base.Backend`) sits under our loop. A host has no such methods: it gets the
recipe in its own terms, and a host refuses a recipe key that it cannot honour.

    Table        each recipe key: mapped, adapted or refused
    Host         the arguments of `backend: {name: HOST, args: ...}`, the command of its process
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, cast

from ludus.backends import BACKENDS
from ludus.config.reference import keys
from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError
from ludus.core.types import Spec

Settings = Mapping[str, Any]
"""Values by the host's dotted keys."""


class Host(Protocol):
    """A host's side of a run, in the process of `ludus train`. It imports no package of the host.

    Args of the class are those of `backend.args`.
    """

    is_host: ClassVar[bool] = True
    """Of the class: distinguishes it from an engine."""

    name: ClassVar[str]
    """Of the folder with its files, in the run's folder."""

    python: str
    """The interpreter of the host's environment."""

    def check(self, config: RunConfig) -> list[str]:
        """Returns the adaptations to tell the user. Errors: ConfigError, one line for each recipe
        key that the host cannot honour; MissingDependency where the host is not installed."""

    def prepare(self, config: RunConfig, folder: Path, play: HostPlay) -> HostJob:
        """Write what the host's process reads to `folder`; returns how to start it."""

    def steps_done(self, folder: Path) -> int:
        """The RL steps in the host's newest checkpoint; 0 where there is none."""

    def weights(self, folder: Path, step: int) -> Path:
        """The Hugging Face folder with the weights after `step` RL steps.

        Errors: CheckpointError.
        """

    def metrics(self, values: Mapping[str, float]) -> dict[str, float]:
        """The metrics of a step in our names; others keep theirs, behind the host's name."""


def is_hosted(config: RunConfig) -> bool:
    """True if a host trains this configuration."""
    return getattr(BACKENDS.load(config.backend.name), "is_host", False)


def open_host(config: RunConfig) -> Host:
    """Returns the host of a configuration. Errors: ConfigError."""
    args = BACKENDS.check(config.backend, "backend")
    return cast(Host, BACKENDS.load(config.backend.name)(**args))


@dataclass(frozen=True, slots=True)
class HostPlay:
    """The parts of a run that a host's workers play.

    Args:
        run: the run's folder.
        model: a Hugging Face folder with the weights that RL starts from.
        env: the environment, which may differ from the recipe's by its address.
        train, heldout: files with one task a line, as JSON: in the order of training; those of
            the evaluations between steps.
        opener: "module:function" that opens the collector in a worker.
        evaluate_first: True where the run ended between a step's checkpoint and its evaluation: the
            host evaluates the checkpoint's weights before it goes on.
    """

    run: Path
    model: Path
    env: Spec | None
    train: Path
    heldout: Path
    opener: str
    evaluate_first: bool = False


@dataclass(frozen=True, slots=True)
class HostJob:
    """A host's process.

    Args:
        steps: its file of steps, one JSON line each: `{"step": 1, "data": {...}}`, from 1 on.
        episodes: the folder in which the workers append finished groups (`hosted`).
        log: file for the output of the process.
        temporary: a folder of the process to remove after its end.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    steps: Path
    episodes: Path
    log: Path
    temporary: Path | None = None


@dataclass(frozen=True, slots=True)
class Key:
    """The handling of one recipe key, or of all keys of a section.

    Args:
        key: its dotted name; that of a section stands for all its keys.
        handling: mapped: same meaning; adapted: see the note; refused: other values than `allowed`.
        to: the host's keys that get its value.
        note: what differs (adapted), or the reason (refused).
        value: the values of the host's keys; default: the recipe's value for each of `to`.
        allowed: the values of a refused key that change nothing.
        fault: the reason to refuse a value of a mapped or adapted key; None: it is fine.
    """

    key: str
    handling: Literal["mapped", "adapted", "refused"]
    to: tuple[str, ...] = ()
    note: str = ""
    value: Callable[[RunConfig], Settings] | None = None
    allowed: tuple[Any, ...] = (None,)
    fault: Callable[[RunConfig], str | None] | None = None


def mapped(key: str, *to: str, note: str = "", **rest: Any) -> Key:
    """A key whose value the host takes over, or that ludus honours itself."""
    return Key(key, "mapped", to, note, **rest)


def adapted(key: str, *to: str, note: str, **rest: Any) -> Key:
    """A key that has a slightly different meaning in the host."""
    return Key(key, "adapted", to, note, **rest)


def refused(key: str, reason: str, *allowed: Any) -> Key:
    """A key that the host cannot honour, unless its value is one of `allowed`; default: null."""
    return Key(key, "refused", (), reason, allowed=allowed or (None,))


class Table:
    """The meaning of each recipe key to a host.

    Args:
        host: its name.
        rows: in any order; the table has that of the recipe's keys.
        others: the back ends that honour what this host refuses.
    """

    def __init__(self, host: str, rows: Sequence[Key], others: Sequence[str] = ("local",)) -> None:
        order = [entry.key.replace(".NAME", "") for entry in keys(RunConfig)]
        self.host, self.others = host, tuple(others)
        self.rows = tuple(sorted(rows, key=lambda row: order.index(row.key)))
        self._by_key = {row.key: row for row in rows}

    def row(self, key: str) -> Key | None:
        """The row of a key: its own, or that of the nearest section; None where there is none."""
        parts = key.split(".")
        names = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        return next((self._by_key[name] for name in names if name in self._by_key), None)

    def require_honoured(self, config: RunConfig) -> None:
        """Errors: ConfigError, one line for each key that the host cannot honour."""
        if faults := list(self.faults(config)):
            raise ConfigError("\n".join(faults))

    def faults(self, config: RunConfig) -> Iterator[str]:
        """Yield a line for each key that the host cannot honour, with its reason."""
        honoured = f"Back ends that can: {', '.join(self.others)}"
        for row in self.rows:
            reason = None
            if row.handling == "refused":
                reason = None if value_at(config, row.key) in row.allowed else row.note
            elif row.fault is not None:
                reason = row.fault(config)
            if reason:
                yield f"{row.key}: {self.host} cannot honour it: {reason}. {honoured}"

    def adaptations(self, config: RunConfig) -> list[str]:
        """The notes of the adapted keys that the recipe sets to others than their defaults."""
        return [
            f"{row.key}: {row.note}"
            for row in self.rows
            if row.handling == "adapted" and value_at(config, row.key) != _default(row.key)
        ]

    def settings(self, config: RunConfig) -> dict[str, Any]:
        """The values of the host's keys."""
        found: dict[str, Any] = {}
        for row in self.rows:
            if row.value is not None:
                found |= row.value(config)
            elif row.to and (value := value_at(config, row.key)) is not None:
                found |= dict.fromkeys(row.to, value)
        return found

    def markdown(self) -> str:
        """The table of the documentation."""
        lines = ["| recipe key | handling | the host's key, or who honours it |", "|---|---|---|"]
        for row in self.rows:
            keys = ", ".join(f"`{key}`" for key in row.to)
            cell = "; ".join(filter(None, [keys, row.note])) or "ludus, in the host's workers"
            name = f"`{row.key}`" + (" and its keys" if _is_section(row.key) else "")
            lines.append(f"| {name} | {row.handling} | {cell.replace('|', chr(92) + '|')} |")
        return "\n".join(lines)


def value_at(config: RunConfig, key: str) -> Any:
    """The value of a dotted key; None within a section that is null."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part, None)
    return value


def _model_of(annotation: Any) -> Any:
    """The section in a type such as `RLConfig | None`; None for other types."""
    kinds = [annotation, *getattr(annotation, "__args__", ())]
    plain = (getattr(kind, "__origin__", kind) for kind in kinds)
    named = (kind for kind in plain if hasattr(kind, "model_fields") and kind is not Spec)
    return next(named, None)


def _field(key: str) -> Any:
    model: Any = RunConfig
    field: Any = None
    for part in key.split("."):
        field = model.model_fields[part]
        model = _model_of(field.annotation)
    return field


def _default(key: str) -> Any:
    return _field(key).get_default(call_default_factory=True)


def _is_section(key: str) -> bool:
    return _model_of(_field(key).annotation) is not None
