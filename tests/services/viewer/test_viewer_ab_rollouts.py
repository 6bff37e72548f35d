"""A/B roll-outs in the viewer: list, one roll-out, live, damaged logs; in a real Chromium."""

from __future__ import annotations

import os
import re
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from ab_rollout_logs import opened, play
from test_viewer_page import tab, until
from variants import variants
from viewer_world import make_runs, viewer

from ludus.services.viewer import ab_rollouts

NAME = "rollout-support-3-support-4.jsonl"


def made(folder: Path, name: str = NAME, num: int = 600, **traffic: Any) -> Path:
    with closing(opened(folder / name)) as rollout:
        play(rollout, num, **traffic)
    return folder / name


def asked(url: str, path: Path) -> Any:
    return httpx.get(f"{url}/api/ab-rollout", params={"log": str(path)}, timeout=60).json()


def test_logs_are_found_in_the_runs_folder_and_by_name(tmp_path: Path) -> None:
    runs, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    runs.mkdir()
    elsewhere.mkdir()
    found = made(runs, failing=(0.0, 1.0))
    named, absent = made(elsewhere, "log"), elsewhere / "absent"
    (runs / "metrics.jsonl").write_text('{"step": 1}\n')
    os.mkfifo(runs / "pipe.jsonl")
    with viewer(runs, logs=(named, found, absent)) as url:
        told = httpx.get(f"{url}/api/ab-rollouts").json()
        assert {one["log"]: one["phase"] for one in told["logs"]} == {
            str(found): "rolled_back", str(named): "running", str(absent): None
        }  # fmt: skip
        problem = next(one["problem"] for one in told["logs"] if one["log"] == str(absent))
        assert problem == f"{absent}: No such file or directory"
        assert asked(url, absent)["problem"] == problem
        for other in (runs / "metrics.jsonl", "/etc/passwd"):
            answer = httpx.get(f"{url}/api/ab-rollout", params={"log": str(other)})
            assert (answer.status_code, answer.json()["error"]["type"]) == (404, "unknown_name")


def test_the_list_tells_what_parts_the_logs(browser: Any, tmp_path: Path) -> None:
    made(tmp_path, "rollout-stopped.jsonl", 30)
    damaged = made(tmp_path, "rollout-damaged.jsonl", 60)
    lines = damaged.read_text().splitlines(keepends=True)
    damaged.write_text("".join([*lines[:50], "oops\n", *lines[51:]]))
    with closing(opened(tmp_path / "rollout-live.jsonl")) as rollout:
        play(rollout, 30)
        with viewer(tmp_path) as url, tab(browser, f"{url}/#/ab-rollouts") as page:
            rows = page.locator("tbody tr").all_inner_texts()
            told = {row.split("rollout-")[1].split(".jsonl")[0]: row for row in rows}
            assert all("against runs/support-3/rl-000100" in row for row in rows)
            assert "running" in told["live"]
            assert "10 %" in told["live"]
            assert "may have stopped" in told["stopped"]
            assert "s ago" in told["stopped"]
            assert "damaged" in told["damaged"]
            assert f"{damaged}:51: not a line of a roll-out" in told["damaged"]
            assert not any("running" in told[name] for name in ("stopped", "damaged"))


def test_damage_of_a_long_log_is_in_the_list_once_its_page_has_found_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made(tmp_path)
    path.write_text(path.read_text() + "oops\n")
    monkeypatch.setattr(ab_rollouts, "CHECK_S", 0.0)
    with viewer(tmp_path) as url:
        for seen in (False, True):
            (one,) = httpx.get(f"{url}/api/ab-rollouts").json()["logs"]
            assert (one["problem"] is not None, one["phase"]) == (seen, "running")
            while asked(url, path)["more"]:
                pass


def test_a_log_is_read_in_parts_and_again_after_it_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made(tmp_path)
    monkeypatch.setattr(ab_rollouts, "READ_S", 0.0)
    with viewer(tmp_path) as url:
        first = asked(url, path)
        assert first["more"]
        while (told := asked(url, path))["more"]:
            assert first["num_read"] < told["num_read"] <= told["size"]
        requests = sum(one["requests"] for one in told["rollout"]["variants"].values())
        assert requests == 600 == told["rollout"]["points"][-1]["requests"]
        path.unlink()
        made(tmp_path, num=30)
        while (told := asked(url, path))["more"]:
            pass
        assert told["rollout"]["points"][-1]["requests"] == 30


def test_a_service_that_has_the_log_open_is_named(tmp_path: Path) -> None:
    path = made(tmp_path)
    with viewer(tmp_path) as url:
        assert asked(url, path)["service"] is None
        (tmp_path / "link.jsonl").hardlink_to(path)
        with closing(opened(path)):
            assert asked(url, path)["service"] == os.getpid()
            assert asked(url, tmp_path / "link.jsonl")["service"] == os.getpid()


