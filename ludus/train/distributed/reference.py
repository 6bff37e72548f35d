"""The frozen reference model of a KL divergence, sharded like the policy.

kl_reference: PATH    the model at PATH
LoRA policy           the policy with its adapters disabled
else                  a copy of the policy at the start of the stage, made part by part
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ludus.config.schema import LearnerConfig
from ludus.core.errors import CheckpointError
from ludus.train.checkpoint.state import all_tensors, digest_each
from ludus.train.distributed.group import Group
from ludus.train.distributed.saving import ShardedCheckpoints
from ludus.train.distributed.settings import ShardSettings
from ludus.train.distributed.sharding import ShardedForward, copy_of, full
from ludus.train.reference import MISSING, saved_reference


class ShardedReference:
    """A reference for one stage.

    Args:
        forward: passes of the reference model.
        adapters_off: the model is the policy, without its adapters.
        copied: the model is a copy of the policy.
    """

    def __init__(
        self,
        group: Group,
        forward: ShardedForward,
        *,
        adapters_off: bool = False,
        copied: bool = False,
    ) -> None:
        self._group, self.forward = group, forward
        self.adapters_off, self.copied = adapters_off, copied
        self._kept: str | None = None  # fingerprint of the saved copy

    @classmethod
    def of_policy(
        cls,
        group: Group,
        forward: ShardedForward,
        skeleton: nn.Module,
        mesh: DeviceMesh,
        settings: ShardSettings,
    ) -> ShardedReference:
        """The policy as it is now."""
        if hasattr(forward.model, "disable_adapter"):
            plain = forward.with_temperature(forward.temperature)
            plain.settings = LearnerConfig()
            return cls(group, plain, adapters_off=True)
        return cls(group, copy_of(forward, skeleton, mesh, settings), copied=True)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context in which the model computes as the reference."""
        if not self.adapters_off:
            yield
            return
        with self.forward.model.disable_adapter():
            yield

    def save(self, folder: Path, checkpoints: ShardedCheckpoints) -> str | None:
        """As `Reference.save`."""
        if not self.copied:
            return None
        if self._kept is None:
            self._kept = fingerprint(self.forward.model)
            if self._group.jointly(lambda: saved_reference(folder)) != self._kept:
                content = {"fingerprint": self._kept}
                checkpoints.save_copy(folder, self.forward.model, content)
        return self._kept

    def load(self, folder: Path, content: str | None, checkpoints: ShardedCheckpoints) -> None:
        """As `Reference.load`. Errors: CheckpointError for a different model."""
        if not self.copied:
            return
        path = folder / "reference-000000"

        def present() -> None:
            if content is None:
                raise CheckpointError(MISSING)
            if not path.exists():
                raise CheckpointError(f"{path}, the reference model of this stage, is missing")

        self._group.jointly(present)
        checkpoints.load(path, model=self.forward.model)
        self._kept = None
        if fingerprint(self.forward.model) != content:
            raise self._group.agree(
                CheckpointError(f"{path} holds another reference model than the run trained with")
            )


def fingerprint(model: nn.Module) -> str:
    """The digest of all weights that the unsharded model has; tensors are gathered one by one."""
    tensors: dict[str, Any] = all_tensors(model)
    return digest_each((name, full(tensors[name])) for name in sorted(tensors))
