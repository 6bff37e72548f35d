"""A model's weights in bfloat16, for sampling: storage of their own, refreshed in place."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ludus.core.errors import ConfigError
from ludus.models.memory import is_out_of_memory


class SamplingCopy:
    """A module like `model`, with parameters in bfloat16.

    The copy changes in `refresh` only, whatever happens to `model`. Tied parameters stay tied,
    adapters stay adapters, buffers (rotary frequencies) keep their type.

    Args:
        model: a Hugging Face causal LM.
        keep: parameters that keep their type, by identity. Those that the model's class keeps in
            float32 do too.

    Errors: ConfigError where memory does not suffice.
    """

    def __init__(self, model: Any, keep: Iterable[Tensor] = ()) -> None:
        self._model = model
        kept = {id(parameter) for parameter in keep}
        names = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
        own: dict[int, Any] = {}
        try:
            for name, parameter in model.named_parameters():  # tied parameters have one name
                same = id(parameter) in kept or any(part in name for part in names)
                dtype = parameter.dtype if same else torch.bfloat16
                empty = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                own[id(parameter)] = nn.Parameter(empty, requires_grad=False)
            # deepcopy takes what it finds in its memo, and copies no parameter.
            self.module: Any = copy.deepcopy(model, own).eval()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            size = 2 * sum(parameter.numel() for parameter in model.parameters())
            raise ConfigError(
                "sampler.args.dtype: memory does not suffice for the sampler's own weights in "
                f"bfloat16 ({size / 2**30:.3g} GiB); set auto, to sample with the learner's "
                "weights, or take a smaller model"
            ) from error
        tensors = self.module.state_dict(keep_vars=True)
        self._stored = {id(tensor): (name, tensor) for name, tensor in tensors.items()}
        self.refresh()

    @property
    def num_bytes(self) -> int:
        """Bytes of the copy's weights."""
        return sum(tensor.nbytes for _, tensor in self._stored.values())

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the model's present weights into the copy, tensor by tensor, without temporaries of
        their size. Addresses stay."""
        source = self._model.state_dict()
        for name, stored in self._stored.values():
            stored.copy_(source[name])
