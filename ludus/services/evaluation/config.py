"""The judges of an evaluation service, by the names that clients use.

`--judges` names judges with their default arguments. `--config FILE` adds judges with the
operator's arguments, such as a model's address:

    judges:
      helpful: {name: rubric, args: {base_url: "http://127.0.0.1:8000/v1", model: judge, criteria: [...]}}
      math: {name: math, args: {limit_s: 2, workers: 8}, client_args: [digits]}

A client may set the arguments of `client_args` alone. Addresses, files, memory, processes, time
limits and judges within judges are the operator's.
"""  # noqa: E501

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from ludus.config import yaml12
from ludus.core.errors import ConfigError, ToolError, did_you_mean, first_fault
from ludus.core.types import Spec, Wire
from ludus.judges import JUDGES
from ludus.judges.base import check_all, close_all

CLIENT_ARGS: dict[str, tuple[str, ...]] = {
    "answer": ("extract", "markers", "tolerance"),
    "choice": ("options",),
    "code": ("max_tests", "reward"),
    "format": ("markers", "thinking"),
    "math": ("digits", "extract"),
    "qa": ("extract", "markers", "metric"),
}
"""Arguments without effect on what a judge may reach, or how much it may use.

Not `pattern` of `format`: a short one can take seconds to compile, and each has its processes.
"""

CONCURRENT = 16


@dataclass(frozen=True)
class ServedJudge:
    """A judge that clients may name.

    `client_args` are the arguments that clients may set, `concurrent` the evaluations at once, over
    all arguments.
    """

    name: str
    spec: Spec
    client_args: tuple[str, ...]
    concurrent: int

    def with_args(self, args: dict[str, Any]) -> Spec:
        """The judge with a client's arguments. Errors: ConfigError naming the argument."""
        for key in args:
            if key in self.client_args:
                continue
            known = JUDGES.arguments(self.spec.name).model_fields
            if key in known:
                may = ", ".join(self.client_args) or "none"
                raise ConfigError(
                    f"judge.args.{key}: set by the operator of this service (clients may set: "
                    f"{may})"
                )
            near = did_you_mean(key, self.client_args)
            raise ConfigError(f"judge.args.{key}: not an argument of {self.name!r}{near}")
        return Spec(name=self.spec.name, args={**self.spec.args, **args})


class _Entry(Wire):
    """A judge in the file of `--config`."""

    name: str
    args: dict[str, Any] = Field(default_factory=dict)
    client_args: list[str] | None = None
    concurrent: Annotated[int | None, Field(ge=1, le=4096)] = None


class _File(Wire):
    judges: dict[str, _Entry]


def served_judges(names: str, config: str | None = None) -> tuple[ServedJudge, ...]:
    """The judges of `--judges` and `--config`; those of the file win.

    Errors: ConfigError, MissingDependency.
    """
    entries = {name: _Entry(name=name) for name in _names(names)}
    entries |= {} if config is None else _read(Path(config).expanduser())
    if not entries:
        raise ConfigError("--judges: name at least one judge")
    return tuple(_served(name, entry) for name, entry in sorted(entries.items()))


async def check_judges(judges: Sequence[ServedJudge]) -> None:
    """Build each judge and check what it needs. Errors: ConfigError, MissingDependency."""
    for served in judges:
        if served.spec.name == "format" and not served.spec.args:
            continue  # its arguments are the clients'
        judge = JUDGES.build(served.spec, f"judges.{served.name}")
        try:
            await check_all([judge])
        except ToolError as error:
            raise ConfigError(f"judges.{served.name}: {error}") from None
        finally:
            await close_all([judge])


def _names(names: str) -> list[str]:
    found = [name.strip() for name in names.split(",") if name.strip()]
    for name in found:
        try:
            required = [
                key
                for key, field in JUDGES.arguments(name).model_fields.items()
                if field.is_required()
            ]
        except ConfigError as error:
            raise ConfigError(f"--judges: {error}") from None
        if required:
            raise ConfigError(
                f"--judges: {name} needs the argument {required[0]!r}: give it in a file, with "
                f"--config (judges: {{{name}: {{name: {name}, args: {{{required[0]}: ...}}}}}})"
            )
    return found


def _read(path: Path) -> dict[str, _Entry]:
    """The judges of a file. Errors: ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: {str(path)!r} cannot be read: {error}") from None
    content, _ = yaml12.parse(text, str(path))
    try:
        return _File.model_validate(content).judges
    except ValidationError as error:
        raise ConfigError(f"{path}: {first_fault(error, 'the file')}") from None


def _served(name: str, entry: _Entry) -> ServedJudge:
    """Errors: ConfigError."""
    place = f"judges.{name}"
    if not name or len(name) > 200:
        raise ConfigError(f"{place}: a name has 1 to 200 characters")
    args = dict(entry.args)
    if entry.name == "math":
        args.setdefault("workers", min(256, os.cpu_count() or 1))
    spec = Spec(name=entry.name, args=args)
    try:
        known = JUDGES.arguments(entry.name).model_fields
    except ConfigError as error:
        raise ConfigError(f"{place}.name: {error}") from None
    own = entry.client_args
    if own is None:
        own = [key for key in CLIENT_ARGS.get(entry.name, ()) if key not in entry.args]
    for key in own:
        if key not in known:
            raise ConfigError(
                f"{place}.client_args: {key!r} is no argument of {entry.name!r}"
                f"{did_you_mean(key, known)}"
            )
    # Few comparisons wait in the pool of processes itself, whose queue knows no clients.
    default = 2 * args["workers"] if entry.name == "math" else CONCURRENT
    concurrent = entry.concurrent or (default if isinstance(default, int) else CONCURRENT)
    return ServedJudge(name, spec, tuple(own), concurrent)
