"""Log-probabilities and entropies a chunk at a time are those of all logits at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    PhiConfig,
    Qwen3Config,
)

from ludus.models.vocabulary import Vocabulary
from ludus.train.kernels import logprobs
from ludus.train.kernels.logprobs import Head, backbone, find_head, score_logits

COMMON: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
HEADS = {
    "qwen3, tied": Qwen3Config(**COMMON, num_key_value_heads=2, tie_word_embeddings=True),
    "phi, with a bias": PhiConfig(**COMMON),
    "gemma2, with a cap": Gemma2Config(
        **COMMON, num_key_value_heads=2, head_dim=8, final_logit_softcapping=3.0
    ),
    "granite, divided": GraniteConfig(**COMMON, num_key_value_heads=2, logits_scaling=4.0),
    "cohere, scaled": CohereConfig(**COMMON, num_key_value_heads=2, logit_scale=0.3),
    "gpt2": GPT2Config(vocab_size=40, n_positions=64, n_embd=32, n_layer=1, n_head=4),
}


def problem(
    num: int = 37, size: int = 12, vocab: int = 29, targets: int = 60
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, places with repetitions and gaps, targets, and weights of two outputs."""
    generator = torch.Generator().manual_seed(0)
    hidden_PE = torch.randn(num, size, generator=generator)
    place_N = torch.randint(0, num, (targets,), generator=generator)
    target_N = torch.randint(0, vocab, (targets,), generator=generator)
    return hidden_PE, place_N, target_N, torch.randn(2, targets, generator=generator)


def gradients(output: tuple[Tensor, Tensor], weights_2N: Tensor, *of: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad((torch.stack(output) * weights_2N).sum(), of))


@pytest.mark.parametrize("kept", [0, 10**9])
@pytest.mark.parametrize("chunk", [1, 29 * 8, 10**9])
@pytest.mark.parametrize(
    ("scale", "cap", "bias", "temperature"),
    [(1.0, None, False, 1.0), (0.3, None, True, 0.7), (1.0, 2.0, True, 1.3), (2.0, 1.5, False, 1)],
)
def test_values_and_gradients(
    monkeypatch: pytest.MonkeyPatch,
    kept: int,
    chunk: int,
    scale: float,
    cap: float | None,
    bias: bool,
    temperature: float,
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK", chunk)
    monkeypatch.setattr(logprobs, "KEEP", kept)
    hidden_PE, place_N, target_N, weights_2N = problem()
    torch.manual_seed(1)
    head = Head(torch.nn.Linear(12, 29, bias=bias), scale, cap)
    hidden_PE.requires_grad_()
    of = [hidden_PE, *head.linear.parameters()]
    expected = score_logits(head.logits(hidden_PE), place_N, target_N, temperature)
    found = head.score(hidden_PE, place_N, target_N, temperature)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for got, wanted in zip(
        gradients(found, weights_2N, *of), gradients(expected, weights_2N, *of), strict=True
    ):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_ids_that_cannot_be_sampled_have_no_probability() -> None:
    """A vocabulary padded beyond the tokenizer: the distribution is over the tokenizer's ids."""
    hidden_PE, place_N, target_N, weights_2N = problem(vocab=23)
    head = Head(torch.nn.Linear(12, 29))
    logits_PV = head.logits(hidden_PE)
    expected = score_logits(logits_PV[:, :23], place_N, target_N)
    vocabulary = Vocabulary(23)
    found = head.score(hidden_PE, place_N, target_N, vocabulary=vocabulary)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    found_too = score_logits(logits_PV, place_N, target_N, vocabulary=vocabulary)
    torch.testing.assert_close(found_too, expected)
    [gradient_VE] = gradients(found, weights_2N, head.linear.weight)
    assert gradient_VE[:23].any(-1).all()
    assert not gradient_VE[23:].any()


def test_only_what_needs_a_gradient_gets_one() -> None:
    hidden_PE, place_N, target_N, _ = problem()
    head = Head(torch.nn.Linear(12, 29).requires_grad_(False))
    hidden_PE.requires_grad_()
    logprobs_N, entropy_N = head.score(hidden_PE, place_N, target_N)
    (logprobs_N.sum() + entropy_N.sum()).backward()
    assert hidden_PE.grad is not None
    assert head.linear.weight.grad is None


def test_logits_far_apart() -> None:
    """Probabilities that underflow leave finite gradients, of the entropy too."""
    head = Head(torch.nn.Linear(2, 3, bias=False))
    with torch.no_grad():
        head.linear.weight.copy_(torch.tensor([[300.0, 0], [0, 0], [-300, 0]]))
    hidden_PE = torch.ones(1, 2, requires_grad=True)
    place_N = torch.zeros(3, dtype=torch.int64)
    logprobs_N, entropy_N = head.score(hidden_PE, place_N, torch.arange(3))
    assert logprobs_N.tolist() == [0, -300, -600]
    assert entropy_N.tolist() == pytest.approx([0] * 3, abs=1e-6)
    [grad_PE] = torch.autograd.grad(logprobs_N.sum() + entropy_N.sum(), [hidden_PE])
    assert grad_PE.tolist() == [[-900, 0]]


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation gives back."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.numel = max([self.numel, *sizes])
        return result


def test_no_tensor_grows_with_length_times_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CHUNK", 1 << 12)
    monkeypatch.setattr(logprobs, "KEEP", 1 << 13)
    vocab, size = 512, 4

    def largest(num: int, fused: bool) -> int:
        hidden_PE, place_N, target_N, _ = problem(num, size, vocab, num)
        hidden_PE.requires_grad_()
        head = Head(torch.nn.Linear(size, vocab, bias=False))
        with Largest() as seen:
            if fused:
                output = head.score(hidden_PE, place_N, target_N)
            else:
                output = score_logits(head.logits(hidden_PE), place_N, target_N)
            (output[0].sum() + output[1].sum()).backward()
        return seen.numel

    assert largest(512, fused=False) == 512 * vocab
    assert largest(512, fused=True) == largest(1024, fused=True) == 1 << 12


# Heads of real models


@pytest.mark.parametrize("name", HEADS)
def test_the_head_of_a_family(name: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(HEADS[name]).eval()
    head = find_head(model)
    assert head is not None
    ids = torch.tensor([[5, 6, 7, 8, 9, 2]])
    hidden_PE = backbone(model)(input_ids=ids).last_hidden_state[0, :-1]
    found, entropy_N = head.score(hidden_PE, torch.arange(5), ids[0, 1:])
    logprobs_PV = model(ids).logits[0, :-1].log_softmax(-1)
    expected = logprobs_PV.gather(-1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    entropy = -(logprobs_PV.exp() * logprobs_PV).sum(-1)
    torch.testing.assert_close(entropy_N, entropy, atol=1e-5, rtol=1e-5)


def test_a_head_that_does_something_else_is_not_taken() -> None:
    """A fast path that a trial on the model does not confirm is not used."""
    model = AutoModelForCausalLM.from_config(HEADS["qwen3, tied"])
    assert find_head(model) is not None
    model.lm_head.register_forward_hook(lambda _module, _args, logits: logits * logits)
    assert find_head(model) is None


def test_a_gpu_computes_many_rows_at_once() -> None:
    assert logprobs.chunk_rows(151_936, torch.device("cuda")) == 441
    assert logprobs.chunk_rows(151_936, torch.device("cpu")) == 6
    assert logprobs.chunk_rows(1 << 27, torch.device("cuda")) == 1
