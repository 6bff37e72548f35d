"""Clusters of questions: sacrebleu's BLEU, average linkage."""

import random

import numpy as np
import pytest
from sacrebleu.metrics import BLEU

from ludus.judges.proposals.repetition import cluster_sizes, distances

ODD = [
    "",
    ".",
    "a",
    "3 + 4",
    "3 + 4",
    "3 + 5",
    "the the the the the the",
    "the the cat",
    "What is $\\frac{3}{4}$ of 12?",
    "What is $\\frac{3}{4}$ of 16?",
    "三加四等于多少",
    "三加五等于多少",
    "x" * 5000,
    "1,000.5 - 3.25 = y; z",
    "∀x∈ℝ: x² ≥ 0",
]


def by_library(questions):
    """The distances, from sacrebleu's call for each pair."""
    bleu = BLEU(smooth_method="floor", smooth_value=0.1, effective_order=True, tokenize="zh")
    scores = np.array([[bleu.sentence_score(a, [b]).score for b in questions] for a in questions])
    found = 1 - (scores + scores.T) / 200
    np.fill_diagonal(found, 0)
    return found.clip(0, 1)


def random_questions(number, seed):
    rng = random.Random(seed)
    words = ["what", "is", "the", "sum", "of", "3", "4", "and", "x^2", "?", "(", "mod", "7"]
    return [" ".join(rng.choices(words, k=rng.randrange(1, 25))) for _ in range(number)]


@pytest.mark.parametrize("questions", [ODD, random_questions(40, 0), random_questions(3, 1)])
def test_distances_are_the_librarys(questions):
    shown = [q.replace("²", "2").replace("ℝ", "r").casefold() for q in questions]
    expected = by_library(shown)
    same = np.array([[a == b for b in shown] for a in shown])
    expected[same] = 0
    np.testing.assert_allclose(distances(questions), expected, atol=1e-12)


def test_distances_are_symmetric_and_do_not_depend_on_the_order():
    questions = random_questions(30, 2)
    found = distances(questions)
    assert (found == found.T).all()
    np.testing.assert_allclose(distances(questions[::-1]), found[::-1, ::-1], atol=1e-12)


def by_hand(found, limit):
    """Average linkage, as its definition says: sizes of the clusters."""
    clusters = [[i] for i in range(len(found))]
    while len(clusters) > 1:
        pairs = [(a, b) for a in range(len(clusters)) for b in range(a)]
        means = [found[np.ix_(clusters[a], clusters[b])].mean() for a, b in pairs]
        if min(means) >= limit:
            break
        a, b = pairs[means.index(min(means))]
        clusters[b] += clusters.pop(a)
    return [len(c) for i in range(len(found)) for c in clusters if i in c]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("limit", [0.3, 0.5, 0.8])
def test_clusters_are_those_of_average_linkage(seed, limit):
    questions = random_questions(25, seed)
    assert cluster_sizes(questions, limit) == by_hand(distances(questions), limit)


def test_similar_questions_are_one_cluster():
    questions = [
        "What is the sum of the first 10 primes?",
        "What is the sum of the first 12 primes?",
        "How many ways are there to seat 5 people at a table?",
        "what is the  sum of the first 10 primes?",
        "What is the sum of the \u200bfirst 10 primes?",  # an invisible character
    ]
    assert cluster_sizes(questions) == [4, 4, 1, 4, 4]


def test_short_questions_differ_by_their_numbers():
    assert cluster_sizes(["3 + 4", "3 + 5", "8 * 2", "3 + 4"]) == [2, 1, 1, 2]


@pytest.mark.parametrize(
    ("number", "expected"), [(0, []), (1, [1]), (2, [2, 2]), (300, [300] * 300)]
)
def test_all_alike(number, expected):
    assert cluster_sizes(["What is 3 + 4?"] * number) == expected


def test_the_threshold_is_strict():
    questions = ["a b c d e f g h", "a b c d e f x y"]
    [[_, gap], _] = distances(questions)
    assert cluster_sizes(questions, gap) == [1, 1]
    assert cluster_sizes(questions, gap + 1e-9) == [2, 2]


def test_hostile_questions():
    long = "a " * 4000
    assert cluster_sizes([long, long + "b", "\ud800", "\0", ""]) == [2, 2, 1, 1, 1]


def test_the_library_keeps_no_texts():
    from sacrebleu.tokenizers.tokenizer_re import TokenizerRegexp
    from sacrebleu.tokenizers.tokenizer_zh import TokenizerZh

    cluster_sizes(random_questions(20, 3))
    for kind in (TokenizerZh, TokenizerRegexp):
        assert kind.__call__.cache_info().currsize == 0
