"""Evaluation: success, mean score and pass@k with confidence intervals, and paired comparison."""

from ludus.evaluate.comparison import compare
from ludus.evaluate.estimates import mean_score, pass_at_k, summarise
from ludus.evaluate.results import Comparison, Evaluation
from ludus.evaluate.tables import render_comparison, render_evaluation

__all__ = [
    "Comparison",
    "Evaluation",
    "compare",
    "mean_score",
    "pass_at_k",
    "render_comparison",
    "render_evaluation",
    "summarise",
]
