"""Notifications: known URLs, the message, its way to a receiver."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from message_receiver import inbox

from ludus.core.errors import ConfigError, MissingDependency
from ludus.pipeline.monitoring import notify
from ludus.pipeline.monitoring.notify import check_urls, notifying, resolved_urls
from ludus.store import RunStore
from ludus.store.folders import RunFolder
from ludus.telemetry import notifier
from ludus.telemetry.notifier import headline, kind_of, message, send

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of plug-ins of apprise


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("slak://hunter2", r"notify.0: apprise knows no scheme 'slak' \(did you mean slack\?\)"),
        ("slack://hunter2", "notify.0: apprise cannot read this URL of slack"),
        ("json://", "notify.0: apprise cannot read this URL of json"),
        ("qqqqqqqqq://hunter2", "notify.0: apprise knows no scheme 'qqqqqqqqq'$"),
    ],
)
def test_wrong_urls_are_refused(url: str, said: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(ConfigError, match=said) as refused:
        check_urls([url])
    assert "hunter2" not in str(refused.value) + caplog.text


def test_known_urls_pass() -> None:
    check_urls([])
    check_urls(["json://127.0.0.1:80", "mailto://me:pass@example.com", "$ANY", "slack://***"])


def test_the_absent_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(package: str, extra: str, purpose: str) -> None:
        raise MissingDependency(package, extra, purpose)

    monkeypatch.setattr(notify, "require", absent)
    check_urls([])
    with pytest.raises(MissingDependency, match=r"ludus-rl\[notify\]"):
        check_urls(["json://h"])


def test_urls_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    monkeypatch.setenv("TWO", " json://a/x,y  xml://b, json://c ")
    urls = resolved_urls(["json://z", "${TWO}", "slack://***"], notes.append)
    assert urls == ["json://z", "json://a/x,y", "xml://b", "json://c"]
    assert len(notes) == 1
    assert notes[0].startswith("notify.2: slack://*** is masked")
    with pytest.raises(ConfigError, match=r"notify\.0: the environment variable NONE is not set"):
        resolved_urls(["$NONE"], notes.append)
    monkeypatch.setenv("WRONG", "slak://hunter2")
    with pytest.raises(ConfigError, match=r"notify\.0: in WRONG: .* 'slak'") as refused:
        resolved_urls(["$WRONG"], notes.append)
    assert "hunter2" not in str(refused.value)


def lines(*values: dict[str, object]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def test_the_message_has_state_and_numbers(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        lines(
            {"stage": "sft", "step": 1, "time": 1.0, "train/loss": "NaN", "other": 3},
            {"stage": "rl", "step": 0, "time": 1.0, "rollout/success": 0.1},
            {"stage": "rl", "step": 7, "time": 1.0, "rollout/success": 0.25, "budget/cost": 1.5},
            {"stage": "evaluate/after", "step": 0, "time": 1.0, "evaluate/success": 0.5},
        )
        + '{"stage": "rl", "st'
    )
    watched = {"run": "tiny-1", "folder": str(tmp_path), "resume": "ludus train --resume tiny-1"}
    title, text = message(watched, {"state": "completed", "error": None})
    assert title == "ludus: run tiny-1 is complete"
    assert text.splitlines()[1:] == [
        "sft step 2: train/loss nan",
        "rl step 8: rollout/success 0.25, budget/cost 1.5",
        "evaluate/after: evaluate/success 0.5",
    ]
    title, text = message(watched, {"state": "failed", "error": "no space"})
    assert title == "ludus: run tiny-1 failed"
    assert text.splitlines()[1] == "no space"
    assert text.splitlines()[-1] == "resume with: ludus train --resume tiny-1"
    assert "killed, or out of memory" in message(watched, {"state": "died", "error": None})[1]
    assert [kind_of(state) for state in ("completed", "interrupted", "failed", "died")] == [
        "success", "warning", "failure", "failure"
    ]  # fmt: skip


def test_damaged_metrics_give_no_numbers(tmp_path: Path) -> None:
    assert headline(tmp_path / "absent") == []
    (tmp_path / "m").write_bytes(b'[]\n{}\n\xff\n{"stage": 3, "step": 1}\n{"stage": "rl"}\n')
    assert headline(tmp_path / "m") == []


def test_urls_that_fail_are_named_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier, "SEND_S", 30.0)
    with inbox() as good, inbox(status=500) as bad:
        urls = [good.url, bad.url, "json://hunter2@127.0.0.1:9", "slak://hunter2"]
        faults = send(urls, "title", "text", "warning")
    assert faults == [
        "json://***: the message was not accepted",
        "json://***: the message was not accepted",
        "slak://***: apprise cannot read this URL",
    ]
    [told] = good.messages
    assert (told["title"], told["message"], told["type"]) == ("title", "text", "warning")


def test_a_url_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    monkeypatch.setattr(notifier, "SEND_S", 0.1)
    hold = threading.Event()
    monkeypatch.setattr(notifier, "_send_one", lambda *_: hold.wait(60))
    assert send(["json://h"], "t", "x", "info") == ["json://***: no answer within 0.1 s"]
    hold.set()


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    opened = RunStore.open(None, tmp_path)
    opened.create_run("demo-1", "demo", {}, {})
    return opened


def test_the_state_of_the_store_is_told(tmp_path: Path, store: RunStore) -> None:
    folder, notes = RunFolder(tmp_path / "demo-1"), list[str]()
    folder.path.mkdir()
    with inbox() as box:
        with store, notifying(folder, store, [box.url], notes.append):
            store.finish_run("demo-1", "interrupted", "budget.max_hours")
        told = box.wait()
    assert told["title"] == "ludus: run demo-1 interrupted"
    assert "budget.max_hours" in told["message"]
    assert notes == []


def test_a_notifier_that_dies_is_reported(tmp_path: Path, store: RunStore) -> None:
    import os
    import signal

    from ludus.core.system.processes import listening

    folder, notes, pids = RunFolder(tmp_path / "demo-1"), list[str](), list[int]()
    folder.path.mkdir()
    with (
        store,
        listening(lambda pid, _: pids.append(pid)),
        notifying(folder, store, ["json://hunter2@h"], notes.append),
    ):
        os.kill(pids[0], signal.SIGKILL)
    assert notes == ["notify: not sent: json://***"]


def test_without_urls_nothing_starts(tmp_path: Path, store: RunStore) -> None:
    with store, notifying(RunFolder(tmp_path), store, [], print):
        pass
