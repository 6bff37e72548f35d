"""Averages, thresholds and tables of benchmark results, by hand."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from ludus.core.errors import ConfigError
from ludus.core.types import Group, Status, Task, Trajectory
from ludus.evaluate import summarise
from ludus.evaluate.benchmark_tables import render_report, short_names
from ludus.evaluate.benchmarks import (
    THRESHOLDS,
    BenchmarkReport,
    BenchmarkResult,
    Threshold,
    average,
    make_report,
    num_truncated,
    read_thresholds,
)
from ludus.tasks.benchmarks import BENCHMARKS


def groups(rows: Sequence[str]) -> list[Group]:
    """A group a text: 1 right, 0 wrong, x unscorable, t truncated and wrong."""
    status = {"x": Status.UNSCORABLE, "t": Status.TRUNCATED_LENGTH}
    return [
        Group(
            f"g{i}",
            Task(id=f"q{i}"),
            [
                Trajectory(
                    f"t{i}-{j}",
                    f"g{i}",
                    f"q{i}",
                    status=status.get(mark, Status.COMPLETED),
                    reward=None if mark == "x" else float(mark == "1"),
                    error="math-verify cannot read it" if mark == "x" else None,
                )
                for j, mark in enumerate(row)
            ],
        )
        for i, row in enumerate(rows)
    ]


def result(model: str, benchmark: str, *rows: str) -> BenchmarkResult:
    played = groups(rows)
    return BenchmarkResult(
        model=model,
        benchmark=benchmark,
        source="file.jsonl",
        num_rows=BENCHMARKS[benchmark].size,
        num_truncated=num_truncated(played),
        evaluation=summarise(played, temperature=0.7) if rows else None,
        failure="" if rows else "nothing to evaluate",
    )


def report(*results: BenchmarkResult, thresholds: Sequence[Threshold] = ()) -> BenchmarkReport:
    models = list(dict.fromkeys(r.model for r in results))
    benchmarks = list(dict.fromkeys(r.benchmark for r in results))
    return make_report("0", models, benchmarks, results, thresholds)


def shown(made: BenchmarkReport) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render_report(made))
    return console.export_text()


def test_mean_and_pass_at_k() -> None:
    """Four answers each: 4, 2 and 0 right. pass@4: 2 of 3; pass@2: (1 + 5/6 + 0) / 3."""
    made = result("m", "amc", "1111", "1100", "0000")
    assert made.mean is not None
    assert made.mean.value == pytest.approx(0.5)
    assert made.best is not None
    assert made.best.value == pytest.approx(2 / 3)
    assert made.evaluation is not None
    assert made.evaluation.pass_at[2].value == pytest.approx((1 + 5 / 6) / 3)
    assert result("m", "amc", "1", "0").best is None, "pass@1 is the mean"


def test_truncated_and_unscorable_answers_are_told() -> None:
    made = report(result("m", "amc", "1t", "0x"))
    text = shown(made)
    assert "1 of 4 answers left out (1 unscorable: math-verify cannot read it)" in text
    assert "the mean would be 25.0 % had all of them been wrong, 50.0 % had all been right" in text
    assert "amc, m: 1 of 4 answers truncated" in text
    row = next(line for line in text.splitlines() if line.strip().startswith("amc  "))
    assert row.split()[:5] == ["amc", "2/40", "2", "25.0", "%"]


def test_average_and_change() -> None:
    made = report(
        result("start", "gsm8k", "1", "0", "0", "0"),
        result("start", "amc", "10", "00"),
        result("last", "gsm8k", "1", "1", "1", "0"),
        result("last", "amc", "11", "00"),
    )
    assert made.averages == {"start": pytest.approx(0.25), "last": pytest.approx(0.625)}
    assert made.changes["gsm8k"].value == pytest.approx(0.5)
    text = shown(made)
    assert "last - start" in text
    assert "+50.0" in text
    assert text.rstrip().splitlines()[-1].split() == ["average", "25.0", "%", "62.5", "%"]


def test_no_average_without_all_results() -> None:
    made = report(result("m", "gsm8k", "1"), result("m", "amc"))
    assert made.averages == {"m": None}
    assert not made.passed, "a benchmark without a result"
    assert "nothing scored: nothing to evaluate" in shown(made)
    assert average([]) is None


def test_thresholds_hold_for_the_last_model() -> None:
    half = Threshold(benchmark="gsm8k", percent=50)
    results = [result("a", "gsm8k", "0", "0"), result("b", "gsm8k", "1", "0")]
    assert report(*results, thresholds=[half]).passed, "50 is not below 50"
    made = report(*results, thresholds=[half.model_copy(update={"percent": 50.1})])
    assert not made.passed
    text = shown(made)
    assert "thresholds of b" in text
    assert text.rstrip().splitlines()[-1].split()[:3] == ["gsm8k", "50.0", "%"]
    assert text.rstrip().splitlines()[-1].split()[-3:] == ["50.1", "%", "below"]


def test_answers_left_out_do_not_reach_a_threshold() -> None:
    """One of the two scored answers is right, and one of four with those left out as wrong."""
    made = report(
        result("m", "gsm8k", "1", "0", "x", "x"),
        thresholds=[Threshold(benchmark="gsm8k", percent=50)],
    )
    assert not made.passed
    assert "below (25.0 % with those left out as wrong)" in shown(made)
    (check,) = made.checks
    assert check.model_copy(update={"threshold": Threshold(benchmark="gsm8k", percent=25)}).passed


def test_a_report_is_read_back() -> None:
    made = report(result("m", "amc", "1t", "0x"))
    assert BenchmarkReport.model_validate_json(made.model_dump_json()) == made


def test_thresholds_are_read(tmp_path: Path) -> None:
    file = tmp_path / "least.yaml"
    file.write_text("gsm8k: 89\namc: 52.5\n")
    read = read_thresholds(["math-500=78"], str(file), ["gsm8k", "amc", "math-500"])
    assert {t.benchmark: t.percent for t in read} == {"math-500": 78, "gsm8k": 89, "amc": 52.5}
    named = read_thresholds([], "agent0-8b", list(BENCHMARKS))
    assert {t.benchmark: t.percent for t in named} == THRESHOLDS["agent0-8b"]


@pytest.mark.parametrize(
    ("pairs", "named", "said"),
    [
        (["gsm8k"], None, "write NAME=PERCENT"),
        (["gsm8=5"], None, r"'gsm8' is not played \(did you mean gsm8k\?\)"),
        (["gsm8k=high"], None, "a threshold is a percentage above 0, at most 100: 'high'"),
        (["gsm8k=101"], None, "at most 100: 101"),
        (["gsm8k=-1"], None, "above 0"),
        (["gsm8k=.nan"], None, "above 0"),
        (["gsm8k=0.78"], None, "0.78 is below 1 %: write 78 for 78 %"),
        (["gsm8k=7", "gsm8k=8"], None, "gsm8k has another threshold"),
        ([], "agent0-8b", "'math-500' is not played"),
        ([], "agent0", r"neither a file .* nor a named set \(did you mean agent0-8b\?\)"),
    ],
)
def test_wrong_thresholds(pairs: list[str], named: str | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_thresholds(pairs, named, ["gsm8k", "amc"])


def test_a_wrong_file_of_thresholds(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text("- gsm8k\n")
    with pytest.raises(ConfigError, match=r"t\.yaml: write a line `NAME: PERCENT`"):
        read_thresholds([], str(tmp_path / "t.yaml"), ["gsm8k"])


def test_short_names() -> None:
    names = ["models/start", "models/executor-1/", "a/x", "b/x", "org/m@http://h/v1"]
    assert list(short_names(names).values()) == ["start", "executor-1", "a/x", "b/x", "org/m"]
