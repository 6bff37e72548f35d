"""Tensor parallelism: the ranks of a row of the mesh share the matrices of each layer.

q, k, v, gate, up    split by their outputs: a rank computes some heads, some inner units
o, down              split by their inputs: the ranks' results are summed
the rest             whole on all ranks; so embeddings and head are
"""

from __future__ import annotations

import logging
import re
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from ludus.core.errors import ConfigError

MODELS = ("llama", "qwen2", "qwen3")
"""transformers' model types whose attention takes its number of heads from its projections."""
PLAN: dict[str, ParallelStyle] = {
    **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}
HEAD_NORMS = re.compile(r"\.self_attn\.[qk]_norm\.weight$")
"""Whole on all ranks, but each rank has the gradient of its heads only."""
WHOLE = {"input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"}


def check_model(model: Any, ways: int) -> None:
    """Errors: ConfigError for a model whose layers cannot be shared by `ways` ranks."""
    config = model.config.get_text_config()
    if config.model_type not in MODELS:
        raise ConfigError(
            f"tensor_parallel: {ways} needs a model of the types {', '.join(MODELS)}, not "
            f"{config.model_type}; set 1"
        )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = getattr(config, name)
        if size % ways:
            raise ConfigError(f"tensor_parallel: {ways} does not divide the model's {name}, {size}")


def parallelize(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Share the matrices of a layer. Errors: ConfigError for a layer of another structure."""
    owners = {name.rpartition(".")[0] for name, _ in layer.named_parameters()}
    if other := sorted(owners - PLAN.keys() - WHOLE):
        raise ConfigError(f"tensor_parallel: the model's layers have {other[0]}; set 1")
    # It warns that two gathers could be one.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    parallelize_module(layer, mesh, PLAN)
