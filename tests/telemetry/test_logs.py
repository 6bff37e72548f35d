"""Structured logs: what people see, what machines read, and what a bad setting is told."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.live import Live

from ludus.core.errors import ConfigError, LudusError
from ludus.telemetry import logs
from ludus.telemetry.logs import get_logger, setup_logging, shutdown_logging

log = get_logger("ludus.test")


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("LOG_LEVEL", "LOG_FORMAT", "TRANSFORMERS_VERBOSITY"):
        monkeypatch.delenv(name, raising=False)
    levels = {name: logging.getLogger(name).level for name in ("ludus", *logs.NOISY)}
    yield
    shutdown_logging()
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_file_has_one_json_line_an_event(tmp_path):
    setup_logging(tmp_path)
    log.info("step done", step=3, success=0.4)
    log.bind(run="r").warning("odd", nested={"a": [1, None, float("nan")]}, level="field")
    first, second = events(tmp_path / "log.jsonl")
    assert list(first) == ["time", "level", "logger", "event", "step", "success"]
    assert (first["level"], first["logger"], first["event"]) == ("info", "ludus.test", "step done")
    assert (first["step"], first["success"]) == (3, 0.4)
    assert first["time"].endswith("+00:00")
    assert second["nested"] == {"a": [1, None, "NaN"]}
    assert (second["run"], second["level"], second["level_"]) == ("r", "warning", "field")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full: a disk that is full")
def test_a_full_disk_ends_no_run_through_its_log(tmp_path, capsys):
    (tmp_path / "log.jsonl").symlink_to("/dev/full")
    setup_logging(tmp_path)
    log.error("the disk is full")
    setup_logging()
    assert capsys.readouterr().err.count("the disk is full") == 1


def test_an_exception_keeps_its_traceback(tmp_path):
    setup_logging(tmp_path)
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        log.exception("failed", exception="mine")
    (line,) = events(tmp_path / "log.jsonl")
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("RuntimeError: broken")
    assert line["exception_"] == "mine"


FIELD = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()


@given(st.dictionaries(st.text(min_size=1), FIELD | st.lists(FIELD), max_size=4))
def test_any_field_becomes_one_line_of_valid_json(fields):
    record = logging.makeLogRecord({"msg": "e", "name": "n", "levelname": "INFO", "fields": fields})
    line = logs.JsonFormatter().format(record)
    line.encode()
    assert "\n" not in line
    assert json.loads(line, parse_constant=lambda name: pytest.fail(name))["event"] == "e"


@given(st.dictionaries(st.just("key"), FIELD))
def test_no_field_can_move_the_cursor(fields):
    record = logging.makeLogRecord({"msg": "e", "fields": fields})
    assert logs.HumanFormatter("%(message)s").format(record).isprintable()


def test_plain_lines_where_there_is_no_terminal(capsys):
    setup_logging()
    log.info("step done", step=3, success=0.123456, text="a b", empty="")
    log.debug("unseen")
    line = capsys.readouterr().err
    assert re.fullmatch(r"\d{4}-\d\d-\d\d [\d:,]{12} .*\n", line)
    assert line[24:] == "INFO    step done step=3 success=0.1235 text='a b' empty=''\n"


def test_json_on_request(capsys, monkeypatch):
    monkeypatch.setenv("LOG_FORMAT", "JSON")
    setup_logging()
    log.info("step done", step=3)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert json.loads(captured.err)["step"] == 3


def test_a_terminal_gets_no_markup_from_events():
    screen = io.StringIO()
    setup_logging(console=Console(file=screen, width=100, force_terminal=True, color_system=None))
    log.info("said [bold]this[/bold]", answer="\x1b[31mred", step=3)
    text = screen.getvalue()
    assert "said [bold]this[/bold] answer='\\x1b[31mred' step=3" in text
    assert "\x1b[31m" not in text


@pytest.mark.parametrize("style", ["human", "json"])
def test_a_live_display_is_not_torn(style, monkeypatch):
    monkeypatch.setenv("LOG_FORMAT", style)
    screen = io.StringIO()
    console = Console(file=screen, width=60, force_terminal=True, color_system=None)
    setup_logging(console=console)
    with Live("BAR", console=console, auto_refresh=False) as live:
        live.refresh()
        log.warning("an episode was tried again", task="x" * 80)
    before = screen.getvalue().partition("an episode was tried again")[0]
    assert before.count("BAR") > 0
    assert before.rfind("\x1b[2K") > before.rfind("BAR"), "the bar is erased first"
    if style == "json":
        line = next(line for line in screen.getvalue().splitlines() if "tried again" in line)
        assert json.loads(line[line.index("{") :])["task"] == "x" * 80, "nothing breaks a line"


def test_log_level_rules_the_screen_and_info_the_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LOG_LEVEL", "error")
    setup_logging(tmp_path)
    log.info("quiet")
    log.error("loud")
    assert "quiet" not in capsys.readouterr().err
    assert [line["event"] for line in events(tmp_path / "log.jsonl")] == ["quiet", "loud"]
    monkeypatch.setenv("LOG_LEVEL", "Debug")
    setup_logging(tmp_path)
    log.debug("detail")
    assert "detail" in capsys.readouterr().err
    assert [line["event"] for line in events(tmp_path / "log.jsonl")][2:] == ["detail"]


def test_a_detail_is_in_the_file_alone(tmp_path, capsys):
    setup_logging(tmp_path)
    get_logger("ludus.here").detail("one process plays all episodes", reason="few")
    assert capsys.readouterr().err == ""
    [event] = events(tmp_path / "log.jsonl")
    assert (event["level"], event["reason"]) == ("info", "few")


def test_other_packages_are_heard_only_when_something_is_wrong(tmp_path, monkeypatch):
    monkeypatch.setenv("LOG_LEVEL", "debug")
    setup_logging(tmp_path)
    for name in ("httpx", "absl", "somebody.else"):
        logging.getLogger(name).info("chatter of %s", name)
        logging.getLogger(name).warning("worry of %s", name)
    assert [line["event"] for line in events(tmp_path / "log.jsonl")] == [
        "worry of httpx",
        "worry of absl",
        "worry of somebody.else",
    ]


def test_setting_up_again_replaces_what_was(tmp_path, capsys):
    setup_logging(tmp_path / "one")
    setup_logging(tmp_path / "two")
    log.info("once")
    assert capsys.readouterr().err.count("once") == 1
    assert events(tmp_path / "one" / "log.jsonl") == []
    assert len(events(tmp_path / "two" / "log.jsonl")) == 1


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (
            "LOG_LEVEL",
            "inof",
            "LOG_LEVEL must be one of debug, info, warning, error, critical, got 'inof' "
            "(did you mean info?)",
        ),
        (
            "LOG_LEVEL",
            "3",
            "LOG_LEVEL must be one of debug, info, warning, error, critical, got '3'",
        ),
        ("LOG_FORMAT", "xml", "LOG_FORMAT must be one of human, json, got 'xml'"),
    ],
)
def test_a_bad_setting_is_told_exactly(monkeypatch, variable, value, message):
    monkeypatch.setenv(variable, value)
    before = list(logging.getLogger().handlers)
    with pytest.raises(ConfigError) as caught:
        setup_logging()
    assert str(caught.value) == message
    assert logging.getLogger().handlers == before


def test_a_log_file_that_cannot_be_opened_is_told(tmp_path):
    (tmp_path / "log.jsonl").mkdir()
    with pytest.raises(LudusError) as caught:
        setup_logging(tmp_path)
    assert str(caught.value) == f"{tmp_path}/log.jsonl: the log cannot be opened: Is a directory"


def test_stderr_that_is_redirected_later_is_followed_by_a_new_set_up(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    setup_logging()
    log.info("here")
    assert "here" in screen.getvalue()
