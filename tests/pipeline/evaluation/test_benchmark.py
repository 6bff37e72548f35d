"""Benchmarks are played with the model of an endpoint: real HTTP, answers of the test's own."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from benchmark_samples import sample
from chat_server import Answer, ChatServer, call, num_turns, text
from starlette.responses import JSONResponse
from typer.testing import CliRunner

from ludus.cli import app
from ludus.config.load import load_config
from ludus.core.errors import DataError, LudusError
from ludus.data.splits import read_splits
from ludus.evaluate.benchmarks import BenchmarkReport
from ludus.tasks.benchmarks import BENCHMARKS
from ludus.tasks.benchmarks.reader import benchmark_tasks

RIGHT = {
    "math": "So it is $\\boxed{%s}$.",
    "choice": "I think the answer is (%s).",
    "bbeh": "Sorted. The answer is: %s",
}


def answers(*names: str) -> dict[str, str]:
    """The right answers to the samples' prompts, as a model may write them."""
    return {
        task.prompt[0].content: RIGHT[BENCHMARKS[name].judge.name] % task.answer.strip("$")
        for name in names
        for task in benchmark_tasks(name, sample(name))
    }


def asked(body: dict[str, Any]) -> str:
    return str(body["messages"][-1]["content"])


class Ended(NamedTuple):
    exit_code: int
    output: str


def play(*argv: object) -> Ended:
    """`ludus benchmark ARGV`, with the words and the exit code of `main`."""
    done = CliRunner().invoke(app, ["benchmark", *map(str, argv)], env={"COLUMNS": "250"})
    if isinstance(done.exception, LudusError):
        return Ended(done.exception.exit_code, f"{done.output}ludus: {done.exception}\n")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Ended(done.exit_code, done.output)


def data(*names: str) -> list[str]:
    return [arg for name in names for arg in ("--data", f"{name}={sample(name)}")]


def test_right_answers_of_all_benchmarks_score_1(tmp_path: Path) -> None:
    known = answers(*BENCHMARKS)
    names = list(BENCHMARKS)
    with ChatServer(lambda body: text(known.get(asked(body), "Hello"))) as server:
        done = play(
            f"m@{server.url}", "--on", ",".join(names), *data(*names), "--samples", 1,
            "--json", tmp_path / "r.json", "--out", tmp_path / "out.jsonl",
        )  # fmt: skip
    assert done.exit_code == 0, done.output
    report = BenchmarkReport.model_validate_json((tmp_path / "r.json").read_text())
    assert {r.benchmark: r.mean and r.mean.value for r in report.results} == dict.fromkeys(names, 1)
    assert report.averages == {f"m@{server.url}": 1.0}
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert Counter(row["task_id"].partition(":")[0] for row in rows) == {
        name: len(benchmark_tasks(name, sample(name))) for name in names
    }


def test_mean_and_pass_at_k_of_sampled_answers(tmp_path: Path) -> None:
    """Right answers to the three questions: 4, 2 and 0 of 4."""
    known = list(answers("gsm8k").items())
    counts: Counter[str] = Counter()

    def say(body: dict[str, Any]) -> Answer:
        for number, (prompt, right) in enumerate(known):
            if asked(body) == prompt:
                counts[prompt] += 1
                return text(right if counts[prompt] <= 4 - 2 * number else "\\boxed{-1}")
        return text("Hello")

    with ChatServer(say) as server:
        done = play(
            f"m@{server.url}", "--on", "gsm8k", *data("gsm8k"), "--samples", 4,
            "--temperature", 0.7, "--json", tmp_path / "r.json", "--threshold", "gsm8k=50",
        )  # fmt: skip
        assert done.exit_code == 0, done.output
        assert {body["temperature"] for body in server.bodies[1:]} == {0.7}
        below = play(f"m@{server.url}", "--on", "gsm8k", *data("gsm8k"), "--threshold", "gsm8k=50")
    (result,) = json.loads((tmp_path / "r.json").read_text())["results"]
    assert result["evaluation"]["success"]["value"] == pytest.approx(0.5)
    assert result["evaluation"]["pass_at"]["4"]["value"] == pytest.approx(2 / 3)
    assert re.search(r"gsm8k +3 +4 ", done.output), "the counts are those of the file"
    assert result["num_rows"] == 3
    assert "66.7 %" in done.output
    assert below.exit_code == 1, "all answers are wrong by now"
    assert below.output.rstrip().splitlines()[-1].split()[-3:] == ["50", "%", "below"]


