"""Log lines of another process, logged again."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from ludus.telemetry.logs import get_logger, setup_logging, shutdown_logging
from ludus.telemetry.relayed_logs import log_again, relay_logs

log = get_logger("ludus.test")


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
    log.detail("a detail", number=3)
    log.debug("not of interest")
    logging.getLogger("users").warning("of %s", object, extra={"lock": lambda: None})
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
    assert lines[1]["number"] == 3
    assert lines[2]["event"] == f"of {object}"
    assert "RuntimeError: broken" in lines[3]["event"]
