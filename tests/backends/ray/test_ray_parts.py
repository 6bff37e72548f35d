"""Parts of the back end `ray` that need no cluster: demands, versions, weights in buckets."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("ray", reason="needs the extra ray")

from ludus.backends import BACKENDS
from ludus.backends.ray.backend import RayBackend, _named
from ludus.backends.ray.cluster import Demand, connect, facts, require_equal
from ludus.backends.ray.env_pool import PooledEnv
from ludus.backends.ray.publication.weights import (
    checksum,
    copy_into,
    in_buckets,
    to_bucket,
    verified,
)
from ludus.backends.ray.sampler_pool import SamplerPool
from ludus.config.load import load_config
from ludus.config.policies import PolicyConfig
from ludus.config.schema import ModelConfig
from ludus.core.errors import ConfigError, TrainingError
from ludus.core.types import Spec
from ludus.models.build import build_model
from ludus.models.chat.tokenizers import train_tokenizer
from ludus.rollout.hosts.host import HostedEnv

GPU = {"CPU": 2.0, "GPU": 1.0}


def demand(ranks: int, samplers: int, workers: int, *, colocated: bool = False) -> Demand:
    actors: Any = {
        "learner_ranks": (ranks, GPU),
        "samplers": (samplers, GPU),
        "env_workers": (workers, {"CPU": 2.0}),
    }
    return Demand(actors, colocated)


def test_each_actor_has_a_bundle_of_its_own() -> None:
    bundles, places = demand(2, 1, 1).bundles()
    assert bundles == [GPU, GPU, GPU, {"CPU": 2.0}]
    assert [[index for index, _ in rows] for rows in places.values()] == [[0, 1], [2], [3]]
    assert demand(2, 1, 1).total() == {"CPU": 8.0, "GPU": 3.0}


def test_colocated_ranks_and_samplers_share_a_gpu() -> None:
    bundles, places = demand(1, 2, 0, colocated=True).bundles()
    assert bundles == [{"CPU": 4.0, "GPU": 1.0}, {"CPU": 2.0, "GPU": 1.0}]
    assert places["learner_ranks"] == [(0, {"CPU": 2.0, "GPU": 0.5})]
    assert places["samplers"] == [(0, {"CPU": 2.0, "GPU": 0.5}), (1, {"CPU": 2.0, "GPU": 1.0})]


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("nowhere", "is no address of a Ray cluster"),
        ("host:", "is no address of a Ray cluster"),
        ("127.0.0.1:99999", "is no address of a Ray cluster"),
        ("127.0.0.1:9", "no Ray cluster answers at 127.0.0.1:9"),
        ("no-such-host.invalid:6379", "no Ray cluster answers"),
        ("ray://127.0.0.1:10001", "the Ray client"),
    ],
)
def test_addresses_without_a_cluster(address: str, words: str) -> None:
    with pytest.raises(ConfigError, match=r"^backend\.args\.address: .*" + words):
        connect(address, "test", demand(1, 1, 0))


@pytest.mark.parametrize("address", ["nowhere", "ray://127.0.0.1:10001", "host:0"])
def test_no_address_is_refused_before_the_run(address: str) -> None:
    config = load_config({"model": {"path": "x"}, "tasks": {"train": "x"}})
    with pytest.raises(ConfigError, match=r"^backend\.args\.address: "):
        RayBackend.refuse(config, {"address": address})


@pytest.mark.parametrize(
    "argument",
    [
        {"address": ""},
        {"samplers": 10**9},
        {"cpus": math.inf},
        {"cpus": 1e-9},
        {"placement_deadline_s": math.inf},
        {"collective_timeout_s": math.inf},
        {"bucket_mib": 10**12},
        {"weights": "nccl"},
        {"broadcast_timeout_s": 0},
    ],
)
def test_arguments_that_no_cluster_can_honour(argument: dict[str, Any]) -> None:
    (name,) = argument
    with pytest.raises(ConfigError, match=rf"backend\.args\.{name} must be"):
        BACKENDS.check(Spec(name="ray", args=argument), "backend")


def test_nccl_needs_a_gpu_for_each_member() -> None:
    model = {"path": "x", "device": "cuda"}
    config = load_config({"model": model, "tasks": {"train": "x"}})
    with pytest.raises(ConfigError, match=r"^backend\.args\.weights: broadcast needs a GPU for"):
        RayBackend.refuse(config, {"weights": "broadcast", "colocated": True})


SEVERAL = {
    "model": {"path": "x", "device": "cuda", "lora": {"rank": 2, "quantise": "nf4"}},
    "tasks": {"train": "x"},
    "agent": "m:play",
    "rollout": {"deterministic": False},
    "roles": {"red": "policy", "blue": "rival", "grey": {"old": 1, "first": 1}},
    "policies": {
        "rival": {"model": "same"},
        "old": {"past": {"most": 3}},
        "first": {"weights": "start"},
    },
}


def test_all_policies_count() -> None:
    config = load_config(SEVERAL)
    args = {"learner_ranks": 1, "samplers": 2, "env_workers": 4, "fixed_samplers": 2}
    needed = RayBackend.demand(config, args)
    assert needed.total() == {"GPU": 2 * (1 + 2) + 2 * (3 + 1), "CPU": 14 + 4}
    assert needed.keys() == (
        "learner_ranks = 1, samplers = 2, env_workers = 4; learner_ranks = 1, samplers = 2 of "
        "policies.rival; 3 times fixed_samplers = 2 of policies.old.past; fixed_samplers = 2 of "
        "policies.first"
    )


@pytest.mark.parametrize("args", [{"learner_ranks": 2}, {"cpu_offload": True}])
def test_weights_in_4_bits_are_not_sharded(args: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^model\.lora\.quantise: weights in 4 bits are not "):
        RayBackend.refuse(load_config(SEVERAL), args)


def test_versions_that_differ_name_both_nodes() -> None:
    own = facts()
    require_equal(own, [own, {**own, "node": "gpu3"}])
    with pytest.raises(ConfigError, match=r"node gpu3 has ludus 9\.9, and node .* has .*: install"):
        require_equal(own, [{**own, "node": "gpu3", "ludus": "9.9"}])


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).to(torch.bfloat16),
        "c": torch.tensor(3, dtype=torch.int64),
        "d": torch.randn(4, 6).T,
        "e": torch.empty(0, 4),
    }


@pytest.mark.parametrize("size", [1, 64, 10**6])
def test_buckets_keep_every_bit(size: int) -> None:
    groups = list(in_buckets(tensors().items(), size))
    assert [name for group in groups for name, _ in group] == list("abcde")
    assert len(groups) == {1: 5, 64: 4, 10**6: 1}[size]
    found = {n: t for group in groups for n, t in to_bucket(group).tensors()}
    for name, tensor in tensors().items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_the_memory_of_a_bucket_is_used_again() -> None:
    large = to_bucket({"x": torch.full((1000,), 7.0)}.items())
    space: Any = large.data
    found = to_bucket(tensors().items(), space)
    assert np.shares_memory(found.data, space)
    assert checksum(found) == checksum(to_bucket(tensors().items()))
    assert not np.shares_memory(to_bucket({"x": torch.ones(2000)}.items(), space).data, space)


def test_damage_is_found() -> None:
    bucket = to_bucket(tensors().items())
    expected = checksum(bucket)
    assert verified(bucket, expected, 7) is bucket
    assert checksum(to_bucket(tensors().items())) == expected
    renamed = replace(bucket, entries=[replace(e, name=e.name + "x") for e in bucket.entries])
    bucket.data[5] ^= 1
    for damaged in (bucket, renamed):
        with pytest.raises(TrainingError, match="weights 7 arrived damaged"):
            verified(damaged, expected, 7)


def model(seed: int) -> Any:
    shape = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "head_dim": 8}
    config = ModelConfig.model_validate(
        {
            "architecture": {"name": "qwen3", "args": {**shape, "intermediate_size": 24}},
            "tokenizer": "words",
            "context_length": 16,
        }
    )
    return build_model(config, train_tokenizer(Spec(name="words"), ["a b c"]), seed)


def test_weights_are_copied_into_a_model() -> None:
    source, target = model(1), model(2)
    named = dict(source.named_parameters())
    groups = [to_bucket(group) for group in in_buckets(named.items(), 1000)]
    copy_into(target, groups, 1)
    for name, parameter in target.named_parameters():
        assert torch.equal(parameter, named[name])
    assert target.lm_head.weight is target.model.embed_tokens.weight or not (
        target.config.tie_word_embeddings
    )


def test_other_names_and_shapes_are_refused() -> None:
    target = model(2)
    named = dict(model(1).named_parameters())
    first = next(iter(named))
    for wrong, words in (
        ({**named, "extra": torch.zeros(1)}, "extra"),
        ({**named, first: torch.zeros(1)}, first),
        ({n: p for n, p in named.items() if n != first}, f"lack {first}"),
    ):
        with pytest.raises(TrainingError, match=words):
            copy_into(target, [to_bucket(wrong.items())], 3)


def test_an_environment_in_a_worker_has_all_calls_of_a_hosted_one() -> None:
    """An inherited one would ask for an environment of this process."""
    calls = {name for name in vars(HostedEnv) if not name.startswith("_")}
    assert calls <= vars(PooledEnv).keys()


def test_messages_name_the_policy_in_a_run_of_several() -> None:
    alone = load_config({"model": {"path": "x"}, "tasks": {"train": "x"}})
    several = alone.model_copy(update={"policies": {"rival": PolicyConfig(model="same")}})
    assert _named(alone, Path("runs/a-1")) == ""
    assert _named(several, Path("runs/a-1")) == " (policy)"
    rival = _named(alone, Path("runs/a-1/policies/rival"))
    pool: Any = SamplerPool(
        [None],
        Any,
        8,
        Any,
        deterministic=False,
        max_deaths=1,
        policy=rival,  # type: ignore[arg-type]
    )
    assert pool.replicas[0].channel.name == "sampler 0 (policies.rival)"
