"""The sinks, each read back by its own tool; one that fails harms nothing."""

from __future__ import annotations

import json
import logging
import math
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from ludus.config.load import check_specs, load_config
from ludus.core.errors import ConfigError
from ludus.telemetry.metrics import MetricsLog
from ludus.telemetry.sinks import SINKS, build_sinks


def run_with(tmp_path: Path, *sinks: Any) -> MetricsLog:
    config = load_config(
        {"model": {"path": "x"}, "tasks": {"train": "x"}, "metrics": list(sinks), "seed": 7}
    )
    run_dir = tmp_path / "run-1"
    run_dir.mkdir(parents=True, exist_ok=True)
    check_specs(config, {"metrics": SINKS})
    return MetricsLog(run_dir / "metrics.jsonl", build_sinks(config, run_dir))


# TensorBoard


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def test_tensorboard_reads_its_files(tmp_path):
    with run_with(tmp_path, "tensorboard") as metrics:
        for step in range(3):
            metrics.log("sft", step, {"train/loss": 1.5 - step})
        metrics.log("rl", 0, {"rollout/success": 0.5, "train/loss": math.nan})
    folder = tmp_path / "run-1" / "tensorboard"
    assert scalars(folder / "sft", "train/loss") == [(0, 1.5), (1, 0.5), (2, -0.5)]
    assert scalars(folder / "rl", "rollout/success") == [(0, 0.5)]
    with pytest.raises(KeyError):
        scalars(folder / "rl", "train/loss")


def test_tensorboard_forgets_what_is_done_again(tmp_path):
    with run_with(tmp_path, "tensorboard") as metrics:
        for step in range(5):
            metrics.log("rl", step, {"x/y": step})
    with run_with(tmp_path, "tensorboard") as metrics:
        metrics.rewind({"rl": 1})
        metrics.log("rl", 2, {"x/y": 20})
    folder = tmp_path / "run-1" / "tensorboard" / "rl"
    assert scalars(folder, "x/y") == [(0, 0), (1, 1), (2, 20)]


# Weights & Biases


def records(file: Path) -> list[Any]:
    """The records of an offline run's file: a LevelDB log of protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, found, place, part = file.read_bytes(), [], 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        part += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            found.append(Record.FromString(part))
            part = b""
    return found


def finished(file: Path) -> list[Any]:
    """All records: wandb's service still writes when `finish` has returned."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = records(file)
        if any(record.HasField("exit") for record in found):
            return found
        time.sleep(0.05)
    raise AssertionError(f"{file} was not finished")


@pytest.mark.slow
def test_wandb_keeps_an_offline_run(tmp_path):
    with run_with(tmp_path, {"name": "wandb", "args": {"project": "p", "tags": ["t"]}}) as metrics:
        metrics.log("rl", 0, {"rollout/success": 0.25})
        metrics.log("rl", 1, {"rollout/success": 0.5, "train/loss": math.inf})
        assert [sink.error for sink in metrics.sinks] == [None]
    (file,) = (tmp_path / "run-1" / "wandb").glob("offline-run-*/run-*.wandb")
    found = finished(file)
    history = [
        {
            "/".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in r.history.item
        }
        for r in found
        if r.HasField("history")
    ]
    assert [{k: v for k, v in row.items() if k.startswith("rl/")} for row in history] == [
        {"rl/step": 0, "rl/rollout/success": 0.25},
        {"rl/step": 1, "rl/rollout/success": 0.5},
    ]
    (run,) = [record.run for record in found if record.HasField("run")]
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert (run.project, run.display_name, list(run.tags)) == ("p", "run-1", ["t"])
    assert config["seed"] == 7
    axes = {r.metric.name: r.metric.step_metric for r in found if r.HasField("metric")}
    assert axes["rl/rollout/success"] == "rl/step"


@pytest.mark.slow
def test_wandb_goes_on_under_the_same_id(tmp_path):
    for step in range(2):
        with run_with(tmp_path, "wandb") as metrics:
            metrics.log("rl", step, {"x/y": 0})
    with run_with(tmp_path / "elsewhere", "wandb"):
        pass
    files = (tmp_path / "run-1" / "wandb").glob("offline-run-*/run-*.wandb")
    (other,) = (tmp_path / "elsewhere" / "run-1" / "wandb").glob("offline-run-*/run-*.wandb")
    ids = {file.stem for file in files}
    assert len(ids) == 1
    assert other.stem not in ids


