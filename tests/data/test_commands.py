"""`ludus rollout` and `ludus generate-data` as a user starts them, stopped and killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, num_turns, text

from ludus.cli import main

ROOT = Path(__file__).parents[2]
GOAL = "textcraft_0"


def start(*words: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ludus", *words],
        cwd=ROOT,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def rollout(url: str, out: Path, *words: str) -> tuple[str, ...]:
    ends = ("--model", "m", "--base-url", url, "--out", str(out), "--max-round", "2")
    return ("rollout", "textcraft", *ends, *words)


def test_the_command_plays_what_the_service_would(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with ChatServer(lambda body: text("Action: inventory")) as server:
        command = rollout(server.url, out, "--ids", f"3-4,{GOAL}")
        with start(*command, LUDUS_API_KEY="the-key") as process:
            said, told = process.communicate(timeout=120)
        assert {h["authorization"] for h in server.headers} == {"Bearer the-key"}
        assert server.bodies[0]["max_tokens"] == 512
    assert process.returncode == 0, told
    assert "3/3" in told
    answer = json.loads(out.read_text())
    assert {k: v for k, v in answer.items() if k != "results"} == json.loads(said)
    assert [e["id"] for e in answer["results"]] == [3, 4, GOAL]
    assert {e["status"] for e in answer["results"]} == {"truncated_turns"}
    assert (answer["mean_reward"], answer["num_evaluated"]) == (0.0, 3)
    assert "the-key" not in out.read_text() + said + told


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_what_was_played(tmp_path: Path, number: int, code: int) -> None:
    out, reached, over = tmp_path / "out.json", threading.Event(), threading.Event()

    async def say(body: dict[str, Any]) -> Any:
        if len(server.bodies) > 2:  # the second episode
            reached.set()
            while not over.is_set():
                await asyncio.sleep(0.01)
        return text("Action: inventory")

    with (
        ChatServer(say) as server,
        start(*rollout(server.url, out, "--ids", "0-2", "--concurrency", "1")) as process,
    ):
        try:
            assert reached.wait(60)
            process.send_signal(number)
            process.communicate(timeout=60)
        finally:
            over.set()
            process.kill()
    answer = json.loads(out.read_text())
    assert [e["status"] for e in answer["results"]] == ["truncated_turns", "aborted", "aborted"]
    assert (answer["stopped"], answer["num_evaluated"], process.returncode) == (
        "cancelled",
        1,
        code,
    )


def test_mistakes_end_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url, out = "http://127.0.0.1:1/v1", tmp_path / "out.json"
    for command, message in (
        (rollout("nowhere", out), "base_url: 'nowhere'"),
        (rollout(url, tmp_path / "no" / "out.json"), "cannot be written"),
        (rollout(url, out, "--ids", "549"), "textcraft_549 is not an item"),
        (("rollout", "textcraft", "--base-url", url), "ludus: --model is required"),
        (("generate-data", str(tmp_path / "d"), "textcraft", "--tier", "x"), "is not a tier"),
    ):
        monkeypatch.setattr(sys, "argv", ["ludus", *command])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code in (1, 2)
        told = capsys.readouterr().err
        assert message in told
        assert told.startswith("ludus: ")
        assert len(told.splitlines()) == 1


def test_generating_goes_on_after_a_kill(tmp_path: Path) -> None:
    hold = threading.Event()

    async def say(body: dict[str, Any]) -> Any:
        while len(server.bodies) > 3 and not hold.is_set():
            await asyncio.sleep(0.01)
        return text(f"Action: {'inventory' if num_turns(body) else 'get 1 dirt'}")

    folder = tmp_path / "data"
    with ChatServer(say) as server:
        words = ("--source", "model", "--model", "m", "--base-url", server.url, "--min-score", "0")
        shape = ("--num-tasks", "3", "--samples", "1", "--max-round", "1", "--concurrency", "1")
        command = ("generate-data", str(folder), "textcraft", *words, *shape)
        with start(*command, "--num-tasks", "6") as process:
            deadline = time.monotonic() + 60
            while len(server.bodies) < 4 and time.monotonic() < deadline:
                time.sleep(0.02)
            process.kill()
            process.communicate(timeout=30)
        assert len((folder / "episodes.jsonl").read_text().splitlines()) == 3
        assert not (folder / "data.jsonl").exists()
        hold.set()
        with start(*command, "--num-tasks", "6") as process:
            said, told = process.communicate(timeout=60)
        assert process.returncode == 0, told
        assert len(server.bodies) == 4 + 3  # the one that was cut is asked for again
    assert "6 episodes" in said
    rows = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    assert len({row["task_id"] for row in rows}) == 6
