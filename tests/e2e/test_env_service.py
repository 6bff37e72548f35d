"""`--with-env-service`: the same run, played by a process that ends with it."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
from harness import BABYAI, Ludus

from ludus.core.system.processes import identify

SERVED = ["train", BABYAI, "--with-env-service", "babyai"]


def service_of(ludus: Ludus) -> int:
    record = json.loads((ludus.run() / ".processes.json").read_text())
    [pid] = [p["pid"] for p in record["processes"] if p["what"] == "ludus serve env babyai"]
    return int(pid)


def gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    while identify(pid) is not None:
        assert time.monotonic() < deadline, "the service is still there"
        time.sleep(0.02)


def test_a_run_is_the_same_with_its_environment_in_a_service(
    ludus: Ludus, reference: Ludus
) -> None:
    done = ludus(*SERVED).ok()
    assert "babyai is played by a service of its own at http://127.0.0.1:" in done.err
    mine, other = ludus.state(), reference.state()
    for part in other:
        assert mine[part] == other[part], f"{part} differ"
    assert "127.0.0.1" not in (ludus.run() / "config.yaml").read_text()


def test_the_service_ends_with_a_killed_run_and_the_run_goes_on_with_another(ludus: Ludus) -> None:
    many = ["sft.steps=100000"]
    process = ludus.start(*SERVED, *many)
    process.until("sft: 100000")
    service = service_of(ludus)
    assert identify(service) is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    gone(service)
    argv = ["train", "--resume", "tiny-1", "sft.steps=2", "rl=null"]
    done = ludus(*argv, "--with-env-service", "babyai").ok()
    assert "a service of its own" in done.err
    assert not (ludus.run() / ".processes.json").exists()


@pytest.mark.slow
def test_the_service_ends_with_an_interrupted_run(ludus: Ludus) -> None:
    process = ludus.start(*SERVED, "sft.steps=100000")
    process.until("sft: 100000")
    service = service_of(ludus)
    process.signal(signal.SIGINT)
    process.wait().refused(130, "resume with")
    assert identify(service) is None


def test_what_cannot_be_served_is_refused(ludus: Ludus) -> None:
    wrong = ludus("train", BABYAI, "--with-env-service", "babyia")
    wrong.refused(2, "--with-env-service babyia: the recipe does not play 'babyia'")
    debug = ludus("train", BABYAI, "backend=debug", "--with-env-service", "babyai")
    debug.refused(2, "`backend: debug` plays in one process")
    assert not (ludus.cwd / "runs").exists()


def test_a_service_that_does_not_start_fails_the_run(ludus: Ludus) -> None:
    fails = "import ludus.pipeline.parts.companions as c\n"
    fails += "c.EnvService.command = lambda *_: ['sh', '-c', 'echo no room; exit 3']"
    ludus(*SERVED, setup=fails).refused(
        1, "ludus serve env babyai ended with exit code 3: no room", "env-service.log"
    )
    assert ludus.status() == "failed"
