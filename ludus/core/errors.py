"""The errors that ludus raises.

    LudusError
    ├── ConfigError            a key, a value or a combination that the user can correct
    │   └── SchemaError        a JSON schema that cannot constrain an answer
    ├── DataError              a malformed line, a missing file, splits that overlap
    ├── MissingDependency      names the extra to install
    ├── EpisodeError           ends one episode, never the run
    │   ├── EnvError           the environment raised, or returned invalid data (status error_env)
    │   │   └── EnvLost        its process died or hung; another attempt helps
    │   ├── ToolError          a tool failed                            (status error_tool)
    │   ├── SamplerError       the sampler failed                       (status error_sampler)
    │   ├── EpisodeTimeout     a deadline passed                        (status error_timeout)
    │   ├── ContextOverflow    the prompt does not fit the context     (status truncated_length)
    │   └── Unscorable         no reward could be computed              (status unscorable)
    ├── CheckpointError        damaged, incomplete, or of another model
    │   └── AbsentCheckpoint   there is none; a training may have removed it
    ├── StoreError             the run store is locked, full, or of another schema
    ├── MirrorError            the copy of a run in object storage cannot be written or read
    └── TrainingError          a loss that is not finite, weights of the wrong version

A message says where, what is wrong, and what would be right. The command line prints the message
without a traceback and exits with 1 (2 for ConfigError and MissingDependency: nothing has started).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pydantic import ValidationError


class LudusError(Exception):
    """Base class of all errors that ludus raises."""

    exit_code = 1


class ConfigError(LudusError):
    """The configuration is wrong; the message names the key."""

    exit_code = 2


class DataError(LudusError):
    """A data file cannot be used as it is."""


class MissingDependency(LudusError):
    """A package is not installed; `extra` is the extra that installs it."""

    exit_code = 2

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package}, which is not installed: "
            f"pip install 'ludus-rl[{extra}]'"
        )
        self.package, self.extra, self.purpose = package, extra, purpose

    def __reduce__(self) -> tuple[type[Self], tuple[str, str, str]]:
        return type(self), (self.package, self.extra, self.purpose)  # crosses processes


class EpisodeError(LudusError):
    """Ends one episode. The run goes on; the trajectory keeps the message."""


class EnvError(EpisodeError):
    """The environment failed. The model did not cause it, so the reward is never 0."""


class EnvLost(EnvError):
    """The environment's process died or hung: the task is not the cause, another attempt helps."""


class ToolError(EpisodeError):
    """A tool failed. The model did not cause it, so the reward is never 0."""


class SamplerError(EpisodeError):
    """The sampler failed during a turn. The model did not cause it."""


class EpisodeTimeout(EpisodeError):
    """The episode, or one of its steps, exceeded its time limit."""


class SchemaError(ConfigError):
    """A JSON schema that cannot constrain an answer."""


class ContextOverflow(EpisodeError):
    """The conversation does not fit the model's context."""


class Unscorable(EpisodeError):
    """Neither the environment nor a judge could compute a reward."""


class CheckpointError(LudusError):
    """A checkpoint is damaged, incomplete, or belongs to another model."""


class AbsentCheckpoint(CheckpointError):
    """There is no such checkpoint, or a training in progress has just removed it."""


class StoreError(LudusError):
    """The run store cannot be read or written."""


class MirrorError(LudusError):
    """The copy of a run in object storage cannot be written or read."""


class TrainingError(LudusError):
    """Training cannot continue: a loss that is not finite, weights of the wrong version, or a
    function of an algorithm that fails."""


_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Returns the text with a terminal's control characters and direction marks escaped: a model or
    a server may have written it."""
    return _UNPRINTABLE.sub(lambda hit: hit[0].encode("unicode_escape").decode(), text)


def described(error: BaseException) -> str:
    """Returns type and message of an error of a user's code, whose `__str__` may raise too."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__} (its message cannot be read)"


def first_fault(error: ValidationError, whole: str = "it") -> str:
    """The first fault of a validation, as `place: reason`; `whole` is the place of the root."""
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"])) or whole
    return f"{place}: {first['msg']}" if place else str(first["msg"])


def counted(number: float, noun: str, plural: str = "") -> str:
    """`1 row`, `1,200 rows`; `plural` where it is not the noun with an s."""
    shown = f"{number:,.0f}"
    return f"{shown} {noun if shown == '1' else plural or noun + 's'}"


def did_you_mean(name: str, choices: Iterable[str], full: str = "{}") -> str:
    """` (did you mean X?)`; the choices, where no name is near; empty without choices."""
    known = sorted(choices)
    near = [each for each in known if each.lower() == name.lower()]
    near += [each for each in known if sorted(each) == sorted(name)]  # letters in another order
    near = near or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f" (did you mean {full.format(near[0])}?)"
    if 0 < len(known) <= 20:
        return f" (known: {', '.join(known)})"
    return ""
