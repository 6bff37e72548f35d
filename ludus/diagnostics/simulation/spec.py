"""The cluster of `ludus plan --cluster SPEC`: a small YAML file, strict as a recipe.

nodes: {count: 8, gpus: 8, kind: h100, cpu_cores: 96}
network: {node_gb_s: 50, gpu_gb_s: 450}
layout: disaggregated
learner_gpus: 32
environment: {latency: {p50: 0.2, p99: 10}}
faults: {node_mtbf_h: 2000}
price_per_gpu_hour: 2.5
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ludus.config.load import load_as
from ludus.config.sections import Section
from ludus.core.errors import ConfigError

Layout = Literal["local", "colocated", "disaggregated"]

_Z99 = NormalDist().inv_cdf(0.99)

LARGEST = 1e9
"""Of a value: seconds, tokens, prices. What is larger is a slip, and not a cluster."""

WIDEST = 1e6
"""Of `p99` over `p50`."""

Amount = Annotated[float, Field(ge=0, le=LARGEST)]
"""Seconds or tokens."""

Share = Annotated[float, Field(ge=1e-6, le=1)]


class Distribution(Section):
    """A constant, or a log-normal distribution by two quantiles."""

    constant: Amount | None = Field(None, description="The same value always.")
    p50: float | None = Field(
        None, gt=0, le=LARGEST, description="Median of a log-normal distribution."
    )
    p99: float | None = Field(None, gt=0, le=LARGEST, description="Its 99th percentile.")

    @model_validator(mode="after")
    def _one_kind(self) -> Distribution:
        quantiles = (self.p50 is not None) + (self.p99 is not None)
        if (self.constant is not None) + quantiles / 2 != 1:
            raise ValueError("set `constant`, or both `p50` and `p99`")
        if self.p50 is not None and self.p99 is not None and self.p99 < self.p50:
            raise ValueError("`p99` must not be below `p50`")
        if self.p50 is not None and self.p99 is not None and self.p99 > WIDEST * self.p50:
            raise ValueError(f"`p99` must be at most {WIDEST:,.0f} times `p50`")
        return self

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm."""
        return math.log(self.p99 / self.p50) / _Z99 if self.p50 and self.p99 else 0.0

    @property
    def mean(self) -> float:
        """The expected value."""
        if self.constant is not None:
            return self.constant
        assert self.p50 is not None
        return self.p50 * math.exp(self.sigma**2 / 2)

    def show(self, unit: str = "") -> str:
        """The distribution in words."""
        if self.constant is not None:
            return f"{self.constant:g}{unit}"
        return f"log-normal, p50 {self.p50:g}{unit}, p99 {self.p99:g}{unit}"


class NodesConfig(Section):
    """The machines; all are alike."""

    count: int = Field(1, ge=1, le=100_000, description="Number of nodes.")
    gpus: int = Field(
        8, ge=0, le=1000, description="GPUs of a node; 0: the model computes on the CPU."
    )
    kind: str = Field(
        "here", description="A device by name (h100, a100-80gb, ...), or `here`: measured now."
    )
    cpu_cores: int = Field(
        64, ge=1, le=10_000, description="CPU cores of a node, for environments."
    )


class NetworkConfig(Section):
    """Bandwidths, one way."""

    node_gb_s: float = Field(
        50, ge=1e-6, le=LARGEST, description="GB/s of a node's network (400 Gbit/s: 50)."
    )
    gpu_gb_s: float = Field(
        450, ge=1e-6, le=LARGEST, description="GB/s of a GPU to the others of its node."
    )
    latency_s: Amount = Field(0.01, description="Seconds before a publication begins.")


class CostsConfig(Section):
    """Seconds of the parts: measured in a run, given, or assumed as parts of the data sheet."""

    measured: str | None = Field(
        None,
        min_length=1,
        description="A finished run of this device, synchronous: its costs are used.",
    )
    decode_efficiency: Share = Field(
        0.5, description="Part of the bandwidth and the peak that decoding reaches."
    )
    prefill_mfu: Share = Field(0.4, description="Part of the peak in prefill.")
    train_mfu: Share = Field(0.35, description="Part of the peak in training.")
    pass_s: float | None = Field(
        None, ge=1e-9, le=LARGEST, description="Seconds of a decoding pass."
    )
    row_s: Amount | None = Field(None, description="Seconds of a sequence in such a pass.")
    prefill_token_s: Amount | None = Field(None, description="Seconds of a prompt token.")
    train_token_s: Amount | None = Field(
        None, description="Seconds of a computed token in training, on all learner GPUs."
    )
    train_step_s: Amount | None = Field(None, description="Seconds of a step beside these.")
    turn_s: Amount | None = Field(
        None, description="CPU seconds of ludus for a turn: parsing, templates, records."
    )
    sync_s: Amount | None = Field(None, description="Seconds of a publication of weights.")


