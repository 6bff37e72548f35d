"""The sampler's own weights: rounded, tied as the model's, changed by a publication only."""

from __future__ import annotations

import copy
import threading
import time
from typing import Any

import pytest
import torch
from engine_helpers import FAMILIES, episode, sampler, tiny
from test_decoders import Reader, needs_native
from torch.utils._python_dispatch import TorchDispatchMode

from ludus.config.schema import LoraConfig
from ludus.core.errors import ConfigError
from ludus.models.build import _with_lora
from ludus.models.decoders.sampling_copy import SamplingCopy
from ludus.models.decoders.static import StaticDecoder
from ludus.models.samplers.base import SamplingParams

BFLOAT16 = torch.bfloat16
PATHS = [
    pytest.param("qwen3", "auto", marks=needs_native),
    ("qwen3", "static"),
    ("gpt2", "generic"),
    ("qwen3_moe", "generic"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_copy_is_the_model_rounded(family: str) -> None:
    model = tiny(family)
    model.train()
    rounded = SamplingCopy(model)
    assert not rounded.module.training
    addresses = {name: p.data_ptr() for name, p in rounded.module.named_parameters()}
    model.load_state_dict(tiny(family, seed=1).state_dict())
    rounded.refresh()
    own = rounded.module.state_dict(keep_vars=True)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert torch.equal(own[name], parameter.to(BFLOAT16)), name
        assert not own[name].requires_grad
    assert {name: p.data_ptr() for name, p in rounded.module.named_parameters()} == addresses
    for ours, buffer in zip(rounded.module.buffers(), model.buffers(), strict=True):
        assert torch.equal(ours, buffer)  # rotary frequencies stay in float32
        assert ours.dtype == buffer.dtype
    # Half the bytes: tied matrices count once, as in the model.
    assert rounded.num_bytes == 2 * sum(p.numel() for p in model.parameters())
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    ours = rounded.module
    assert (ours.get_input_embeddings().weight is ours.get_output_embeddings().weight) == tied
    assert model.training


def test_adapters_are_copied() -> None:
    tiny_model = tiny()
    torch.manual_seed(0)  # one adapter in sixty rounds worse than the bound below
    model = _with_lora(tiny_model, LoraConfig(rank=2))
    rounded = SamplingCopy(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    rounded.refresh()
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        expected, found = model.eval()(ids).logits, rounded.module(ids).logits
        with model.disable_adapter():
            without = model(ids).logits
    rounding = float((found - expected).abs().max())
    assert rounding < 0.1 * float((without - expected).abs().max())


def test_parameters_that_transformers_keeps_in_float32() -> None:
    model = tiny("qwen3_moe")
    model._keep_in_fp32_modules_strict = {"mlp.gate"}
    dtypes = {name: p.dtype for name, p in SamplingCopy(model).module.named_parameters()}
    assert {torch.float32} == {dtypes[name] for name in dtypes if "mlp.gate." in name}
    assert {BFLOAT16} == {dtypes[name] for name in dtypes if "mlp.gate." not in name}


class Allocations(TorchDispatchMode):
    """Records the type and the bytes of each new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[tuple[torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        held = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in held:
            self.tensors.append((result.dtype, result.nbytes))
        return result


def test_nothing_but_the_copy_is_allocated() -> None:
    model = tiny()
    with Allocations() as seen:
        rounded = SamplingCopy(model)
    weights = [size for dtype, size in seen.tensors if dtype == BFLOAT16]
    assert sum(weights) == rounded.num_bytes
    matrix = min(p.nbytes for p in model.parameters() if p.ndim > 1)
    assert all(dtype == BFLOAT16 or size < matrix for dtype, size in seen.tensors)
    with Allocations() as seen:
        rounded.refresh()
    assert not seen.tensors


@pytest.mark.parametrize(("family", "path"), PATHS)
async def test_an_engine_reads_half_the_bytes(family: str, path: Any) -> None:
    model = tiny(family)
    engine = sampler(model, path=path, dtype="bfloat16")
    assert not engine.shares_weights
    size = sum(p.nbytes for p in model.parameters())
    if path != "auto":  # native code has embeddings in float32, and panels with padding
        assert engine.weight_bytes <= 0.51 * size
    exact = sampler(model, path="generic" if path == "auto" else path)
    assert exact.shares_weights
    assert exact.weight_bytes == 0
    turns = [SamplingParams(8, seed=1)]
    [(_, _, found)], [(_, _, other)] = [
        await episode(one, "a", [3, 4, 5], turns) for one in (engine, exact)
    ]
    assert found.logprobs != other.logprobs
    assert found.logprobs[0] == pytest.approx(other.logprobs[0], abs=0.3)


@pytest.mark.parametrize("path", ["static", "generic"])
def test_memory_that_does_not_suffice(path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model = tiny()
    monkeypatch.setattr(torch, "empty_like", full)
    with pytest.raises(ConfigError, match=r"sampler\.args\.dtype: memory .* \(.* GiB\); set auto"):
        sampler(model, path=path, dtype="bfloat16")


def test_graphs_stay_when_the_copy_is_refreshed() -> None:
    model = tiny()
    decoder = sampler(model, path="static", dtype="bfloat16").decoder
    assert isinstance(decoder, StaticDecoder)
    reader = Reader(decoder)
    reader.logits({0: [3, 4, 5]})
    before = reader.logits({0: [3, 4, 5, 6]})
    steps = dict(decoder._steps)
    assert steps
    model.load_state_dict(tiny(seed=1).state_dict())
    decoder.refresh()
    assert dict(decoder._steps) == steps
    assert not torch.equal(before, Reader(decoder).logits({0: [3, 4, 5, 6]}))


def under(model: Any, path: Any, dtype: Any, ids: list[int], start: int) -> list[float]:
    """Log-probabilities of `ids[start:]`, from a decoder that never saw other weights."""
    reader = Reader(sampler(model, path=path, dtype=dtype).decoder)
    logprobs = []
    for end in range(start, len(ids)):
        logits_V = reader.logits({0: ids[:end]})[0].double()
        logprobs.append(float(logits_V.log_softmax(-1)[ids[end]]))
    return logprobs


@pytest.mark.parametrize(
    ("family", "path", "dtype", "tolerance"),
    [
        pytest.param("qwen3", "auto", "auto", 1e-5, marks=needs_native),
        pytest.param("qwen3", "auto", "bfloat16", 1e-5, marks=needs_native),
        ("qwen3", "static", "bfloat16", 0.15),
        ("gpt2", "generic", "bfloat16", 0.15),
    ],
)
async def test_each_token_is_of_one_version(
    family: str, path: Any, dtype: Any, tolerance: float
) -> None:
    """A learner's thread changes the weights and publishes while turns go on. Whether a publication
    falls into a turn depends on timing, so the test tries until one does."""
    for _ in range(20):
        if await num_changed_turns(family, path, dtype, tolerance):
            return
    raise AssertionError("no publication fell into a turn")


async def num_changed_turns(family: str, path: Any, dtype: Any, tolerance: float) -> int:
    """Turns into which a publication fell; each token fits the weights of one version."""
    versions = [tiny(family, seed) for seed in range(4)]
    model, prompt, played = copy.deepcopy(versions[0]), [3, 4, 5], []
    engine = sampler(model, path=path, dtype=dtype)

    def learn() -> None:
        for version, target in enumerate(versions[1:], start=1):
            for parameter, value in zip(model.parameters(), target.parameters(), strict=True):
                with torch.no_grad():
                    parameter.copy_(value)
                time.sleep(0.001)  # turns go on with weights of the engine's own
            engine.publish(version)

    learner = threading.Thread(target=learn)
    learner.start()
    while learner.is_alive() or len(played) < 2:
        turn = SamplingParams(24, seed=len(played))
        played += await episode(engine, f"{len(played)}", prompt, [turn])
    learner.join()
    assert engine.policy_version == 3
    changed = 0
    for _, _, completion in played:
        rows = [
            under(each, path, dtype, prompt + completion.token_ids, len(prompt))
            for each in versions
        ]
        version = first = completion.policy_version
        for place, logprob in enumerate(completion.logprobs):
            fitting = [n for n, row in enumerate(rows) if abs(row[place] - logprob) < tolerance]
            later = [n for n in fitting if n >= version]
            assert later, (place, logprob, [row[place] for row in rows])
            version = later[0]
        changed += version > first
    return changed