def test_several_models_are_compared_and_drawn(tmp_path: Path) -> None:
    known = answers("gsm8k", "amc")

    def say(body: dict[str, Any]) -> Answer:
        right = body["model"] == "last" or asked(body).startswith("Mara")
        return text(known.get(asked(body), "Hello") if right else "\\boxed{-1}")

    with ChatServer(say) as server:
        models = [f"{name}@{server.url}" for name in ("first", "last")]
        files = "--json", tmp_path / "r.json", "--plot", tmp_path / "c.svg"
        done = play(*models, "--on", "gsm8k,amc", *data("gsm8k", "amc"), "--samples", 1, *files)
        assert done.exit_code == 0, done.output
        twice = play(models[0], models[0], "--on", "amc", *data("amc"))
    assert twice.exit_code == 2
    assert "is named twice" in twice.output
    report = BenchmarkReport.model_validate_json((tmp_path / "r.json").read_text())
    assert report.averages[models[0]] == pytest.approx(1 / 6)
    assert report.averages[models[1]] == 1.0
    assert report.changes["gsm8k"].value == pytest.approx(2 / 3)
    svg = ET.fromstring((tmp_path / "c.svg").read_text())
    words = ["".join(node.itertext()) for node in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"gsm8k", "amc", "average"} <= set(words)
    assert len(list(svg.iter("{http://www.w3.org/2000/svg}circle"))) == 4


def test_a_gold_answer_that_math_verify_cannot_read_is_unscorable(tmp_path: Path) -> None:
    rows = [{"problem": "1 + 1?", "answer": "2"}, {"problem": "Prove it.", "answer": "$$"}]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with ChatServer(lambda _: text("\\boxed{2}")) as server:
        argv = f"m@{server.url}", "--on", "math-500", "--data", f"math-500={tmp_path}/m.jsonl"
        done = play(*argv)
        (tmp_path / "m.jsonl").write_text(json.dumps(rows[1]))
        none = play(*argv)
    assert done.exit_code == 0
    assert "1 of 2 answers left out (1 unscorable: " in done.output
    assert "math-verify cannot read its answer '$$'" in done.output
    assert none.exit_code == 1
    assert "nothing scored: nothing to evaluate" in none.output


def test_a_failing_endpoint_keeps_the_other_results(tmp_path: Path) -> None:
    known = answers("amc")

    def say(body: dict[str, Any]) -> Any:
        if "Mara" in asked(body) or "van" in asked(body) or "Ilo" in asked(body):
            return JSONResponse({"error": {"message": "out of memory"}}, 400)
        return text(known.get(asked(body), "Hello"))

    with ChatServer(say) as server:
        done = play(
            f"m@{server.url}", "--on", "gsm8k,amc", *data("gsm8k", "amc"), "--samples", 1,
            "--json", tmp_path / "r.json",
        )  # fmt: skip
    assert done.exit_code == 1
    report = BenchmarkReport.model_validate_json((tmp_path / "r.json").read_text())
    gsm8k, amc = report.results
    assert gsm8k.evaluation is None
    assert "out of memory" in gsm8k.failure
    assert amc.mean is not None
    assert amc.mean.value == 1.0


def test_errors_of_an_endpoint_do_not_steer_the_terminal(tmp_path: Path) -> None:
    """A server's text is untrusted: links, titles, colours and returns are escaped."""
    known, evil = answers("gsm8k"), "\x1b]8;;http://evil\x07L\x9b31m\u202e"

    def say(body: dict[str, Any]) -> Any:
        if len(server.bodies) > 1:
            return JSONResponse({"error": {"message": evil}}, 400)
        return text(known.get(asked(body), "Hello"))

    with ChatServer(say) as server:
        argv = (f"m@{server.url}", "--on", "gsm8k", *data("gsm8k"))
        done = play(*argv)
    assert r"\x1b]8;;http://evil\x07L" in done.output
    assert not set(evil) & set(done.output) & {"\x1b", "\x07", "\x9b", "\u202e"}


def test_tools_of_a_recipe_are_offered(tmp_path: Path) -> None:
    recipe = tmp_path / "tools.yaml"
    recipe.write_text(
        """
model: {architecture: qwen3, tokenizer: bpe}
env: {name: babyai}
tools: [calculator]
rollout: {system_prompt: Calculate., max_tokens_per_turn: 200}
tasks: {train: {name: env, args: {num_tasks: 1}}}
sft: null
"""
    )

    def say(body: dict[str, Any]) -> Answer:
        if "tools" not in body:
            return text("Hello")
        if num_turns(body) == 0:
            return call("calculator", '{"expression": "7 * 12 - 9"}')
        return text(f"\\boxed{{{asked(body)}}}")

    with ChatServer(say) as server:
        done = play(
            f"m@{server.url}", "--on", "gsm8k", *data("gsm8k"), "--num-tasks", 1,
            "--recipe", recipe, "--max-tokens", 300,
        )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "tools: calculator" in done.output
    assert "100.0 %" in done.output
    assert server.bodies[-1]["messages"][0] == {"role": "system", "content": "Calculate."}
    assert (
        server.bodies[-1].get("max_tokens", server.bodies[-1].get("max_completion_tokens")) == 300
    )


