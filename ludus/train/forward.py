"""The policy's forward pass over packed rows: hidden states, then log-probabilities and entropies.

The constructor tests the model and picks the first attention that gives exact results:

    tiles   token trees and packed rows with ludus' attention, through transformers' attention
            interface
    dense   the same rows with a dense mask, for models with their own attention
    none    one sample per row, causal: recurrent layers, custom positions or masks

Sliding windows and soft caps are part of the first two; the test gives the model a narrow window.

Shape suffixes: R rows, T positions, P places that predict a loss token, N loss tokens, E hidden
size, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from ludus.config.schema import LearnerConfig
from ludus.core.errors import ConfigError
from ludus.core.types import Sample
from ludus.models.decoders.llama import NotLlama
from ludus.models.vocabulary import Vocabulary
from ludus.models.windows import UnknownAttention, layer_windows, model_masks, narrowed
from ludus.telemetry.logs import get_logger
from ludus.train.batches.packing import Layout, MicroBatch, attention_mask, pack, rounded
from ludus.train.constrained import rescore
from ludus.train.kernels.attention import attending
from ludus.train.kernels.compiled import CompiledLayers
from ludus.train.kernels.fused import FusedLayers
from ludus.train.kernels.logprobs import Head, backbone, find_head, score_logits
from ludus.train.kernels.tiles import Plan, plan_row

log = get_logger(__name__)

Attention = Literal["tiles", "dense", "none"]

TOLERANCE = 1e-4
"""Relative to the largest hidden state; rounding errors in float32 are about 1e-6."""
ROUNDING = 16
"""Deviation of a gradient that is allowed besides, as a multiple of the deviation of the model's
own layers with one sample a row, which is rounding too. In a trained model whose heads look at one
token, gradients of queries and keys cancel, and rounding is up to 0.4 % of them; that of the
kernels was up to 7 times that of the layers."""
TRIAL_WINDOW = 2
"""Sliding windows in a trial, whose samples have up to five tokens."""
SMALL_PASS = 6e8
"""Tokens times weights of a pass below which one thread is faster than several: waiting for each
other takes longer than the work that threads share (measured with 0.8 M weights, docs/log.md)."""
SHAPES = 64
"""Row lengths and numbers of places of a pass in bfloat16 on the CPU are multiples of it: oneDNN
prepares a product of a new shape in up to 13 ms, longer than the product takes (docs/log.md)."""
UNFIT = (TypeError, ValueError, AttributeError, RuntimeError, IndexError)
"""Errors of a model that does not support an attention."""


class Forward:
    """Passes of micro-batches through a Hugging Face causal LM.

    Args:
        model: the policy.
        temperature: of the rollouts; divides the logits.
        context_length: length of the longest sample, which a sliding window may cover; None:
            unknown.
        settings: of the computation.
        vocabulary: other ids have probability 0, as in the sampler; None: all ids are sampled.

    Errors: ConfigError for a setting that the model does not support.
    """

    def __init__(
        self,
        model: Any,
        *,
        temperature: float = 1.0,
        context_length: int | None = None,
        settings: LearnerConfig | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        self.settings = settings or LearnerConfig()
        self.model = model
        self.vocabulary = vocabulary
        self.temperature = temperature
        weight = next(model.parameters())
        self.device, self._dtype = weight.device, weight.dtype
        self._num_weights = sum(p.numel() for p in model.parameters())
        self.head: Head | None = find_head(model)
        self._layers: CompiledLayers | FusedLayers | None = None
        self._windows: list[int] | None = _windows(model, context_length)
        with self._trial_windows():
            self.attention: Attention = self._find_attention()
            self._layers = CompiledLayers(model) if self.settings.compile else self._fused()
        if self.settings.detach_observations and not isinstance(self._layers, FusedLayers):
            raise ConfigError(
                "learner.detach_observations needs ludus' training kernels: a C compiler, and a "
                "model like Llama or Qwen3, in float32 on the CPU, without adapters, "
                f"`learner.compile` and `verify`; not this {type(model).__name__}. Set it to false"
            )
        if self.settings.gradient_checkpointing:
            if not getattr(model, "supports_gradient_checkpointing", False):
                raise ConfigError(
                    "learner.gradient_checkpointing: transformers does not support it for "
                    f"{type(model).__name__}; set it to false"
                )
            # transformers 5 renamed the method.
            enable = getattr(model, "activation_checkpointing_enable", None)
            (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})

    @property
    def layout(self) -> Layout:
        """The layout of samples for this model."""
        if self.attention == "none":
            return "single"
        return "tree" if self.settings.share_prefixes else "packed"

    @contextmanager
    def passes(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Context of a forward pass and its backward: threads, precision and attention."""
        autocast = self.settings.dtype == "bfloat16"
        with ExitStack() as stack:
            stack.enter_context(self._threads(micro_batch))
            stack.enter_context(torch.autocast(self.device.type, torch.bfloat16, enabled=autocast))
            stack.enter_context(self._attending(micro_batch))
            if self._layers is not None:
                stack.enter_context(self._layers.active())
            yield

    @contextmanager
    def _threads(self, micro_batch: MicroBatch) -> Iterator[None]:
        """One thread for a small pass on the CPU."""
        number = torch.get_num_threads()
        small = micro_batch.token_ids_RT.numel() * self._num_weights < SMALL_PASS
        if number == 1 or not small or self.device.type != "cpu":
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(number)

    @contextmanager
    def _attending(self, micro_batch: MicroBatch) -> Iterator[None]:
        if self.attention != "tiles":
            yield
            return
        with attending(self.model, self._plan(micro_batch)):
            yield

    def _plan(self, micro_batch: MicroBatch) -> Plan:
        """Returns the tiles of all rows as one row, for each kind of layer.

        Recomputed layers keep no weights: they must do the same work twice.
        """
        micro_batch = self._shaped(micro_batch)
        num_rows, width = micro_batch.ends_RT.shape
        ends_RT = micro_batch.ends_RT + width * torch.arange(num_rows)[:, None]
        detach = self.settings.detach_observations and torch.is_grad_enabled()
        return plan_row(
            ends_RT.flatten(),
            micro_batch.positions_RT.flatten(),
            windows=self._windows or (),
            keep=not self.settings.gradient_checkpointing,
            places_P=micro_batch.places_P if detach else None,
        )

    def _shaped(self, micro_batch: MicroBatch) -> MicroBatch:
        """The micro-batch as it is computed: padded where shapes that recur are faster. Tiles alone
        take positions as they are: elsewhere padding would stand beyond the last position."""
        half = self.settings.dtype == "bfloat16" or self._dtype == torch.bfloat16
        recurs = half and self.device.type == "cpu" and self.attention == "tiles"
        return rounded(micro_batch, SHAPES) if recurs else micro_batch

    def hidden_states(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """Returns the last hidden states [P, E] of the places that predict loss tokens, after the
        final norm, and their logits [P, V] if `Head` does not support the model's head. Of a pass
        in bfloat16 on the CPU, copies of the last place may follow.

        `hidden[micro_batch.place_N]` has one row per loss token: the state that predicts it.
        """
        micro_batch = self._shaped(micro_batch)
        inputs = self._inputs(micro_batch)
        places_P = micro_batch.places_P.to(self.device)
        if self.head is not None:
            hidden_RTE = backbone(self.model)(**inputs, use_cache=False).last_hidden_state
            return hidden_RTE.flatten(0, 1)[places_P], None
        output = self.model(**inputs, use_cache=False, output_hidden_states=True)
        hidden_PE = output.hidden_states[-1].flatten(0, 1)[places_P]
        return hidden_PE, output.logits.flatten(0, 1)[places_P]

    def score(
        self, hidden_PE: Tensor, logits_PV: Tensor | None, micro_batch: MicroBatch
    ) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities and entropies [N] of the loss tokens."""
        place_N = micro_batch.place_N.to(self.device)
        target_N = micro_batch.target_N.to(self.device)
        if self.head is None:
            assert logits_PV is not None
            scores = score_logits(logits_PV, place_N, target_N, self.temperature, self.vocabulary)
        else:
            scores = self.head.score(
                hidden_PE, place_N, target_N, self.temperature, self.vocabulary
            )

        def logits(place_L: Tensor) -> Tensor:
            if self.head is not None:
                return self.head.logits(hidden_PE[place_L])
            assert logits_PV is not None
            return logits_PV[place_L]

        def log_softmax(logits_LS: Tensor) -> Tensor:
            return (logits_LS.float() / self.temperature).log_softmax(-1)

        return rescore(scores, micro_batch, logits, log_softmax, self.vocabulary)

    def logprobs(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Returns the policy's log-probabilities and entropies [N] of the loss tokens.

        Call this and the backward pass within `passes(micro_batch)`.
        """
        return self.compute(micro_batch)[1:]

    def compute(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the hidden states [P, E] of `hidden_states`, and log-probabilities and entropies
        [N] of `score`. The same context as `logprobs`."""
        hidden_PE, logits_PV = self.hidden_states(micro_batch)
        return hidden_PE, *self.score(hidden_PE, logits_PV, micro_batch)

    def _inputs(self, micro_batch: MicroBatch) -> dict[str, Any]:
        """Returns ids, positions and mask of the rows.

        Tiles see all rows as one row. With one sample per row, causal attention never reads the
        padding after the sample: no mask is needed, and torch uses faster kernels.
        """
        ids_RT = micro_batch.token_ids_RT.to(self.device)
        positions_RT = micro_batch.positions_RT.to(self.device)
        mask: Tensor | dict[str, Tensor] | None = None
        if self.attention == "tiles":
            ids_RT, positions_RT = ids_RT.view(1, -1), positions_RT.view(1, -1)
        elif _branches(micro_batch):
            mask = model_masks(
                self.model.config.get_text_config(),
                self._windows or (),
                self.model.dtype,
                lambda window: attention_mask(micro_batch, window).to(self.device),
            )
        else:
            positions_RT = torch.arange(ids_RT.shape[1], device=self.device)[None]
        return {"input_ids": ids_RT, "position_ids": positions_RT, "attention_mask": mask}

    @contextmanager
    def _trial_windows(self) -> Iterator[None]:
        """Narrow sliding windows, so that the few tokens of a trial show them."""
        windows = self._windows
        if not any(windows or ()):
            yield
            return
        assert windows is not None
        self._windows = [min(window, TRIAL_WINDOW) for window in windows]
        try:
            with narrowed(self.model.config.get_text_config(), TRIAL_WINDOW):
                yield
        finally:
            self._windows = windows

    def _find_attention(self) -> Attention:
        if self._windows is None:
            return "none"
        choices: tuple[Attention, ...] = ("tiles", "dense")
        # Tiles are many small products, too small for a GPU.
        for choice in choices if self.device.type == "cpu" else choices[1:]:
            self.attention = choice
            if self._is_exact():
                return choice
        return "none"

    @torch.no_grad()
    def _is_exact(self) -> bool:
        """True if two branching samples and a third one, in one row, give the results of each
        alone.

        The trial is repeated in training mode, because tiles do not support dropout.
        """
        training, devices = self.model.training, [self.device] if self.device.type == "cuda" else []
        try:
            self.model.eval()
            tree_NE, single_NE = self._trial("tree"), self._alone()
            with torch.random.fork_rng(devices):
                self.model.train()
                self._trial("tree")
        except UNFIT:
            return False
        finally:
            self.model.train(training)
        half = next(self.model.parameters()).dtype.itemsize < 4
        bound = (0.05 if half else TOLERANCE) * float(single_NE.abs().max())
        return bool((tree_NE - single_NE).abs().max() <= bound)

    def _alone(self) -> Tensor:
        """Returns the trial's results with one sample per row and the model's own attention."""
        choice, self.attention = self.attention, "none"
        try:
            return self._trial("single")
        finally:
            self.attention = choice

    def _fused(self) -> FusedLayers | None:
        """Returns fused layers if they reproduce the model's states and gradients, else None."""
        if self.attention != "tiles":
            return None
        try:
            layers = FusedLayers(self.model)
            expected = self._trial_gradients()
            with layers.active():
                fused = self._trial_gradients()
            near = _are_near(fused, expected, expected)
            if not near:
                near = _are_near(fused, expected, self._trial_gradients(self._alone))
        except NotLlama as reason:
            _log_own_layers(type(self.model).__name__, str(reason))
            return None
        except UNFIT as error:
            _log_own_layers(type(self.model).__name__, f"{type(error).__name__}: {error}")
            return None
        if not near:
            _log_own_layers(type(self.model).__name__, "their gradients differ in a trial")
            return None
        return layers

    def _trial_gradients(self, trial: Callable[[], Tensor] | None = None) -> list[Tensor]:
        """Returns the hidden states of a trial (of trees, unless another is given), and the
        gradients of their weighted sum (a sum of squares is constant after a norm)."""
        training = self.model.training
        self.model.eval()
        try:
            with torch.enable_grad():
                hidden_NE = trial() if trial else self._trial("tree")
                trained = [p for p in self.model.parameters() if p.requires_grad]
                total = (hidden_NE * torch.linspace(-1, 1, hidden_NE.shape[1])).sum()
                grads = torch.autograd.grad(total, trained, allow_unused=True) if trained else ()
        finally:
            self.model.train(training)
        return [hidden_NE.detach(), *(g for g in grads if g is not None)]

    def _trial(self, layout: Layout) -> Tensor:
        """Returns hidden states [N, E] of a few test samples, in the samples' order."""
        size = self.model.config.get_text_config().vocab_size
        samples = [
            Sample(
                token_ids=[token % size for token in ids],
                loss_mask=[False] + [True] * (len(ids) - 1),
                logprobs=[0.0] * len(ids),
                advantages=[0.0] * len(ids),
                trajectory_id="",
            )
            for ids in ([3, 1, 4, 1, 5], [3, 1, 4, 2], [2, 7, 1])
        ]
        weights = [sample.logprobs for sample in samples]
        batch = pack(samples, weights, tokens_per_batch=64, pad_id=0, layout=layout)
        states: dict[tuple[int, int], Tensor] = {}
        for m in batch.micro_batches:
            with self._attending(m):
                hidden_NE = self.hidden_states(m)[0][m.place_N.to(self.device)].float()
            keys = zip(m.sample_N.tolist(), m.index_N.tolist(), strict=True)
            states |= dict(zip(keys, hidden_NE, strict=True))
        return torch.stack([states[key] for key in sorted(states)])


@functools.cache
def _log_own_layers(name: str, reason: str) -> None:
    """Log once per model class and reason."""
    log.info("training with the model's own layers, slower than kernels", model=name, reason=reason)


def _are_near(
    found: Sequence[Tensor], expected: Sequence[Tensor], others: Sequence[Tensor]
) -> bool:
    """True if each tensor is the expected one up to TOLERANCE, and ROUNDING times the deviation of
    another way to compute it."""
    for actual, reference, other in zip(found, expected, others, strict=True):
        rounding = _deviation(other, reference)
        bound = TOLERANCE * float(reference.abs().max()) + ROUNDING * rounding
        if not _deviation(actual, reference) <= bound < math.inf:
            return False
    return True


def _deviation(actual: Tensor, reference: Tensor) -> float:
    return float((actual - reference).abs().max())


def _branches(micro_batch: MicroBatch) -> bool:
    """True if some position, except padding, does not see all previous positions."""
    positions_RT, ends_RT = micro_batch.positions_RT, micro_batch.ends_RT
    every_T = torch.arange(ends_RT.shape[1])
    padding_RT = (ends_RT == every_T + 1) & (positions_RT == 0)
    return bool(((positions_RT != every_T) & ~padding_RT).any())


def _windows(model: Any, context_length: int | None) -> list[int] | None:
    """Returns the sliding windows of the layers (0: all positions); None for other layers."""
    try:
        return layer_windows(model.config.get_text_config(), context_length)
    except UnknownAttention:
        return None
