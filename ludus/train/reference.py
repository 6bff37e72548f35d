"""The frozen model that a divergence is measured from.

kl_reference: PATH    that model
a LoRA policy         the policy with its adapters switched off
else                  a copy of the policy, as the stage began
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ludus.core.errors import CheckpointError, ConfigError
from ludus.train.checkpoint.state import fingerprint
from ludus.train.checkpoint.store import CheckpointStore, load, read_state
from ludus.train.forward import Forward


class Reference:
    """A reference for one stage.

    Args:
        policy: the model that trains; it is copied where nothing else serves.
        model: the reference itself, where it is another model.
        temperature: that of the rollouts.
        context_length: the most tokens of a sample.

    Errors: ConfigError where the reference has another vocabulary.
    """

    def __init__(
        self,
        policy: Any,
        model: Any | None = None,
        *,
        temperature: float = 1.0,
        context_length: int | None = None,
        num_ids: int | None = None,
    ) -> None:
        self.adapters_off = model is None and hasattr(policy, "disable_adapter")
        self.copied = model is None and not self.adapters_off
        self._kept: str | None = None  # the fingerprint of the copy, once it is saved
        if model is not None:
            _require_same_vocabulary(policy, model)
        elif self.copied:
            model = copy.deepcopy(policy)
        else:
            model = policy
        self.model = model
        if not self.adapters_off:
            model.requires_grad_(False)
            model.eval()
        with self.active():
            self.forward = Forward(
                model,
                temperature=temperature,
                context_length=context_length,
                num_ids=num_ids,
            )

    @contextmanager
    def active(self) -> Iterator[None]:
        """While the model is the reference."""
        if not self.adapters_off:
            yield
            return
        with self.model.disable_adapter():
            yield

    def save(self, folder: Path) -> str | None:
        """Write a copied policy into `folder`, once; returns its fingerprint. None: nothing to
        keep, for the others can be had again."""
        if not self.copied:
            return None
        if self._kept is None:
            self._kept = fingerprint(self.model)
            if _saved(folder) != self._kept:
                store = CheckpointStore(folder, keep_last=1, keep_best=0)
                store.save("reference", 0, model=self.model, state={"fingerprint": self._kept})
        return self._kept

    def load(self, folder: Path, content: str | None) -> None:
        """Take up a copy that `save` wrote. Errors: CheckpointError where it is another."""
        if not self.copied:
            return
        if content is None:
            raise CheckpointError(
                "the checkpoint was written without a reference model, which the run's algorithm "
                "now needs: start the stage anew, or name a model in rl.algorithm.args.kl_reference"
            )
        path = folder / "reference-000000"
        if not path.exists():
            raise CheckpointError(f"{path}, the reference model of this stage, is missing")
        load(path, model=self.model)
        self._kept = None
        if fingerprint(self.model) != content:
            raise CheckpointError(f"{path} holds another reference model than the run trained with")


def _saved(folder: Path) -> str | None:
    """The fingerprint of the reference in `folder`."""
    store = CheckpointStore(folder, keep_last=1, keep_best=0)
    try:
        latest = store.latest()
    except CheckpointError:  # damaged: it is written anew
        return None
    return str(read_state(latest.path)["fingerprint"]) if latest else None


def _require_same_vocabulary(policy: Any, reference: Any) -> None:
    sizes = [m.config.get_text_config().vocab_size for m in (policy, reference)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"rl.algorithm.args.kl_reference: that model has a vocabulary of {sizes[1]} tokens, "
            f"the policy's has {sizes[0]}: its ids would be other tokens. Name a model with the "
            "policy's tokenizer, or leave it out: then the policy as the stage begins is meant"
        )
