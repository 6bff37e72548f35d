"""Every error that ludus raises on purpose.

    LudusError
    ├── ConfigError            a key, a value or a combination that the user can mend
    ├── DataError              a malformed line, a missing file, splits that overlap
    ├── MissingDependency      names the extra to install
    ├── EpisodeError           ends one episode, never the run
    │   ├── EnvError           the environment raised or returned rubbish (status error_env)
    │   ├── ToolError          a tool broke                             (status error_tool)
    │   ├── SamplerError       what samples broke down                  (status error_sampler)
    │   ├── EpisodeTimeout     a deadline passed                        (status error_timeout)
    │   ├── ContextOverflow    the prompt does not fit the context     (status truncated_length)
    │   └── Unscorable         nothing could give a reward              (status unscorable)
    ├── CheckpointError        damaged, incomplete, or of another model
    ├── StoreError             the run store is locked, full, or of another schema
    ├── MirrorError            a run's copy in object storage cannot be written or read
    └── TrainingError          a loss that is not finite, weights of the wrong version

A message says where, what is wrong, and what would be right. The command line prints it without
a traceback and exits with 1 (2 for ConfigError: the command was called wrongly).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LudusError(Exception):
    """Base of all errors that ludus raises on purpose."""

    exit_code = 1


class ConfigError(LudusError):
    """The configuration is wrong, at a place that the message names."""

    exit_code = 2


class DataError(LudusError):
    """A data file cannot be used as it is."""


class MissingDependency(LudusError):
    """A package is absent; `extra` is what brings it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package}, which is not installed: "
            f"pip install 'ludus-rl[{extra}]'"
        )
        self.package, self.extra = package, extra


class EpisodeError(LudusError):
    """Ends one episode. The run goes on; the trajectory keeps the message."""


class EnvError(EpisodeError):
    """The environment broke: not the model's fault, so never a reward of 0."""


class ToolError(EpisodeError):
    """A tool broke: not the model's fault, so never a reward of 0."""


class SamplerError(EpisodeError):
    """What samples broke down in the midst of a turn: not the model's fault."""


class EpisodeTimeout(EpisodeError):
    """The episode, or one step of it, took longer than it may."""


class ContextOverflow(EpisodeError):
    """The conversation does not fit the model's context."""


class Unscorable(EpisodeError):
    """Neither the environment nor a judge could give a reward."""


class CheckpointError(LudusError):
    """A checkpoint is damaged, incomplete, or belongs to another model."""


class StoreError(LudusError):
    """The run store cannot be read or written."""


class MirrorError(LudusError):
    """The copy of a run in object storage cannot be written or read."""


class TrainingError(LudusError):
    """Training cannot go on: a loss that is not finite, weights of the wrong version."""


def did_you_mean(name: str, choices: Iterable[str], full: str = "{}") -> str:
    """` (did you mean X?)`, or the choices when none is near, or nothing when there are none."""
    known = sorted(choices)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f" (did you mean {full.format(near[0])}?)"
    if 0 < len(known) <= 12:
        return f" (known: {', '.join(known)})"
    return ""
