"""Clusters of questions that are alike: average linkage of 1 - BLEU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ludus.judges.proposals.parse import visible

MAX_ORDER = 4
FLOOR = 0.1
"""Matches of an order in which none are: smoothing method 1 of Chen and Cherry (2014)."""


def cluster_sizes(questions: Sequence[str], max_distance: float = 0.5) -> list[int]:
    """The size of each question's cluster, itself included.

    Two clusters are joined while the mean distance of their questions is less than `max_distance`.
    Blocks for up to seconds: call it in a thread.
    """
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    if len(questions) < 2:
        return [1] * len(questions)
    tree = linkage(squareform(distances(questions), checks=False), "average")
    labels = fcluster(tree, _below(max_distance), "distance").tolist()
    sizes = Counter(labels)
    return [sizes[label] for label in labels]


def _below(distance: float) -> float:
    """The next smaller number: `fcluster` joins at the threshold, the paper below it."""
    import numpy as np

    return float(np.nextafter(distance, -1.0))


def distances(questions: Sequence[str]) -> Any:
    """1 - BLEU of each pair, of shape (questions, questions); 0 on the diagonal.

    BLEU is not symmetric, so it is the mean of both directions. It is sacrebleu's sentence BLEU
    with `smooth_method="floor"`, `smooth_value=0.1`, `effective_order=True` and the tokenizer `zh`:
    words, single punctuation marks and LaTeX commands, single ideographs. The effective order lets
    a question of fewer than four words be like itself. Texts are compared as they look, without
    case.
    """
    import numpy as np

    texts = [visible(question).casefold() for question in questions]
    place = {text: index for index, text in enumerate(dict.fromkeys(texts))}
    bleu = _bleu_of_pairs(_split(list(place)))
    found = 1.0 - (bleu + bleu.T) / 2.0
    np.fill_diagonal(found, 0.0)
    at = [place[text] for text in texts]
    return found[np.ix_(at, at)].clip(0.0, 1.0)


def _split(texts: Sequence[str]) -> list[list[str]]:
    """The tokens of texts."""
    from sacrebleu.tokenizers.tokenizer_re import TokenizerRegexp
    from sacrebleu.tokenizers.tokenizer_zh import TokenizerZh

    tokenizer = TokenizerZh()
    found = [str(tokenizer(text)).split() for text in texts]
    for kind in (TokenizerZh, TokenizerRegexp):  # they keep 65,536 texts for the process
        kind.__call__.cache_clear()
    return found


def _bleu_of_pairs(texts: Sequence[Sequence[str]]) -> Any:
    """BLEU from 0 to 1 of each text (row) against each as its reference (column).

    A clipped count is min(a, b) = sum over t >= 1 of [a >= t][b >= t], so a product of sparse 0/1
    matrices with a column for each (n-gram, t) counts the matches of all pairs.
    """
    import numpy as np

    lengths = np.array([len(text) for text in texts], dtype=float)
    logs, orders = np.zeros((len(texts), len(texts))), np.zeros((len(texts), 1))
    matched = np.zeros(logs.shape, dtype=bool)
    for order in range(1, MAX_ORDER + 1):
        totals = np.maximum(lengths - order + 1, 0.0)[:, None]
        counts = _matches(texts, order)
        matched |= counts > 0
        precision = np.where(counts > 0, counts, FLOOR) / np.maximum(totals, 1.0)
        logs += np.where(totals > 0, np.log(precision), 0.0)
        orders += totals > 0
    ratio = lengths[None, :] / np.maximum(lengths[:, None], 1.0)
    brevity = np.exp(np.minimum(1.0 - ratio, 0.0))
    return np.where(matched, brevity * np.exp(logs / np.maximum(orders, 1.0)), 0.0)


def _matches(texts: Sequence[Sequence[str]], order: int) -> Any:
    """Clipped counts of common n-grams, of shape (texts, texts)."""
    import numpy as np
    from scipy.sparse import csr_array

    columns: dict[tuple[tuple[str, ...], int], int] = {}
    rows: list[int] = []
    places: list[int] = []
    for row, text in enumerate(texts):
        grams = Counter(zip(*(text[start:] for start in range(order)), strict=False))
        for gram, count in grams.items():
            for number in range(count):
                rows.append(row)
                places.append(columns.setdefault((gram, number), len(columns)))
    ones = np.ones(len(rows), dtype=np.float64)
    shape = (len(texts), max(len(columns), 1))
    table = csr_array((ones, (rows, places)), shape=shape)
    return (table @ table.T).toarray()
