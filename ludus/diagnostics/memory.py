"""Memory of a recipe by part: weights, gradients, optimizer, activations, KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedConfig

from ludus.config.schema import RunConfig
from ludus.models.quantisation import BYTES_PER_WEIGHT

WEIGHTS = ("weights", "packed weights", "sampler's weights")
"""Parts of the memory that any model needs."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a model of this shape, in training and in sampling."""

    config: RunConfig
    shape: PreTrainedConfig

    @property
    def item(self) -> int:
        """Bytes of a weight."""
        return 2 if self.config.model.dtype == "bfloat16" else 4

    @property
    def layers(self) -> int:
        return int(self.shape.get_text_config().num_hidden_layers)

    @property
    def samples_bfloat16(self) -> bool:
        """True if the sampler multiplies in bfloat16."""
        return self.config.sampler.args.get("dtype") == "bfloat16"

    @property
    def sampling_item(self) -> int:
        """Bytes of an element of the sampler's matrix products and KV cache."""
        return 2 if self.samples_bfloat16 else self.item

    @property
    def training_item(self) -> int:
        """Bytes of an element of training's matrix products."""
        return 2 if self.config.learner.dtype == "bfloat16" else self.item

    def _heads(self) -> tuple[int, int, int]:
        """Returns query heads, key-value heads, head size."""
        text = self.shape.get_text_config()
        heads = text.num_attention_heads
        size = getattr(text, "head_dim", None) or text.hidden_size // heads
        return heads, getattr(text, "num_key_value_heads", None) or heads, size

    @property
    def cache_item(self) -> int:
        """KV-cache bytes of a token."""
        _, kv_heads, size = self._heads()
        return self.layers * 2 * kv_heads * size * self.sampling_item

    def parts(self, parameters: int, trained: int, linear: int = 0) -> dict[str, float]:
        """Returns bytes by part. `linear`: the weights of the layers' matrices."""
        config = self.config
        context = config.model.context_length
        stages = []
        if config.sft:
            stages.append(min(config.sft.tokens_per_batch, config.sft.episodes_per_step * context))
        if config.rl:
            played = config.rl.groups_per_step * config.rl.group_size
            stages.append(min(config.rl.tokens_per_batch, played * context))
        gradient, moment, master = self._training_bytes()
        optimizer = float(trained * (2 * moment + master))
        optimizer -= moment * self._without_second_moment(trained, linear)
        parts = {
            "weights": self._weights(parameters, linear),
            "gradients": float(trained * gradient),
            "optimizer": optimizer,
            "activations": max(stages, default=0) * self.activations(),
        }
        if config.env is not None or config.rl is not None or not config.sft:
            parts["KV cache"] = float(config.rollout.concurrency * context * self.cache_item)
        if config.model.device == "cpu" and config.sampler.name == "in_process":
            text = self.shape.get_text_config()
            packed = parameters * self.sampling_item
            parts["packed weights"] = float(packed + 4 * text.vocab_size * text.hidden_size)
        elif self.samples_bfloat16 and config.sampler.name == "in_process":
            parts["sampler's weights"] = 2.0 * parameters
        elif config.model.quantised and config.sampler.name == "in_process":
            parts["sampler's weights"] = float(self.sampling_item * parameters)
        if others := sum(policy.model == "same" for policy in config.policies.values()):
            own = float(trained * (gradient + (4 if config.model.lora else self.item))) + optimizer
            own += parts.get("sampler's weights", 0.0)
            parts["other policies"] = float(others * own)
        return parts

    def _weights(self, parameters: int, linear: int) -> float:
        packed = linear if self.config.model.quantised else 0
        return float((parameters - packed) * self.item + packed * BYTES_PER_WEIGHT)

    def _training_bytes(self) -> tuple[int, int, int]:
        """Returns bytes of a trained weight's gradient, of one of its moments, of its master."""
        if self.config.model.dtype == "float32" or self.config.model.lora:  # adapters: float32
            return 4, 4, 0
        rounds = self.config.learner.master_weights == "stochastic_rounding"
        return (2, 2, 0) if rounds else (4, 4, 4)

    def _without_second_moment(self, trained: int, linear: int) -> int:
        """Returns the number of trained weights of which Muon keeps one moment, in all stages."""
        stages = [stage for stage in (self.config.sft, self.config.rl) if stage is not None]
        if any(stage.optimizer.name != "muon" for stage in stages):
            return 0
        return trained if self.config.model.lora else min(trained, linear)

    def activations(self) -> float:
        """Returns the bytes that autograd saves for a token, over all layers.

        A layer saves: the residual stream before and after each norm; queries, keys and values
        before and after rotation; attention's output; gate, up, activated gate, their product.
        """
        text = self.shape.get_text_config()
        heads, kv_heads, size = self._heads()
        inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
        layer = 4 * text.hidden_size + (3 * heads + 4 * kv_heads) * size + 4 * inner
        if self.config.learner.gradient_checkpointing:
            kept = text.num_hidden_layers * text.hidden_size + layer
        else:
            kept = text.num_hidden_layers * layer
        return float(kept * self.training_item)
