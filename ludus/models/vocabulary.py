"""The token ids that a policy samples: those of its tokenizer.

Sampler and learner normalise over the same ids, so their log-probabilities are equal. A model may
have more ids than its tokenizer, and a tokenizer may leave gaps:

    tokens      <pad> a b c         <end>
    ids         0     1 2 3 (4) (5) 6     (7)     8 embeddings; 4, 5 and 7 are never sampled

Shape suffixes: V vocabulary, N tokens, S sampled ids.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ludus.models.grammars import Grammars


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Ids below `size`; with gaps, only those in `ids_S`.

    Args:
        size: largest id + 1.
        ids_S: the ids in ascending order; None: all ids below `size`.
        tokenizer: of the ids, for grammars.
    """

    size: int
    ids_S: Tensor | None = None
    tokenizer: Any = None

    @classmethod
    def of(cls, tokenizer: Any) -> Vocabulary:
        """The vocabulary of a Hugging Face tokenizer, added tokens included."""
        return cls.from_ids(tokenizer.get_vocab().values(), tokenizer)

    @classmethod
    def from_ids(cls, ids: Iterable[int], tokenizer: Any = None) -> Vocabulary:
        distinct = sorted(set(ids))
        size = distinct[-1] + 1
        return cls(size, None if len(distinct) == size else torch.tensor(distinct), tokenizer)

    @cached_property
    def grammars(self) -> Grammars:
        """Matchers of constrained turns. Errors: MissingDependency."""
        from ludus.models.grammars import Grammars

        return Grammars(self.tokenizer, self.size)

    def select(self, table: Tensor, dim: int = -1) -> Tensor:
        """Returns the ids' entries of a dimension of size V: a view, or with gaps a copy."""
        if self.ids_S is None:
            return table.narrow(dim, 0, min(self.size, table.shape[dim]))
        return table.index_select(dim, self.ids_S.to(table.device))

    def absent(self, num_ids: int) -> list[int]:
        """Returns the ids below `num_ids` that are never sampled."""
        present = range(self.size) if self.ids_S is None else self.ids_S.tolist()
        return sorted(set(range(num_ids)).difference(present))

    def places(self, ids_N: Tensor) -> Tensor:
        """Returns the place of each id in what `select` returns; S for an id never sampled."""
        if self.ids_S is None:
            return ids_N
        places_V = torch.full((self.size,), len(self.ids_S))
        places_V[self.ids_S] = torch.arange(len(self.ids_S))
        return places_V.to(ids_N.device)[ids_N]

    def ids(self, places_N: Tensor) -> Tensor:
        """Returns the ids at these places: the inverse of `places`."""
        return places_N if self.ids_S is None else self.ids_S.to(places_N.device)[places_N]


def fingerprint(tokenizer: Any) -> str:
    """Returns a SHA-256 of the tokens and ids of a Hugging Face tokenizer."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()