@pytest.mark.parametrize(
    ("width", "scheme"),
    variants(product([1280, 360], ["light", "dark"]), [(1280, "light"), (360, "dark")]),
)
def test_the_page_of_a_rollout(browser: Any, tmp_path: Path, width: int, scheme: str) -> None:
    path = made(make_runs(tmp_path), num=4000, good=(0.3, 0.7))
    with viewer(tmp_path) as url, tab(browser, url, width, scheme) as page:
        page.get_by_role("link", name="support-4").click()
        page.wait_for_selector("main[data-ready=ab-rollout]")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        text = page.locator("main").inner_text()
        for said in ("runs/support-3/rl-000100", "Promoted: all sessions", "p 0.0", ": shown"):
            assert said in text
        rows = page.locator(".decisions tbody tr").all_inner_texts()
        assert ["promote" in rows[0], "increase" in rows[1], "start" in rows[-1]] == [True] * 3
        assert page.locator("figure.chart svg").count() == 8
        assert page.locator("polygon.band").count() == 3
        labels = page.locator("text.axis").all_text_contents()
        assert len(labels) == 16  # of x and y
        assert labels.count("requests of both variants") == 7
        page.locator("figure", has_text="evidence").locator("svg").hover()
        assert "better: " in page.locator("#tip").inner_text()
        page.get_by_role("button", name="scores").click()
        until(page, "location.hash.includes('x=scores')")
        assert asked(url, path)["rollout"]["next"] == []


def test_a_running_rollout_is_followed(browser: Any, tmp_path: Path) -> None:
    with closing(opened(tmp_path / NAME)) as rollout:
        play(rollout, 40)
        address = f"#/ab-rollout?log={quote(str(tmp_path / NAME), safe='')}"
        with viewer(tmp_path) as url, tab(browser, f"{url}/{address}") as page:
            text = page.locator("main").inner_text()
            assert f"process {os.getpid()} has the log open" in text
            assert "The challenger has 10 % of the sessions." in text
            assert "to 25 %" in text
            play(rollout, 2000, seed=1, failing=(0.0, 0.9))
            until(page, "document.querySelector('h1').textContent.includes('rolled back')")
            assert "errors: " in page.locator(".decisions").inner_text()


def test_a_service_that_has_stopped_is_not_shown_as_running(browser: Any, tmp_path: Path) -> None:
    address = f"#/ab-rollout?log={quote(str(tmp_path / NAME), safe='')}"
    with closing(opened(tmp_path / NAME)) as rollout, viewer(tmp_path) as url:
        play(rollout, 40)
        with tab(browser, f"{url}/{address}") as page:
            assert "running" in page.locator("h1").inner_text()
            rollout.close()
            until(page, "document.querySelector('h1').textContent.includes('may have stopped')")
            facts = page.locator("dl.facts").inner_text()
            assert "may have stopped: no process of this machine has the log open" in facts
            assert re.search(r"last entry\n.*\(\d+ s ago\)", facts)


def test_a_damaged_log_is_told_on_the_page(browser: Any, tmp_path: Path) -> None:
    path = made(tmp_path, num=60)
    with path.open("a") as file:
        file.write('{"kind": "sco')
    address = f"#/ab-rollout?log={quote(str(path), safe='')}"
    with viewer(tmp_path) as url:
        with tab(browser, f"{url}/{address}") as page:
            assert "The last 13 bytes are no complete line" in page.locator("main").inner_text()
        with path.open("a") as file:
            file.write('red"}\n<img src=x onerror="window.hacked=1">\n')
        with tab(browser, f"{url}/{address}") as page:
            assert "not a line of a roll-out" in page.locator("[role=alert]").inner_text()
            assert page.locator("figure.chart").count() == 8  # up to the line before
            assert "damaged" in page.locator("h1", has_text="A/B").inner_text()
            assert "Up to the damage: " in page.locator("main").inner_text()
        path.write_text("my notes\n")
        with tab(browser, f"{url}/#/ab-rollouts") as page:
            assert "No A/B roll-outs" in page.locator("main").inner_text()
    with viewer(tmp_path, logs=(path,)) as url, tab(browser, f"{url}/#/ab-rollouts") as page:
        assert "not a line of a roll-out" in page.locator("tbody").inner_text()
        page.goto(f"{url}/{address}")
        page.wait_for_selector("main[data-ready=ab-rollout]")
        assert "This log cannot be shown" in page.locator("[role=alert]").inner_text()
