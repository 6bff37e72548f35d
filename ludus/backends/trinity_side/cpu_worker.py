"""vLLM's worker on a CPU, with the weights of Trinity's synchronizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.v1.worker.cpu_worker import CPUWorker

from ludus.backends.host_side.cpu import keep_weights_unpacked
from ludus.backends.host_side.player import this_job


class CpuWorker(CPUWorker):  # type: ignore[misc]
    """In place of Trinity's worker for GPUs."""

    def apply_patches(self) -> None:
        """Trinity's changes are for layers that a CPU does not run."""

    def load_model(self, *args: Any, **options: Any) -> None:
        """Load the model, whose weights can be loaded again."""
        keep_weights_unpacked()
        if "checkpoint" not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine("checkpoint", __name__, "MemoryTransfer")
        super().load_model(*args, **options)


@dataclass
class Origin(WeightTransferInitInfo):  # type: ignore[misc]
    """Trinity's description of itself, of which the namespace is needed."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    sync_method: str
    namespace: str


@dataclass
class Update(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Nothing: the synchronizer has the newest weights."""


class MemoryTransfer(WeightTransferEngine[Origin, Update]):  # type: ignore[misc]
    """Takes all weights from Trinity's synchronizer, an actor of Ray."""

    init_info_cls = Origin
    update_info_cls = Update

    def init_transfer_engine(self, init_info: Origin) -> None:
        """Join Trinity's Ray, of which this process is no worker."""
        self._namespace = init_info.namespace
        if not ray.is_initialized():
            address = Path(this_job()["address"]).read_text(encoding="utf-8")
            ray.init(address=address, namespace=self._namespace, log_to_driver=False)

    def start_weight_update(self) -> None:
        """Weights are loaded in place."""

    def finish_weight_update(self) -> None:
        """Weights are loaded in place."""

    def receive_weights(self, update_info: Update) -> None:
        """Load all weights."""
        from trinity.manager.synchronizer import Synchronizer

        synchronizer = Synchronizer.get_actor(namespace=self._namespace)

        def weights() -> Iterator[tuple[str, Any]]:
            for reference in synchronizer.get_model_state_dict_iterator.remote():
                yield ray.get(reference)

        tied = getattr(self.vllm_config.model_config.hf_config, "tie_word_embeddings", False)
        self.model.load_weights(
            (name, tensor) for name, tensor in weights() if not (tied and name == "lm_head.weight")
        )

    def shutdown(self) -> None:
        """Leave Ray."""
        ray.shutdown()
