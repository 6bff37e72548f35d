"""A machine that is lost: the same command on a fresh one ends with the same bits."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

import pytest
from harness import BABYAI, Ludus

from ludus.store.mirror import Remote

# The deaths of the process; True: the machine's disk is lost with it.
DEATHS = [
    ("ludus.pipeline.monitoring.progress:Display.tick", 5, "kill", True),
    ("ludus.train.learner:Learner.train_step", 3, "kill", False),
    ("ludus.store.mirror.remote:Remote.put", 4, "kill", True),
    ("ludus.train.learner:Learner.train_step", 10, "kill", True),
    ("ludus.store.mirror.remote:Remote.commit", 3, "kill", True),
    ("ludus.store.mirror.remote:Remote.commit", 3, "kill after", True),
    ("ludus.store.mirror.remote:Remote.get", 6, "kill", False),
    ("ludus.store.store:RunStore.unpack_step", 3, "kill after", False),
    ("ludus.rollout.collect:run_episode", 20, "kill", True),
    ("ludus.train.learner:Learner.train_step", 2, "kill after", False),
    ("ludus.pipeline.launch:report", 1, "kill", True),
]


def lose(ludus: Ludus) -> None:
    shutil.rmtree(ludus.cwd / "runs")


def same(ludus: Ludus, reference: Ludus) -> None:
    mine, other = ludus.state(), reference.state()
    for part in other:
        assert mine[part] == other[part], f"{part} differ"


@pytest.mark.slow
def test_killed_and_wiped_the_same_command_ends_with_the_same_bits(
    ludus: Ludus, reference: Ludus
) -> None:
    url = f"file://{ludus.cwd}/copy"
    command = ("train", BABYAI, f"mirror={url}")
    for target, nth, how, lost in DEATHS:
        done = ludus(*command, setup=f"strike({target!r}, {nth}, {how!r})")
        assert done.code == -signal.SIGKILL, f"{target} {nth}: not reached\n{done.all}"
        if lost and (ludus.cwd / "runs").exists():
            lose(ludus)
    ludus(*command).ok()
    assert ludus.status() == "completed"
    same(ludus, reference)
    assert not [path.name for path in (ludus.cwd / "runs").iterdir() if path.name[0] == "."]

    lose(ludus)
    assert "was complete already" in ludus(*command).ok().err
    same(ludus, reference)
    assert ludus.status() == "completed"
    assert (ludus.run() / "report.html").exists()


@pytest.mark.slow
def test_a_machine_that_comes_back_late_stops(ludus: Ludus, reference: Ludus) -> None:
    """Its run was taken up elsewhere meanwhile: it notices at its next checkpoint."""
    url = f"file://{ludus.cwd}/copy"
    wait = "while Path('hold').exists(): time.sleep(0.02)"
    setup = (
        "import time\nfrom pathlib import Path\nfrom ludus.store.mirror.sync import RunMirror\n"
        "push, count = RunMirror._push, iter(range(99))\n"
        "def slow(self):\n"
        "    if next(count) == 3:\n"
        f"        Path('held').touch()\n        {wait}\n"
        "    push(self)\n"
        "RunMirror._push = slow"
    )
    (ludus.cwd / "hold").touch()
    late = ludus.start("train", BABYAI, f"mirror={url}", setup=setup)
    elsewhere = ludus.cwd / "elsewhere"
    _until(ludus.cwd / "held")
    ludus("train", BABYAI, f"mirror={url}", f"runs_dir={elsewhere}").ok()
    (ludus.cwd / "hold").unlink()
    late.wait().refused(1, "another process has continued this run")
    newest = Remote(url).newest()
    assert newest is not None
    assert newest.run["status"] == "completed"
    # and told again, it takes up what the other made
    ludus("train", BABYAI, f"mirror={url}").ok()
    same(ludus, reference)


def test_a_budget_is_counted_over_all_machines(ludus: Ludus) -> None:
    command = ("train", BABYAI, f"mirror=file://{ludus.cwd}/copy", "budget.max_tokens=2000")
    ludus(*command).refused(3, "budget.max_tokens")
    spent = (ludus.run() / "budget.json").read_text()
    lose(ludus)
    again = ludus(*command)
    again.refused(3, "budget.max_tokens", "fetched snapshot")
    assert (
        spent.partition('"tokens"')[2]
        == (ludus.run() / "budget.json").read_text().partition('"tokens"')[2]
    ), "nothing was trained on the second machine"
    assert ludus.status() == "interrupted"


def test_what_cannot_be_mirrored_is_refused_at_once(ludus: Ludus) -> None:
    ludus("train", BABYAI, "mirror=somewhere").refused(2, "mirror")
    ludus("train", BABYAI, "mirror=nothing://there").refused(2, "mirror: nothing://there")
    (ludus.cwd / "file").write_text("no folder")
    ludus("train", BABYAI, f"mirror=file://{ludus.cwd}/file").refused(1, "mirror file://")


def _until(path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
