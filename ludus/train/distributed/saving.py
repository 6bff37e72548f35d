"""Sharded checkpoints: each rank writes its parts, in the background; rank 0 commits the folder.

    copy          each rank copies its parts of weights and optimizer state to main memory
    background    torch.distributed.checkpoint (DCP) writes them in the safetensors format, without
                  pickle; each rank reads its files back and hashes them
    commit        rank 0 writes state and manifest, and renames the folder

Whole checkpoints of the local back end are read too: each rank reads its parts of the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ludus.core.errors import CheckpointError
from ludus.core.seeds import derive_seed
from ludus.train.checkpoint.folder import checkpoint_folder
from ludus.train.checkpoint.loading import (
    identity,
    read_state,
    require_same_model,
    saved_groups,
)
from ludus.train.checkpoint.manifest import (
    OPTIMIZER_GROUPS,
    STATE,
    file_sha256,
    read_manifest,
    require_intact,
)
from ludus.train.checkpoint.policy import require_same_tokenizer
from ludus.train.checkpoint.shards import MODEL_PREFIX, OPTIMIZER_PREFIX, regions
from ludus.train.checkpoint.state import (
    all_tensors,
    load_optimizer,
    optimizer_state,
    random_state,
    raw,
    require_json,
    seed_random,
    set_random_state,
    trained_tensors,
)
from ludus.train.checkpoint.store import CheckpointStore
from ludus.train.checkpoint.tensors import TensorFiles
from ludus.train.distributed.group import Group
from ludus.train.distributed.sharding import Parts, local

Files = dict[str, dict[str, Any]]


@dataclass(slots=True)
class _Job:
    """A checkpoint to write: everything is a copy."""

    store: CheckpointStore
    stage: str
    step: int
    tensors: dict[str, Tensor]
    texts: dict[str, str]
    model: dict[str, Any]
    metric: float | None
    pin: bool


class ShardedCheckpoints:
    """Writes and reads the checkpoints of a sharded model.

    Args:
        model: the whole model, before it is sharded.
        tokenizer: fingerprint of the policy's tokenizer.
        seed: of the run; for ranks that a checkpoint has no random state of.
    """

    def __init__(
        self,
        group: Group,
        mesh: DeviceMesh,
        store: CheckpointStore,
        model: nn.Module,
        tokenizer: str,
        seed: int,
    ) -> None:
        self._group, self._store, self._model = group, store, model
        self._tokenizer, self._seed = tokenizer, seed
        trained = trained_tensors(model)
        self._identity = {**identity(model, trained), "trained": sorted(trained)}
        # The copies are in main memory.
        self._mesh = mesh
        if mesh.device_type != "cpu":
            self._mesh = init_device_mesh(
                "cpu", tuple(mesh.shape), mesh_dim_names=mesh.mesh_dim_names
            )
        self._thread: Thread | None = None
        self._failure: str | None = None

    def start(
        self,
        stage: str,
        step: int,
        optimizer: torch.optim.Optimizer,
        parts: Parts,
        state: Mapping[str, Any],
        metric: float | None,
        pin: bool,
    ) -> Path:
        """Copy the state and start to write it; returns the checkpoint's future folder.

        Errors: CheckpointError for a value that cannot be saved.
        """
        group = self._group
        generators = group.gather(random_state())
        moments, groups = optimizer_state(optimizer, parts)
        everything = {**state, "tokenizer": self._tokenizer}
        if generators:
            everything |= {"random": generators[0], "random_of_ranks": generators}
        group.jointly(lambda: require_json(everything, "state"))
        tensors = self._weights(self._model)
        for name, value in moments.items():
            parameter, _, _ = name.rpartition("/")
            like = parts.sharded[parameter]
            tensors[OPTIMIZER_PREFIX + name] = self._copy(value, like if value.ndim else None)
        texts = {STATE: json.dumps(everything), OPTIMIZER_GROUPS: json.dumps(groups)}
        job = _Job(self._store, stage, step, tensors, texts, self._identity, metric, pin)
        path: Path = group.jointly(lambda: self._store.target(stage, step))
        self._thread = Thread(target=self._run, args=(job,), name="ludus-checkpoint", daemon=True)
        self._thread.start()
        return path

    def save_copy(self, folder: Path, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Write a copy of the policy, a reference model, as the only checkpoint in `folder`."""
        self.finish()
        store = CheckpointStore(folder, keep_last=1, keep_best=0)
        names = sorted(dict(self._weights(model)))
        described = {**self._identity, "trained": [n.removeprefix(MODEL_PREFIX) for n in names]}
        texts = {STATE: json.dumps(state)}
        self._run(_Job(store, "reference", 0, self._weights(model), texts, described, None, False))
        self._report()

    def raise_failure(self) -> None:
        """Errors: CheckpointError where a background write has failed, on all ranks."""
        if self._thread is None:
            return
        running = self._group.share((self._thread.is_alive(), self._failure))
        if any(failure for _, failure in running):
            self.finish()

    def finish(self) -> None:
        """Wait for the background write. Errors: CheckpointError."""
        if self._thread is not None:
            self.join()
            self._thread = None
            self._report()

    def join(self) -> None:
        """Wait for the background write, without its errors."""
        if self._thread is not None:
            self._thread.join()

    def _report(self) -> None:
        failures = self._group.share(self._failure)
        self._failure = None
        if found := next(filter(None, failures), None):
            raise self._group.agree(CheckpointError(found))

    def _weights(self, model: nn.Module) -> dict[str, Tensor]:
        tensors = trained_tensors(model)
        return {MODEL_PREFIX + name: self._copy(local(t), t) for name, t in tensors.items()}

    def _copy(self, part: Tensor, like: Tensor | None) -> Tensor:
        """Copy this rank's part of a tensor that is sharded like another."""
        copied = part.detach().to("cpu", copy=True).contiguous()
        if not isinstance(like, DTensor):
            return copied
        is_shared = like.device_mesh.ndim < self._mesh.ndim
        return DTensor.from_local(
            copied,
            self._mesh["dp"] if is_shared else self._mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )

    def _run(self, job: _Job) -> None:
        """Write a checkpoint on all ranks; the failure is the same on all."""
        try:
            failure = self._commit(job) if self._group.rank == 0 else self._follow(job)
        except Exception as error:
            failure = f"the checkpoint {job.stage}-{job.step:06d} was not written: {error}"
        self._failure = failure

    def _commit(self, job: _Job) -> str | None:
        target = job.store.target(job.stage, job.step)
        size = sum(local(tensor).nbytes for tensor in job.tensors.values()) * self._group.size
        failure, told = None, False
        try:
            with checkpoint_folder(target, size) as folder:
                for name, text in job.texts.items():
                    (folder / name).write_text(text, encoding="utf-8")
                self._tell(str(folder))
                told = True
                files = self._write(job, folder) | _facts([folder / name for name in job.texts])
                job.store.describe(
                    folder, job.stage, job.step, job.model, files, job.metric, pin=job.pin
                )
            job.store.prune()
        except CheckpointError as error:
            failure = str(error)
            if not told:
                self._tell(None)
        self._tell(failure)
        return failure

    def _follow(self, job: _Job) -> str | None:
        folder = self._tell(None)
        if folder is not None:
            self._write(job, Path(folder))
        return self._tell(None)

    def _tell(self, text: str | None) -> str | None:
        """Returns the text of rank 0."""
        told: list[str | None] = [text]
        dist.broadcast_object_list(told, src=0, group=self._group.background)
        return told[0]

    def _write(self, job: _Job, folder: Path) -> Files:
        """Write this rank's files; returns the facts of all files on rank 0.

        Errors: CheckpointError on rank 0 where a rank failed.
        """
        own: Files = {}
        failure = None
        try:
            kinds = {name: 1 if name.startswith(MODEL_PREFIX) else 2 for name in job.tensors}
            writer = HuggingFaceStorageWriter(
                str(folder), fqn_to_index_mapping=kinds, save_distributed=True
            )
            save_shards(job.tensors, storage_writer=writer, process_group=self._group.background)
            paths = sorted(folder.glob(f"shard-{self._group.rank + 1:05d}-*.safetensors"))
            _compare(paths, job.tensors)
            own = _facts(paths)
        except Exception as error:  # DCP wraps the errors of all ranks
            failure = f"rank {self._group.rank}: {_cause(error)}"
        every: list[Any] = [None] * self._group.size
        dist.all_gather_object(every, (own, failure), group=self._group.background)
        found = next((text for _, text in every if text), None)
        if found and self._group.rank == 0:
            raise OSError(found)  # as the disk's own errors, which `checkpoint_folder` explains
        return {name: facts for files, _ in every for name, facts in files.items()}

    def load(
        self,
        path: Path,
        optimizer: torch.optim.Optimizer | None = None,
        parts: Parts | None = None,
        *,
        model: nn.Module | None = None,
    ) -> dict[str, Any]:
        """Load weights, and the optimizer's state where one is given; returns the saved state.

        Args:
            model: another one of the policy's shape: a reference, of no tokenizer.

        Errors: CheckpointError, on all ranks; nothing has changed if the checkpoint is damaged or
        of another model.
        """

        def verified() -> tuple[dict[str, Any], dict[str, Any], Any]:
            if self._group.rank == 0:
                require_intact(path)
            manifest = read_manifest(path)
            if not isinstance(manifest, dict):
                raise CheckpointError(str(manifest))
            require_same_model(path, self._identity, manifest["model"])
            state = read_state(path, verified=True)
            if model is None:
                require_same_tokenizer(path, state, self._tokenizer)
            groups = None
            if optimizer is not None and parts is not None:
                groups = saved_groups(path, manifest, optimizer, parts)
            return manifest, state, groups

        manifest, state, groups = self._group.jointly(verified)

        def restore() -> None:
            saved = TensorFiles.model(path, manifest)
            tensors = all_tensors(model or self._model)
            for name in saved.names:
                local(tensors[name]).copy_(_own_part(saved, name, tensors[name]))
            if optimizer is not None and parts is not None:
                files = TensorFiles.optimizer(path, manifest)
                moments = {
                    name: _own_part(files, name, parts.sharded[name.rpartition("/")[0]])
                    for name in files.names
                }
                load_optimizer(optimizer, parts, moments, groups)

        self._group.jointly(restore)
        return state

    def restore_random(self, state: Mapping[str, Any]) -> None:
        """Restore this rank's random state; a rank without one draws from a seed of its own."""
        states = state.get("random_of_ranks", [state["random"]])
        rank, now = self._group.rank, random_state()

        def restore() -> None:
            if rank >= len(states):
                seed_random(derive_seed(self._seed, "rank", rank, state["optimizer_step"]))
                return
            saved = states[rank]
            same = len(saved["cuda"]) == len(now["cuda"])
            set_random_state(saved if same else {**saved, "cuda": now["cuda"]})

        self._group.jointly(restore)


def _own_part(files: TensorFiles, name: str, like: Tensor) -> Tensor:
    """Reads this rank's part of a tensor that is sharded like another; scalars are not sharded."""
    if not isinstance(like, DTensor) or files.shape(name) != tuple(like.shape):
        return files.read(name)
    sizes, offsets = compute_local_shape_and_global_offset(
        like.shape, like.device_mesh, like.placements
    )
    return files.read(name, offsets, sizes)


def _facts(paths: list[Path]) -> Files:
    return {path.name: {"size": path.stat().st_size, "sha256": file_sha256(path)} for path in paths}


def _compare(paths: list[Path], tensors: Mapping[str, Tensor]) -> None:
    """Compare the tensors in files with the originals. Errors: CheckpointError."""
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for region in regions(path):
                if not torch.equal(
                    raw(file.get_tensor(region.key)), raw(local(tensors[region.key]))
                ):
                    raise CheckpointError(
                        f"{path}: {region.key} differs when read back: is the disk failing?"
                    )


def _cause(error: BaseException) -> str:
    """The first error that DCP collected from the ranks, in a line."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    return " ".join(str(error).split())[:300]
