"""The frozen reference model of a KL divergence.

kl_reference: PATH    the model at PATH
LoRA policy           the policy with its adapters disabled
else                  a copy of the policy at the start of the stage
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ludus.core.errors import CheckpointError, ConfigError
from ludus.models.vocabulary import Vocabulary
from ludus.train.checkpoint.loading import load, read_state
from ludus.train.checkpoint.state import fingerprint
from ludus.train.checkpoint.store import CheckpointStore
from ludus.train.forward import Forward

MISSING = (
    "the checkpoint was written without a reference model, which the run's algorithm now needs: "
    "start the stage anew, or name a model in rl.algorithm.args.kl_reference"
)


class Reference:
    """A reference for one stage.

    Args:
        policy: the trained model; copied unless `model` is given or the policy has adapters.
        model: the reference model; None: derived from the policy.
        temperature: that of the rollouts.
        context_length: most tokens of a sample.
        vocabulary: the ids that are sampled; None: all.

    Errors: ConfigError for a reference with another vocabulary.
    """

    def __init__(
        self,
        policy: Any,
        model: Any | None = None,
        *,
        temperature: float = 1.0,
        context_length: int | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        self.adapters_off = model is None and hasattr(policy, "disable_adapter")
        self.copied = model is None and not self.adapters_off
        self._kept: str | None = None  # fingerprint of the saved copy
        if model is not None:
            require_same_vocabulary(policy, model)
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
                model, temperature=temperature, context_length=context_length, vocabulary=vocabulary
            )

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context in which the model computes as the reference."""
        if not self.adapters_off:
            yield
            return
        with self.model.disable_adapter():
            yield

    def save(self, folder: Path) -> str | None:
        """Save a copied policy in `folder`, once; returns its fingerprint, or None for a reference
        that is not a copy."""
        if not self.copied:
            return None
        if self._kept is None:
            self._kept = fingerprint(self.model)
            if saved_reference(folder) != self._kept:
                store = CheckpointStore(folder, keep_last=1, keep_best=0)
                store.save("reference", 0, model=self.model, state={"fingerprint": self._kept})
        return self._kept

    def load(self, folder: Path, content: str | None) -> None:
        """Load a copy that `save` wrote. Errors: CheckpointError for a different model."""
        if not self.copied:
            return
        if content is None:
            raise CheckpointError(MISSING)
        path = folder / "reference-000000"
        if not path.exists():
            raise CheckpointError(f"{path}, the reference model of this stage, is missing")
        load(path, model=self.model)
        self._kept = None
        if fingerprint(self.model) != content:
            raise CheckpointError(f"{path} holds another reference model than the run trained with")


def saved_reference(folder: Path) -> str | None:
    """Returns the fingerprint of the reference in `folder`."""
    store = CheckpointStore(folder, keep_last=1, keep_best=0)
    try:
        latest = store.latest()
    except CheckpointError:  # damaged: save it again
        return None
    return str(read_state(latest.path)["fingerprint"]) if latest else None


def require_same_vocabulary(policy: Any, reference: Any) -> None:
    """Errors: ConfigError."""
    sizes = [m.config.get_text_config().vocab_size for m in (policy, reference)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"rl.algorithm.args.kl_reference: that model has a vocabulary of {sizes[1]} tokens, "
            f"the policy's has {sizes[0]}: its ids would be other tokens. Name a model with the "
            "policy's tokenizer, or leave it out: then the policy as the stage begins is meant"
        )
