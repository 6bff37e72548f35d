"""A run's beginning and its screen: its id, Ctrl-C before there is a run, logs beside progress."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from harness import BABYAI, Ludus

SHORT = ["rl=null", "sft.steps=1", "demonstrations.num_episodes=6", "tasks.heldout=null"]


@pytest.mark.slow
def test_two_folders_of_runs_share_a_store(ludus: Ludus) -> None:
    url = f"store=sqlite:///{ludus.cwd}/shared.db"
    first = ludus("train", BABYAI, *SHORT, url, "--runs-dir", "a").ok()
    second = ludus("train", BABYAI, *SHORT, url, "--runs-dir", "b").ok()
    assert "run tiny-1 is complete: a/tiny-1/" in first.out
    assert "run tiny-2 is complete: b/tiny-2/" in second.out
    shutil.rmtree(ludus.cwd / "a" / "tiny-1")  # its row is still in the store
    third = ludus("train", BABYAI, *SHORT, url, "--runs-dir", "a").ok()
    assert "run tiny-3 is complete: a/tiny-3/" in third.out


def test_a_number_that_another_takes_meanwhile(ludus: Ludus) -> None:
    faster = (
        "from ludus.pipeline import launch\n"
        "from ludus.store import RunStore\n"
        "make = launch.create_run\n"
        "def late(*args):\n"
        "    folder = make(*args)\n"
        "    if folder.id == 'tiny-1':\n"
        "        with RunStore.open(None, 'runs') as store:\n"
        "            store.create_run('tiny-1', 'tiny', {}, {})\n"
        "    return folder\n"
        "launch.create_run = late\n"
    )
    done = ludus("train", BABYAI, *SHORT, setup=faster).ok()
    assert "run tiny-2 is complete" in done.out
    assert [path.name for path in sorted(ludus.run().parent.glob("tiny-*"))] == ["tiny-2"]


@pytest.mark.parametrize(
    ("argv", "target"),
    [
        (["train", BABYAI], "ludus.config.load:load_config"),
        (["train", BABYAI], "ludus.pipeline.launch:read_splits"),
        (["runs"], "ludus.cli.look:open_store"),
        (["checkpoint", "list", "x"], "ludus.store.folders:find_run"),
    ],
)
def test_ctrl_c_before_a_run_begins(ludus: Ludus, argv: list[str], target: str) -> None:
    done = ludus(*argv, setup=f"strike({target!r}, 1, 'interrupt')")
    assert done.refused(130, "ludus: stopped").err.count("stopped") == 1
    assert not Path(ludus.cwd / "runs" / "tiny-1").exists()


def test_ctrl_c_during_set_up_where_a_script_ignores_it(ludus: Ludus) -> None:
    """A shell starts background jobs of scripts with SIGINT ignored."""
    ignore = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    strike = "strike('ludus.pipeline.build:make_tokenizer', 1, 'interrupt')"
    ludus("train", BABYAI, setup=ignore + strike).refused(130, "ludus train --resume tiny-1")


@pytest.mark.slow
def test_a_run_killed_before_it_was_recorded_is_explained(ludus: Ludus) -> None:
    """The folder is there, the store has no row; then a row that says running for ever."""
    kill = "strike('ludus.store.store:RunStore.create_run', 1, 'kill')"
    assert ludus("train", BABYAI, *SHORT, setup=kill).code == -9
    again = "ludus train --resume tiny-1"
    assert f"tiny-1: killed before it was recorded: {again}" in ludus("runs").ok().out
    for argv in (["show", "tiny-1"], ["export", "tiny-1", "x.jsonl"], ["report", "tiny-1"]):
        ludus(*argv).refused(2, "run 'tiny-1' has a folder", again)
    kill = "strike('ludus.pipeline.build:make_tokenizer', 1, 'kill')"
    assert ludus("train", "--resume", "tiny-1", setup=kill).code == -9
    for argv in (["runs"], ["show", "tiny-1"]):
        told = ludus(*argv).ok().out
        assert "does not run on this machine. If it was killed: " + again in told
    ludus("train", "--resume", "tiny-1").ok()
    assert "killed" not in ludus("runs").ok().out


def test_log_lines_stand_above_the_progress(ludus: Ludus) -> None:
    warn = (
        "from ludus.telemetry.logs import get_logger\n"
        "from ludus.train.learner import Learner\n"
        "step = Learner.train_step\n"
        "def told(*args, **kwargs):\n"
        "    get_logger('ludus.test').warning('beside the bar')\n"
        "    return step(*args, **kwargs)\n"
        "Learner.train_step = told\n"
    )
    terminal = {"FORCE_COLOR": "1", "COLUMNS": "120"}  # stderr counts as a terminal
    shown = ludus("train", BABYAI, *SHORT, setup=warn, env=terminal).ok().err
    assert "\x1b[2K" in shown, "there is a live display"
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    # Log lines of one second show the time once.
    assert re.search(r"\x1b\[2K *([\d:]+ +)?WARNING +beside the bar", plain)
