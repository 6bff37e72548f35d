"""`ludus train --view`: the live page beside the run, which ends with it."""

from __future__ import annotations

import json
import re
import signal
import urllib.request

import pytest
from harness import BABYAI, Ludus, Process
from variants import variants

from ludus.core.system.processes import identify


def page_of(process: Process) -> str:
    process.until("live page: ")
    found = re.search(r"live page: (\S+)/#/run\?run=tiny-1", process.stderr.read_text())
    assert found is not None
    return found[1]


@pytest.mark.parametrize("store", variants(["null", "sqlite:///elsewhere.db"], ["null"]))
def test_the_page_shows_the_run_and_ends_with_it(ludus: Ludus, store: str) -> None:
    process = ludus.start("train", BABYAI, "--view", f"store={store}", "sft.steps=100000")
    url = page_of(process)
    process.until("sft: 100000")
    with urllib.request.urlopen(f"{url}/api/runs", timeout=60) as answer:
        [run] = json.load(answer)["runs"]
    assert (run["id"], run["status"]) == ("tiny-1", "running")
    record = json.loads((ludus.run() / ".processes.json").read_text())
    [pid] = [p["pid"] for p in record["processes"] if p["what"] == "ludus view"]
    process.signal(signal.SIGINT)
    process.wait().refused(130, "resume with")
    assert identify(pid) is None
    if store == "null":
        assert "view" not in (ludus.run() / "config.yaml").read_text()


@pytest.mark.slow
def test_a_page_that_does_not_start_is_a_line(ludus: Ludus) -> None:
    few = ("sft.steps=1", "rl=null", "evaluate.num_tasks=1")
    done = ludus("train", BABYAI, "--view", *few, env={"LUDUS_TOKENS": "weak"}).ok()
    assert "no live page: ludus view ended with exit code 2: " in done.err
    assert "view.log" in done.err


def test_a_run_that_leaves_nothing_has_no_page(ludus: Ludus) -> None:
    debug = ludus("train", BABYAI, "backend=debug", "--view")
    debug.refused(2, "--view: `backend: debug` leaves no run to show")
