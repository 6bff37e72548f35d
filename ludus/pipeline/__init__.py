"""A training run, from its tasks to its report."""

from ludus.pipeline.training import BudgetSpent, Interrupted, TrainingRun

__all__ = ["BudgetSpent", "Interrupted", "TrainingRun"]
