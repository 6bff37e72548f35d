"""Log lines of another process, logged again."""

from __future__ import annotations

import json
import logging
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from ludus.telemetry.logs import (
    HumanFormatter,
    JsonFormatter,
    get_logger,
    setup_logging,
    shutdown_logging,
)
from ludus.telemetry.relayed_logs import LogLine, Relay, log_again, relay_logs

log = get_logger("ludus.test")


class Level(int):
    """A number that can be pickled, and not be read back."""

    def __new__(cls, value: int, name: str) -> Level:
        return super().__new__(cls, value)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    shutdown_logging()


def test_records_arrive_with_their_fields_texts_and_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sent: list[bytes] = []
    relay_logs(lambda record: sent.append(pickle.dumps(record)))
    log.warning("retrying", error=ValueError("odd"), attempt=2)
    log.detail("a detail", number=3, text="half \ud800", level=Level(3, "three"))
    log.debug("not of interest")
    extra = {"lock": lambda: None, "level": Level(3, "three"), "fields": "text"}
    logging.getLogger("users").warning("of %s", object, extra=extra)
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        log.exception("failed")
    assert capsys.readouterr().err == ""
    setup_logging(tmp_path)
    for data in sent:
        log_again(pickle.loads(data), rollout_process=8)
    shown = capsys.readouterr().err
    assert "retrying error=odd attempt=2 rollout_process=8" in shown
    assert "a detail" not in shown
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["level"] for line in lines] == ["warning", "info", "warning", "error"]
    assert [line["rollout_process"] for line in lines] == [8] * 4
    assert (lines[1]["number"], lines[1]["text"], lines[1]["level_"]) == (3, "half \\ud800", 3)
    assert (lines[2]["event"], lines[2]["fields"]) == (f"of {object}", "text")
    assert lines[3]["event"] == "failed"
    assert "RuntimeError: broken" in lines[3]["exception"]


def test_half_a_surrogate_pair_in_a_message_is_written_as_its_code() -> None:
    sent: list[LogLine] = []
    relay_logs(sent.append)
    fields = {"key \ud800": 1}
    record = logging.makeLogRecord(
        {"name": "users", "levelno": 30, "msg": "half \ud800", "fields": fields}
    )
    [relay] = [h for h in logging.getLogger().handlers if isinstance(h, Relay)]
    relay.handle(record)  # not by its logger: pytest could not send it between its processes
    assert json.loads(sent[0].attributes)["msg"] == "half \\ud800"
    line = json.loads(JsonFormatter().format(record))
    assert (line["event"], line["key \\ud800"]) == ("half \\ud800", 1)
    assert HumanFormatter("%(message)s").format(record) == "half \\ud800 key \\ud800=1"


def test_filters_of_the_other_process_do_not_count_here(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sent: list[LogLine] = []
    relay_logs(sent.append)
    own = logging.getLogger("users.own")
    own.addFilter(lambda record: bool(record.thing))  # type: ignore[attr-defined]
    own.warning("once", extra={"thing": object()})
    shutdown_logging()
    log_again(sent[0])
    assert caplog.messages[-1] == "once"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_sends_no_lines(capfd: pytest.CaptureFixture[str]) -> None:
    sent: list[LogLine] = []

    def send(line: LogLine) -> None:
        sent.append(line)
        os.write(1, b"sent")

    relay_logs(send)
    pid = os.fork()
    if pid == 0:
        log.warning("of a child")
        log.info("of a child")
        os._exit(0)
    os.waitpid(pid, 0)
    assert capfd.readouterr() == ("", "of a child\n")
    assert not sent


def test_control_characters_of_a_message_do_not_reach_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    setup_logging()
    log.warning("two\nlines \x1b[1m \x00", name_="\x1b")
    shown = capsys.readouterr().err
    assert "two\nlines \\x1b[1m \\x00" in shown
    assert "\x1b" not in shown
