"""Policies of a run that do not train, and how a back end samples with them.

A back end that can has two methods more than `Backend`:

    fixed_policy(make_model, folder)  -> FixedPolicy
    present_model()                   -> a model with the present weights of the run's policy
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from ludus.models.samplers.base import PolicySampler
from ludus.train.checkpoint.loading import load
from ludus.train.checkpoint.state import all_tensors


class FixedPolicy(Protocol):
    """A policy that does not train."""

    @property
    def sampler(self) -> PolicySampler:
        """Samples with its weights."""

    def take(self, model: Any, version: int) -> None:
        """Sample with the weights of a model of the same shape, under this version."""

    def restore(self, path: Path, version: int) -> None:
        """Sample with the weights of a checkpoint. Errors: CheckpointError."""

    def close(self) -> None:
        """Stop the sampler. Idempotent."""


class FixedPolicies(Protocol):
    """The part of a back end that makes policies which do not train."""

    @property
    def policy_version(self) -> int:
        """Version of the published weights of the run's policy."""

    def fixed_policy(self, make_model: Callable[[], Any], folder: Path) -> FixedPolicy:
        """Returns a policy with the weights of `make_model()`, which may run in other processes.

        Errors: those of `make_model`; ConfigError where there is no room.
        """

    def present_model(self) -> Any:
        """Returns a model with the present weights of the run's policy, to be read."""


class LocalFixed:
    """A fixed policy in this process."""

    def __init__(self, model: Any, sampler: PolicySampler) -> None:
        self._model, self.sampler = model, sampler

    def take(self, model: Any, version: int) -> None:
        given = all_tensors(model)
        with torch.no_grad():
            for name, tensor in all_tensors(self._model).items():
                if tensor.data_ptr() != given[name].data_ptr():  # else the shared base
                    tensor.copy_(given[name])
        self.sampler.publish(version)

    def restore(self, path: Path, version: int) -> None:
        load(path, model=self._model)
        self.sampler.publish(version)

    def close(self) -> None:
        self.sampler.shutdown()


def share_base(policy: Any, model: Any) -> None:
    """Let the frozen tensors of a model be those of the run's policy where they are equal: adapters
    on one base take the memory of one base."""
    own = {name: p for name, p in policy.named_parameters() if not p.requires_grad}
    for name, parameter in model.named_parameters():
        base = own.get(name)
        if base is None or parameter.requires_grad or base.shape != parameter.shape:
            continue
        if base.dtype == parameter.dtype and torch.equal(base, parameter):
            parameter.data = base.data
