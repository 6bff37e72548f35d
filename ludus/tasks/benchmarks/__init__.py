"""Published benchmarks: data sets with their prompts, answers and judges."""

from ludus.tasks.benchmarks.rows import BENCHMARKS, Benchmark

__all__ = ["BENCHMARKS", "Benchmark"]
