"""Settings of the sharded learner, and the place of one of its ranks. Needs no torch."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from pydantic import Field

from ludus.config.schema import RunConfig
from ludus.config.sections import Section
from ludus.core.errors import ConfigError, TrainingError


class OtherRankLost(TrainingError):
    """Another rank ended, did not answer in time, or never came: this rank's own work is sound."""


class ShardSettings(Section):
    """Settings by which the learner's ranks share a model."""

    tensor_parallel: int = Field(
        1,
        ge=1,
        description="Ranks that share the matrices of each layer (Llama and Qwen models without "
        "adapters). Divides the number of ranks and of heads.",
    )
    cpu_offload: bool = Field(
        False, description="Keep weights, gradients and moments in main memory. Needs CUDA."
    )
    reshard_after_forward: bool = Field(
        True,
        description="Free a layer's gathered weights after its forward pass, and gather them again "
        "for the backward pass: less memory, more communication.",
    )
    timeout_s: float = Field(
        600.0, gt=0, description="Longest wait for the other ranks, in seconds."
    )


@dataclass(frozen=True, slots=True)
class Rank:
    """One of the learner's processes.

    Args:
        rank: its number, from 0.
        world_size: number of ranks.
        address: `host:port`; rank 0 listens there.
        local_rank: the CUDA device of the rank on its machine.
    """

    rank: int
    world_size: int
    address: str
    local_rank: int = 0

    def __post_init__(self) -> None:
        host, _, port = self.address.rpartition(":")
        if not 0 <= self.rank < self.world_size or not host or not port.isdigit():
            raise ConfigError(
                f"rank {self.rank} of {self.world_size} at {self.address!r}: a rank is a number "
                "from 0 below the number of ranks, its address is HOST:PORT"
            )

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0]

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}"


def open_listener(host: str = "127.0.0.1") -> tuple[socket.socket, str]:
    """Returns a listening socket for rank 0 of this process, and its address for all ranks.

    A port that is only found free, and opened later, may be another's by then.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    return listener, f"{host}:{listener.getsockname()[1]}"


def check_supported(config: RunConfig, settings: ShardSettings, num_ranks: int) -> None:
    """Errors: ConfigError for settings that a sharded learner cannot honour."""
    ways = settings.tensor_parallel
    if num_ranks % ways:
        raise ConfigError(
            f"tensor_parallel: {ways} does not divide the number of learner ranks, {num_ranks}"
        )
    refused = {
        f"model.lora with tensor_parallel: {ways}": (
            ways > 1 and config.model.lora is not None,
            "adapters are not split over ranks; set tensor_parallel: 1",
        ),
        "verify: true": (config.verify, "sums of a sharded learner are in another order"),
        "learner.compile: true": (
            config.learner.compile,
            "compiled layers do not gather their weights",
        ),
        "learner.detach_observations: true": (
            config.learner.detach_observations,
            "its layers are the model's own",
        ),
        "cpu_offload: true": (
            settings.cpu_offload and config.model.device == "cpu",
            "on a CPU all is in main memory already",
        ),
    }
    for name, stage in (("sft", config.sft), ("rl", config.rl)):
        refused[f"{name}.optimizer.name: muon"] = (
            stage is not None and stage.optimizer.name == "muon",
            "an update needs the whole matrix, and a rank has a part of it; set adamw",
        )
    for key, (given, reason) in refused.items():
        if given:
            raise ConfigError(
                f"{key} is not supported by a sharded learner: {reason}. Leave it out, or use "
                "`backend: local`"
            )
