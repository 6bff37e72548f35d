"""The executor, and beside it the curriculum agent of the next iteration in a second process."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from coevolve_world import ROOT, bits, until, write_recipe
from harness import Ludus, Process, Zygote

from ludus.coevolve.storage import Storage

pytestmark = pytest.mark.slow
LOG = f"{ROOT}/curriculum-2.log"


@pytest.fixture(scope="module")
def paired(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Ludus:
    """Up to the filter of iteration 1, and in `end` up to the executor: nothing disturbed it."""
    ludus = Ludus(zygote, tmp_path_factory.mktemp("paired") / "filtered")
    ludus.cwd.mkdir()
    recipe = write_recipe(ludus.cwd, side_by_side=True)
    for stage in ("start", "curriculum", "generate", "score", "filter"):
        ludus("coevolve", recipe, stage).ok()
    end = Ludus(zygote, ludus.cwd.parent / "end")
    shutil.copytree(ludus.cwd, end.cwd)
    end("coevolve", recipe, setup=UP_TO_THE_EXECUTOR).ok()
    return end


UP_TO_THE_EXECUTOR = """
import ludus.coevolve.flow as flow
stages_of = flow.stages_of
def few(config):
    return [s for s in stages_of(config) if (s.iteration, s.name) <= (1, "filter")
            and s.name != "evaluate"
            or (s.iteration, s.name) in ((1, "executor"), (2, "curriculum"))]
flow.stages_of = few
"""


@pytest.fixture
def copy(paired: Ludus, zygote: Zygote, tmp_path: Path) -> Ludus:
    ludus = Ludus(zygote, tmp_path / "copy")
    shutil.copytree(paired.cwd.parent / "filtered", ludus.cwd)
    return ludus


def run(ludus: Ludus) -> Process:
    return ludus.start("coevolve", "sums.yaml", setup=UP_TO_THE_EXECUTOR)


def child_of(process: Process) -> int:
    """The process that trains the curriculum agent."""

    def found() -> int | None:
        for entry in Path("/proc").iterdir():
            try:
                words = (entry / "cmdline").read_text().split("\0")
            except OSError:
                continue
            if "ludus.coevolve" in words and words[-2:] == [str(process.pid), ""]:
                return int(entry.name)
        return None

    return until(found)


def has_ended(pid: int) -> bool:
    try:
        return "\nState:\tZ" in (Path("/proc") / str(pid) / "status").read_text()
    except OSError:
        return True


def test_both_roles_train_and_both_stages_are_complete(paired: Ludus) -> None:
    stages = Storage(paired.cwd / ROOT).complete()
    assert stages["iteration-2/curriculum"] == {
        "run": "curriculum-2-1",
        "beside": "iteration-1/executor",
    }
    models = Storage(paired.cwd / ROOT).model
    for name in ("executor-1", "curriculum-2"):
        assert (models(name) / "model.safetensors").is_file()
    config = (paired.cwd / ROOT / "configs/answers-2.yaml").read_text()
    assert "models/start" in config  # the executor of one iteration earlier


@pytest.mark.long
def test_killed_the_second_process_ends_too_and_the_bits_are_the_same(
    paired: Ludus, copy: Ludus
) -> None:
    process = run(copy)
    child = child_of(process)
    until(lambda: "rl: 2 steps" in (copy.cwd / LOG).read_text())
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait().code == -9
    until(lambda: has_ended(child))
    run(copy).wait().ok()
    assert bits(copy.cwd / ROOT) == bits(paired.cwd / ROOT)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long)],
)
def test_stopped_by_a_signal_both_can_be_resumed(
    paired: Ludus, copy: Ludus, number: int, code: int
) -> None:
    process = run(copy)
    child = child_of(process)
    until(lambda: "rl: 2 steps" in (copy.cwd / LOG).read_text())
    os.kill(process.pid, number)
    process.wait().refused(code, "stopped in iteration-1/executor", "resume with")
    assert has_ended(child)
    run(copy).wait().ok()
    assert bits(copy.cwd / ROOT) == bits(paired.cwd / ROOT)


@pytest.mark.long
def test_a_second_process_that_is_killed_is_told_and_resumed(paired: Ludus, copy: Ludus) -> None:
    process = run(copy)
    os.kill(child_of(process), signal.SIGKILL)
    process.wait().refused(1, "curriculum of iteration 2 failed with exit code -9", LOG)
    run(copy).wait().ok()
    assert bits(copy.cwd / ROOT) == bits(paired.cwd / ROOT)


@pytest.mark.long
def test_the_last_line_of_a_second_process_that_fails_is_told(paired: Ludus, copy: Ludus) -> None:
    shutil.rmtree(copy.cwd / ROOT / "models/curriculum-1")
    run(copy).wait().refused(1, "curriculum of iteration 2 failed with exit code", "curriculum-1")
    assert "iteration-1/executor" not in Storage(copy.cwd / ROOT).complete()
    shutil.copytree(
        paired.cwd / ROOT / "models/curriculum-1", copy.cwd / ROOT / "models/curriculum-1"
    )
    run(copy).wait().ok()
    assert bits(copy.cwd / ROOT) == bits(paired.cwd / ROOT)
