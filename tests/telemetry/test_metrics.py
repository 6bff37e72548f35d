"""The JSON lines: whole, valid, rewound exactly; and what happens when they cannot be written."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.core.errors import DataError, LudusError
from ludus.telemetry.metrics import Line, MetricsLog


def test_a_line_a_step(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    with MetricsLog(path) as metrics:
        metrics.log("sft", 0, {"train/loss": 1.5, "train/tokens": 7})
        metrics.log("evaluate/sft", 0, {"evaluate/pass@4": 0.25})
    first, second = path.read_text().splitlines()
    line = json.loads(first)
    assert list(line) == ["stage", "step", "time", "train/loss", "train/tokens"]
    assert (line["stage"], line["step"], line["train/loss"], line["train/tokens"]) == (
        "sft",
        0,
        1.5,
        7,
    )
    assert json.loads(second)["stage"] == "evaluate/sft"
    assert [(row.stage, row.metrics) for row in MetricsLog.read(path)] == [
        ("sft", {"train/loss": 1.5, "train/tokens": 7}),
        ("evaluate/sft", {"evaluate/pass@4": 0.25}),
    ]


@given(st.dictionaries(st.sampled_from(["a/b", "c/d", "e"]), st.floats() | st.integers(-9, 9)))
def test_every_number_is_valid_json_and_comes_back(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    with MetricsLog(path) as metrics:
        metrics.log("rl", 1, values)

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    (line,) = MetricsLog.read(path)
    assert line.metrics.keys() == values.keys()
    for name, value in values.items():
        assert line.metrics[name] == value or (math.isnan(value) and math.isnan(line.metrics[name]))


def test_rewind_keeps_what_came_before_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as metrics:
        for stage, steps in (("sft", 3), ("evaluate/sft", 1), ("rl", 4)):
            for step in range(steps):
                metrics.log(stage, step, {"x": step})
        metrics.rewind({"sft": 9, "rl": 1})
        metrics.log("rl", 2, {"x": 20})
    assert [(line.stage, line.step, line.metrics["x"]) for line in MetricsLog.read(path)] == [
        ("sft", 0, 0),
        ("sft", 1, 1),
        ("sft", 2, 2),
        ("rl", 0, 0),
        ("rl", 1, 1),
        ("rl", 2, 20),
    ]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_rewind_leaves_the_kept_bytes_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as metrics:
        metrics.log("rl", 0, {"x": 0.1})
        before = path.read_bytes()
        metrics.log("rl", 1, {"x": float("nan")})
        metrics.rewind({"rl": 0})
    assert path.read_bytes() == before


def test_a_torn_last_line_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as metrics:
        metrics.log("rl", 0, {"x": 1})
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:20])
    assert [line.step for line in MetricsLog.read(path)] == [0]
    with MetricsLog(path) as metrics:
        assert path.read_bytes() == whole
        metrics.log("rl", 1, {"x": 2})
    assert [line.step for line in MetricsLog.read(path)] == [0, 1]


def test_a_process_that_is_killed_leaves_whole_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    code = (
        "import sys\nfrom ludus.telemetry.metrics import MetricsLog\n"
        "metrics = MetricsLog(sys.argv[1])\nstep = 0\n"
        "while True:\n    metrics.log('rl', step, {'x/y': step})\n    step += 1\n"
        "    if step == 50: print('going', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "going\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    with MetricsLog(path):
        pass
    steps = [line.step for line in MetricsLog.read(path)]
    assert steps == list(range(len(steps)))
    assert len(steps) >= 50


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_stops_the_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    with MetricsLog(path) as metrics, pytest.raises(LudusError) as caught:
        metrics.log("rl", 0, {"x": 1})
    assert str(caught.value) == (f"{path}: the metrics cannot be written: No space left on device")


def test_a_line_that_does_not_fit_leaves_the_file_whole(tmp_path):
    """The limit on the file's size is the disk that fills in the middle of a line."""
    path = tmp_path / "metrics.jsonl"
    code = (
        "import resource, signal, sys\nfrom ludus.core.errors import LudusError\n"
        "from ludus.telemetry.metrics import MetricsLog\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "metrics = MetricsLog(sys.argv[1])\n"
        "try:\n    for step in range(100): metrics.log('rl', step, {'x/y': step})\n"
        "except LudusError as error: print(error)\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{path}: the metrics cannot be written: File too large\n"
    assert path.read_bytes().endswith(b"\n")
    assert len(MetricsLog.read(path)) > 5


@pytest.mark.parametrize(
    ("stage", "step", "metrics", "message"),
    [
        ("rl", 0, {"a b": 1}, "'a b' is not a metric name: write a name like rollout/success"),
        ("rl", 0, {"/a": 1}, "'/a' is not a metric name: write a name like rollout/success"),
        ("rl", 0, {"step": 1}, "'step' is not a metric name: write a name like rollout/success"),
        ("rl", 0, {"a": "1"}, "metric a must be a number, got '1'"),
        ("rl", 0, {"a": None}, "metric a must be a number, got None"),
        ("rl", 0, {"a": True}, "metric a must be a number, got True"),
        ("r l", 0, {}, "'r l' is not a stage name: write a name like rl or evaluate/rl"),
        ("rl", -1, {}, "the step of rl must be a whole number >= 0, got -1"),
        ("rl", 1.0, {}, "the step of rl must be a whole number >= 0, got 1.0"),
    ],
)
def test_what_is_no_metric_is_refused(tmp_path, stage, step, metrics, message):
    expected = pytest.raises(ValueError, match=f"^{re.escape(message)}$")
    with MetricsLog(tmp_path / "m.jsonl") as log, expected:
        log.log(stage, step, metrics)
    assert (tmp_path / "m.jsonl").read_bytes() == b""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nonsense", "Expecting value: line 1 column 1 (char 0)"),
        ('{"stage": "rl", "time": 0}', "'step' is missing"),
        ("5", "it is no JSON object"),
        ('{"stage": 7, "step": 0, "time": 0}', "'stage' is 7, not a text"),
        ('{"stage": "rl", "step": "0", "time": 0}', "'step' is '0', not a whole number"),
        ('{"stage": "rl", "step": true, "time": 0}', "'step' is True, not a whole number"),
        ('{"stage": "rl", "step": 0, "time": null}', "'time' is None, not a number"),
        ('{"stage": "rl", "step": 0, "time": 0, "x": [1]}', "'x' is [1], not a number"),
        ('{"stage": "rl", "step": 0, "time": 0, "x": ' + "[" * 100_000, "maximum recursion"),
    ],
)
def test_a_malformed_line_is_told_with_its_number(tmp_path, text, reason):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"stage": "rl", "step": 0, "time": 0}\n' + text + "\n")
    with pytest.raises(DataError) as caught:
        MetricsLog.read(path)
    assert str(caught.value).startswith(f"{path}: line 2 is not a line of metrics: {reason}")
    assert str(caught.value).endswith("; remove that line")


def test_a_carriage_return_ends_no_line(tmp_path):
    """An editor that writes `\\r\\n` loses nothing, and one in mid-line is told."""
    path = tmp_path / "metrics.jsonl"
    line = '{"stage": "rl", "step": %d, "time": 0}'
    path.write_text("".join(line % step + "\r\n" for step in range(3)), newline="")
    assert [line.step for line in MetricsLog.read(path)] == [0, 1, 2]
    path.write_text(line % 0 + "\r" + line % 1 + "\n" + line % 2 + "\n", newline="")
    with pytest.raises(DataError, match="line 1 is not a line of metrics: Extra data"):
        MetricsLog.read(path)


def test_a_pipe_is_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    os.mkfifo(path)
    with pytest.raises(DataError, match="the metrics cannot be read: not a regular file"):
        MetricsLog.read(path)


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(DataError) as caught:
        MetricsLog.read(tmp_path / "metrics.jsonl")
    assert str(caught.value) == (
        f"{tmp_path}/metrics.jsonl: the metrics cannot be read: No such file or directory"
    )


def test_lines_compare_by_value():
    assert Line("rl", 0, 0.0, {"x": 1}) == Line("rl", 0, 0.0, {"x": 1})