def test_broken_rows_are_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "g.jsonl"
    path.write_text(Path(sample("gsm8k")).read_text() + "{broken\n")
    argv = "m@http://127.0.0.1:9/v1", "--on", "gsm8k", "--data", f"gsm8k={path}"
    refused = play(*argv)
    assert refused.exit_code == 1
    assert "1 malformed line (`--on-bad-line skip` skips them): line 4" in refused.output
    known = answers("gsm8k")
    with ChatServer(lambda body: text(known.get(asked(body), "Hello"))) as server:
        done = play(f"m@{server.url}", *argv[1:], "--on-bad-line", "skip", "--json", tmp_path / "r")
    assert done.exit_code == 0
    assert "gsm8k: 1 rows skipped: " in done.output
    assert json.loads((tmp_path / "r").read_text())["results"][0]["num_skipped"] == 1


M = "m@http://127.0.0.1:9/v1"
REFUSED: list[tuple[list[str], str]] = [
    ([], "name a model and benchmarks"),
    ([M], "name a model and benchmarks"),
    ([M, "--on", ","], "--on: name benchmarks"),
    ([M, "--on", "gsm9k"], "'gsm9k' is not a known benchmark (did you mean gsm8k?)"),
    ([M, "--on", "gsm8k,gsm8k"], "gsm8k is named twice"),
    ([M, "--on", "gsm8k", "--data", "gsm8k"], "write NAME=FILE"),
    ([M, "--on", "gsm8k", "--data", "amc=f.jsonl"], "'amc' is not played"),
    ([M, "--on", "amc", "--data", "amc=a", "--data", "amc=b"], "amc has a file already, a"),
    ([M, "--on", "amc", "--threshold", "gsm8k=5"], "'gsm8k' is not played"),
    ([M, "--on", "gsm8k", "--samples", "4"], "gsm8k: --samples: 4 episodes of each task are equal"),
    ([M, "--on", "amc", "--temperature", "0"], "amc: --samples: 32 episodes of each task are equ"),
    ([M, "--on", "amc", "--samples", "0"], "--samples must be"),
    ([M, "--on", "amc", "--temperature", "-1"], "--temperature must be"),
    ([M, "--on", "amc", "--num-tasks", "0"], "--num-tasks must be"),
    ([M, "--on", "amc", "--plot", "c.svg"], "--plot: a curve needs two models"),
    ([M, "--on", "amc", "--json", "absent/r.json"], "there is no folder absent"),
    ([M, "--on", "amc", "--json", "/proc/r.json"], "--json /proc/r.json: cannot be written: "),
    ([M, "--on", "amc", "--json", "r" * 300], "cannot be written: File name too long"),
    ([M, "--on", "amc", "--json", "r", "--out", "r"], "--json r: it is the file of --out, too"),
    ([M, "--on", "amc", "--list"], "--list plays nothing"),
    (["no-such-run", "--on", "amc"], "Hugging Face folder"),
]


@pytest.mark.parametrize(("argv", "said"), REFUSED, ids=range(len(REFUSED)))
def test_wrong_options_are_refused(
    argv: list[str], said: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    done = play(*argv)
    assert said in done.output
    assert done.exit_code == 2, done.output


def test_an_absent_data_set_asks_for_a_file() -> None:
    done = play(M, "--on", "gsm8k")
    assert done.exit_code == 1
    assert "Give a file: --data gsm8k=FILE" in done.output


def test_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "r.json").touch()
    for option in ("--json", "--out"):
        done = play(M, "--on", "amc", *data("amc"), option, tmp_path / "r.json")
        assert done.exit_code == 2
        assert "name a new" in done.output


def test_a_file_of_no_episodes_does_not_stay(tmp_path: Path) -> None:
    """The endpoint is not there: once it is, the same command has to be right."""
    words = (M, "--on", "amc", *data("amc"), "--out", tmp_path / "episodes.jsonl")
    for _ in range(2):
        done = play(*words)
        assert "cannot be reached" in done.output
    assert list(tmp_path.iterdir()) == []


def test_the_list_shows_every_benchmark() -> None:
    done = play("--list")
    for name, row in BENCHMARKS.items():
        assert f"\n{name}\n  source    {row.hub}: {row.size:,} rows\n" in f"\n{done.output}"
    assert done.output.count("mean@32 at temperature 0.7") == 3


def test_a_recipe_holds_a_benchmark_out(tmp_path: Path) -> None:
    """A training task of the same text is refused."""
    (task, *_) = benchmark_tasks("amc", sample("amc"))
    row = {"prompt": task.prompt[0].content, "answer": "9"}
    (tmp_path / "train.jsonl").write_text(json.dumps({**row, "prompt": "2 + 2?"}) + "\n")
    args = {"name": "amc", "path": sample("amc")}
    recipe: dict[str, Any] = {
        "model": {"architecture": "qwen3", "tokenizer": "bpe"},
        "judge": "answer",
        "tasks": {
            "train": {"name": "json", "args": {"path": str(tmp_path / "train.jsonl")}},
            "heldout": {"name": "benchmark", "args": args},
        },
    }
    splits = read_splits(load_config(recipe))
    assert [task.answer for task in splits.heldout] == ["9", "720"]
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match="1 of 2 held-out tasks are training tasks too"):
        read_splits(load_config(recipe))