# Prometheus


def scrape(metrics: MetricsLog) -> str:
    port = metrics.sinks[0].sink.port  # type: ignore[union-attr]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


def test_prometheus_is_scraped(tmp_path):
    sink = {"name": "prometheus", "args": {"port": 0}}
    with run_with(tmp_path, sink) as metrics:
        metrics.log("rl", 3, {"rollout/success": 0.25, "evaluate/pass@4": 1})
        metrics.log("rl", 4, {"rollout/success": 0.5, "train/loss": math.nan})
        text = scrape(metrics)
        assert 'ludus_rollout_success{run="run-1",stage="rl"} 0.5\n' in text
        assert 'ludus_evaluate_pass_4{run="run-1",stage="rl"} 1.0\n' in text
        assert 'ludus_step{run="run-1",stage="rl"} 4.0\n' in text
        assert "train_loss" not in text
        metrics.rewind({"rl": 0})
        assert "rl" not in scrape(metrics).replace("# TYPE", "")


def test_prometheus_frees_its_port(tmp_path):
    with run_with(tmp_path, {"name": "prometheus", "args": {"port": 0}}) as metrics:
        port = metrics.sinks[0].sink.port  # type: ignore[union-attr]
    with socket.create_server(("127.0.0.1", port)):
        pass


# Failures


def test_a_sink_that_fails_is_switched_off_and_told_once(tmp_path, caplog):
    (tmp_path / "run-1").mkdir()
    (tmp_path / "run-1" / "tensorboard").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING), run_with(tmp_path, "tensorboard") as metrics:
        for step in range(3):
            metrics.log("rl", step, {"x/y": step})
        (sink,) = metrics.sinks
        assert sink.num_lost == 3
        assert sink.error is not None
        assert sink.error.startswith(("FileExistsError", "NotADirectoryError"))
    assert [line.step for line in MetricsLog.read(tmp_path / "run-1" / "metrics.jsonl")] == [
        0,
        1,
        2,
    ]
    told = [record for record in caplog.records if "is disabled" in record.message]
    assert len(told) == 1
    assert told[0].fields["sink"] == "tensorboard (metrics.0)"  # type: ignore[attr-defined]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_tensorboard_does_not_stop_the_run(tmp_path, monkeypatch):
    from ludus.telemetry.sinks.tensorboard import TensorBoard

    with run_with(tmp_path, "tensorboard") as metrics:
        metrics.log("rl", 0, {"x/y": 0})
        sink = metrics.sinks[0].sink
        assert isinstance(sink, TensorBoard)
        (file,) = sink.folder.rglob("events.*")
        sink.close()
        file.unlink()
        monkeypatch.setattr(sink, "_name", lambda now: "events.full")
        (sink.folder / "rl" / "events.full").symlink_to("/dev/full")
        metrics.log("rl", 1, {"x/y": 1})
        metrics.log("rl", 2, {"x/y": 2})
        assert metrics.sinks[0].error == "OSError: [Errno 28] No space left on device"
        assert metrics.sinks[0].num_lost == 2
    assert len(MetricsLog.read(tmp_path / "run-1" / "metrics.jsonl")) == 3


def test_a_taken_port_does_not_stop_the_run(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        args = {"port": taken.getsockname()[1]}
        with run_with(tmp_path, {"name": "prometheus", "args": args}) as metrics:
            metrics.log("rl", 0, {"x/y": 0})
            assert metrics.sinks[0].error == "OSError: [Errno 98] Address already in use"
            assert metrics.sinks[0].num_lost == 1


def test_a_misconfigured_sink_stops_the_run_before_it_begins(tmp_path):
    with pytest.raises(ConfigError) as caught:
        run_with(tmp_path, "tensorboard", {"name": "prometheus", "args": {"port": 99999}}, "wanb")
    assert str(caught.value).splitlines() == [
        "metrics.1.args.port must be a whole number >= 0 and <= 65535, got 99999",
        "metrics.2.name: 'wanb' is not a known metrics sink (did you mean wandb?)",
    ]