class EpisodesConfig(Section):
    """Sizes of the policy's episodes; default: from the measured run, or as the expert plays."""

    measured: str | None = Field(
        None, min_length=1, description="A finished run: its episodes are drawn."
    )
    prompt: float | None = Field(
        None, ge=1, le=LARGEST, description="Tokens before the first turn."
    )
    turns: Distribution | None = Field(None, description="Turns of an episode.")
    sampled: Distribution | None = Field(None, description="Tokens that a turn samples.")
    observed: Amount | None = Field(None, description="Tokens between two turns.")

    @model_validator(mode="after")
    def _whole(self) -> EpisodesConfig:
        given = [self.prompt, self.turns, self.sampled, self.observed]
        if any(g is not None for g in given) and (self.measured or None in given):
            raise ValueError(
                "set `measured`, or all of `prompt`, `turns`, `sampled` and `observed`, or nothing"
            )
        return self


class EnvironmentConfig(Section):
    """The time of an environment's answer to a turn."""

    latency: Distribution | None = Field(
        None,
        description="Seconds that an answer takes without a core: network, sandboxes, tools. "
        "Default: from the measured run, else none.",
    )
    cpu_s: Amount | None = Field(
        None, description="CPU seconds of an answer. Default: as measured of the expert."
    )


class FaultsConfig(Section):
    """Faults of nodes, at random times."""

    node_mtbf_h: float | None = Field(
        None, ge=1e-6, description="Mean hours between two faults of a node; null: no faults."
    )
    recovery_s: Amount = Field(
        300, description="Seconds from a fault of a learner's node until training goes on."
    )
    sampler_recovery_s: Amount = Field(
        120, description="Seconds without a sampler's node after its fault."
    )

    @model_validator(mode="after")
    def _has_faults(self) -> FaultsConfig:
        if self.node_mtbf_h is None and (idle := self.model_fields_set - {"node_mtbf_h"}):
            raise ValueError(f"`{min(idle)}` has no effect without faults: set `node_mtbf_h`")
        return self


class SimulateConfig(Section):
    """Extent of the simulation."""

    steps: int = Field(6, ge=1, description="Steps that count.")
    warmup: int | None = Field(
        None, ge=0, description="Steps before; default: as many as fill the queue of episodes."
    )
    scale: int | None = Field(
        None,
        ge=1,
        description="Simulate this part, 1 / scale, of samplers, workers and episodes; 1: all; "
        "default: the whole number that leaves about a million events.",
    )
    seed: int = Field(0, ge=0, description="The same seed gives the same result.")
    max_events: int = Field(
        40_000_000, ge=1000, description="The simulation ends with an error after so many events."
    )


