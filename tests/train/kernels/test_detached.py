"""`learner.detach_observations`: keys and values of observations are constants, no more."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from test_fused import make
from test_tree import VOCAB, outcome, rated, require_equal
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ludus.config.schema import LearnerConfig
from ludus.core.errors import ConfigError
from ludus.core.types import Sample
from ludus.train.batches.packing import MicroBatch
from ludus.train.forward import Forward
from ludus.train.kernels import logprobs
from ludus.train.kernels.bindings import kernels

DETACHED = LearnerConfig(detach_observations=True)
needs_kernels = pytest.mark.skipif(
    kernels(torch.float32) is None, reason="no C compiler here, or LUDUS_NATIVE=0"
)


def episodes(seed: int, num: int = 8) -> list[Sample]:
    """Two prompts, each of several episodes: turns of two or three tokens, observations of five."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCAB) for _ in range(9)] for _ in range(2)]
    samples = []
    for number in range(num):
        ids, mask = list(prompts[number % 2]), [False] * 9
        for turn in range(rng.randint(1, 4)):
            for length, own in ((5, False), (rng.randint(2, 3), True))[turn == 0 :]:
                ids += [rng.randrange(VOCAB) for _ in range(length)]
                mask += [own] * length
        samples.append(rated(rng, ids, mask, f"t{number}"))
    return samples


class OwnLayers:
    """The model's own layers, one sample a row, whose attention detaches keys and values of the
    positions that predict no trained token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trained_RT: Tensor | None = None
        AttentionInterface.register("detached", self.attention)
        AttentionMaskInterface.register("detached", sdpa_mask)
        hidden_states = Forward.hidden_states

        def seen(forward: Forward, micro_batch: MicroBatch) -> Any:
            trained_RT = torch.zeros(micro_batch.ends_RT.shape, dtype=torch.bool)
            trained_RT.view(-1)[micro_batch.places_P] = True
            self.trained_RT = trained_RT
            return hidden_states(forward, micro_batch)

        monkeypatch.setattr(Forward, "hidden_states", seen)
        monkeypatch.setattr(Forward, "_find_attention", lambda _: "none")
        monkeypatch.setattr(Forward, "_fused", lambda _: None)
        monkeypatch.setattr(logprobs, "_kernels", lambda *_: None)

    def attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> Any:
        if self.trained_RT is not None:  # else the learner tries out the model's head
            trained = self.trained_RT[:, None, :, None]
            key, value = (torch.where(trained, x, x.detach()) for x in (key, value))
        return sdpa_attention_forward(module, query, key, value, mask, **options)


@needs_kernels
@pytest.mark.parametrize(
    "family", ["llama", "gemma", "qwen2", "qwen3", "phi3", "window", "some windows"]
)
def test_gradients(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    model, samples = make(family), episodes(3)
    found = outcome(model, samples, "tree", 200, settings=DETACHED)
    all_of_them = outcome(model, samples, "tree", 200)
    assert found[0] == pytest.approx(all_of_them[0], abs=1e-6)  # the forward pass is the same
    name = "model.layers.0.self_attn.o_proj.weight"
    assert not torch.allclose(found[1][name], all_of_them[1][name], rtol=0.05)
    OwnLayers(monkeypatch)
    model.set_attn_implementation("detached")
    require_equal(found, outcome(model, samples, "single", 200))


@needs_kernels
@pytest.mark.parametrize("checkpointing", [False, True])
def test_bfloat16_and_recomputed_layers(checkpointing: bool) -> None:
    """Passes in bfloat16 have copies of the last position, which must add nothing."""
    model, samples = make("qwen3"), episodes(5)
    settings = DETACHED.model_copy(
        update={"dtype": "bfloat16", "gradient_checkpointing": checkpointing}
    )
    exact = outcome(model, samples, "tree", 200, settings=DETACHED)[1]
    model.train()
    found = outcome(model, samples, "tree", 200, settings=settings)[1]
    one, other = (torch.cat([g.flatten() for g in x.values()]) for x in (exact, found))
    assert torch.cosine_similarity(one, other, dim=0) > 0.999
    assert float(other.norm() / one.norm()) == pytest.approx(1, abs=0.01)


@needs_kernels
def test_where_all_tokens_train_nothing_is_left_out() -> None:
    model, samples = make("qwen3"), episodes(4)
    for sample in samples:
        sample.loss_mask[1:] = [True] * (len(sample.loss_mask) - 1)
    found = outcome(model, samples, "packed", 200, settings=DETACHED)
    require_equal(found, outcome(model, samples, "packed", 200))


def test_models_without_the_kernels_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"learner\.detach_observations needs .* not this GPT2"):
        Forward(make("gpt2"), settings=DETACHED)
