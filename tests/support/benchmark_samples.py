"""Small files in the format of the published benchmarks; the problems are our own."""

from __future__ import annotations

from pathlib import Path

SAMPLES = Path(__file__).parents[1] / "tasks" / "benchmarks" / "samples"


def sample(name: str) -> str:
    """The file of a benchmark."""
    return str(SAMPLES / f"{name}.jsonl")