class ClusterSpec(Section):
    """A cluster, its costs, and the run's place on it."""

    nodes: NodesConfig = Field(default_factory=NodesConfig, description="The machines.")
    network: NetworkConfig = Field(default_factory=NetworkConfig, description="Bandwidths.")
    layout: Layout = Field(
        "disaggregated",
        description="`local`: one process, as the back end `local`; `colocated`: all GPUs sample "
        "and train in turn; `disaggregated`: each GPU does one of these.",
    )
    learner_gpus: int | None = Field(
        None, ge=1, description="GPUs that train, disaggregated; default: half of them."
    )
    gpus_per_sampler: int = Field(1, ge=1, description="GPUs of a sampler (tensor parallel).")
    environment_workers: int | None = Field(
        None, ge=1, description="CPU cores for environments; default: all but 2 a GPU."
    )
    cores: int | None = Field(
        None,
        ge=1,
        description="Cores of one machine without GPUs that computes all: learner, samplers, "
        "environment workers and the process of the loop share them. Default: each has its own.",
    )
    costs: CostsConfig = Field(default_factory=CostsConfig, description="Seconds of the parts.")
    episodes: EpisodesConfig = Field(
        default_factory=EpisodesConfig, description="Sizes of episodes."
    )
    environment: EnvironmentConfig = Field(
        default_factory=EnvironmentConfig, description="Answers of environments."
    )
    faults: FaultsConfig = Field(default_factory=FaultsConfig, description="Faults of nodes.")
    price_per_gpu_hour: float | None = Field(
        None,
        gt=0,
        le=LARGEST,
        description="Price of a GPU for an hour; of a node where there are no GPUs.",
    )
    currency: str = Field("USD", pattern=r"^\w{1,10}$", description="Of the price.")
    simulate: SimulateConfig = Field(
        default_factory=SimulateConfig, description="Extent of the simulation."
    )

    @property
    def num_gpus(self) -> int:
        """Devices: GPUs, or nodes without any."""
        return self.nodes.count * max(self.nodes.gpus, 1)

    @property
    def learners(self) -> int:
        """Devices that train."""
        if self.layout != "disaggregated":
            return self.num_gpus
        return self.learner_gpus or max(self.num_gpus // 2, 1)

    @property
    def samplers(self) -> int:
        """Sampler replicas."""
        if self.layout == "local":
            return 1
        shared = self.layout == "colocated"
        return (self.num_gpus - (0 if shared else self.learners)) // self.gpus_per_sampler

    @property
    def workers(self) -> int:
        """CPU cores for environments."""
        if self.environment_workers:
            return self.environment_workers
        return max(self.nodes.count * (self.nodes.cpu_cores - 2 * self.nodes.gpus), 1)

    @model_validator(mode="after")
    def _has_effect(self) -> ClusterSpec:
        if self.price_per_gpu_hour is None and "currency" in self.model_fields_set:
            raise ValueError("`currency` has no effect without `price_per_gpu_hour`")
        if self.layout == "local" and "network" in self.model_fields_set:
            raise ValueError("`network` has no effect in `layout: local`, which is one process")
        return self

    @model_validator(mode="after")
    def _cores_are_shared(self) -> ClusterSpec:
        if self.cores is not None and (self.nodes.gpus or self.layout == "local"):
            raise ValueError(
                "`cores` is for processes that compute on CPUs: set `nodes.gpus: 0`, or remove it"
                if self.nodes.gpus
                else "`cores` has no effect in `layout: local`, which is one process: set "
                "`nodes.cpu_cores`"
            )
        return self

    @model_validator(mode="after")
    def _placed(self) -> ClusterSpec:
        if self.layout == "local" and self.num_gpus > 1:
            raise ValueError("`layout: local` is one node with at most one GPU: set `nodes`")
        if self.layout != "disaggregated" and self.learner_gpus is not None:
            raise ValueError(
                f"`learner_gpus` belongs to `layout: disaggregated`; in `{self.layout}` all train"
            )
        if self.layout == "disaggregated" and self.samplers < 1:
            raise ValueError(
                f"{self.num_gpus} GPUs do not hold `learner_gpus: {self.learners}` and a sampler "
                f"of {self.gpus_per_sampler}: lower `learner_gpus`, or set `layout: colocated`"
            )
        if self.samplers < 1:
            raise ValueError(
                f"`gpus_per_sampler: {self.gpus_per_sampler}` is more than all "
                f"{self.num_gpus} GPUs: lower it"
            )
        if self.gpus_per_sampler > max(self.nodes.gpus, 1):
            raise ValueError(
                f"`gpus_per_sampler: {self.gpus_per_sampler}` exceeds a node's "
                f"{max(self.nodes.gpus, 1)} GPUs: lower it"
            )
        cores = self.nodes.count * self.nodes.cpu_cores
        if self.environment_workers and self.environment_workers > cores:
            raise ValueError(
                f"`environment_workers: {self.environment_workers}` exceeds the {cores} cores of "
                "all nodes: lower it"
            )
        return self


def load_spec(path: str, overrides: Sequence[str] = ()) -> ClusterSpec:
    """Returns the cluster of a file. Errors: ConfigError, one line a fault."""
    if not Path(path).is_file():
        kind = "is a folder, not a YAML file" if Path(path).is_dir() else "no such file"
        raise ConfigError(f"--cluster {path}: {kind}; see docs/cluster-planning.md")
    if Path(path).suffix == ".py":
        raise ConfigError(f"--cluster {path}: must be a YAML file; see docs/cluster-planning.md")
    return load_as(ClusterSpec, path, overrides)
