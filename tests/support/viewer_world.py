"""A made store for the viewer: two runs, branches, failures, hostile text; and its service."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from tokenizers import Tokenizer, decoders, models

from ludus.core.types import Group, Message, Segment, Status, Task, ToolCall, Trajectory
from ludus.services.server.app import Settings
from ludus.services.server.connections import ConnectionLimits
from ludus.services.server.serve import server_config
from ludus.services.viewer.prepared import Data
from ludus.services.viewer.service import viewer_service
from ludus.store import RunStore

EVIL = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
RUN, OTHER = "tiny-1", "other-1"
STEPS, GROUPS, SIZE = 4, 3, 4
WORDS = ["<pad>", "go", " to", " the", " red", " ball", "look", " open", EVIL, "\n", "left", " é"]


def trajectory(step: int, group: int, member: int) -> Trajectory:
    """A question, a call, its result, an answer; the first of a group has two branches more."""
    group_id = f"rl-{step:06d}/g{group:04d}"
    call = ToolCall(name="python", arguments={"code": EVIL, "n": 2}, id="c1")
    advantage = 0.0 if group == 1 else member - 1.5
    segments = [
        Segment(-1, [1, 2, 3, 4, 5], None, Message(role="user", content="go to the red ball")),
        Segment(
            0, [6, 8, 7], [-0.1, -0.7, -3.5],
            Message(role="assistant", content=EVIL, tool_calls=[call]),
            policy_version=step, reward=0.25, advantages=[advantage] * 3, entropies=[0.1, 2.5, 0.9],
        ),
        Segment(1, [10, 9], None, Message(role="tool", content=f"a door {EVIL}", name="python")),
        Segment(
            2, [7, 11], [-0.2, -5.0], Message(role="assistant", content="open"),
            policy_version=step, advantages=[advantage] * 2,
        ),
    ]  # fmt: skip
    if member == 0:
        segments += [
            Segment(0, [10], [-0.3], policy_version=step, advantages=[advantage]),
            Segment(1, [1], [-0.4], policy_version=step, advantages=[advantage]),
        ]
    failed = member == 3 and group == 2
    return Trajectory(
        f"{group_id}/e{member:03d}",
        group_id,
        f"task-{step}-{group} {EVIL}" if group == 2 else f"task-{step}-{group}",
        segments[:1] if failed else segments,
        status=Status.ERROR_ENV if failed else Status.COMPLETED,
        reward=None if failed else 0.0 if group == 1 else member / 4 + step,
        scores={"success": 1.0, "style": 0.5},
        explanation=f"it opened {EVIL}",
        error=f"the environment raised {EVIL}" if failed else None,
        dropped="error_env: it raised" if failed else NO_SIGNAL if group == 1 else None,
        metrics={"seconds": 1.5, "odd": math.nan},
    )


NO_SIGNAL = "no signal: all rewards of the group are 0.0"


def make_runs(folder: Path) -> Path:
    """Record two runs; step 3 of the first trained nothing."""
    with RunStore.open(None, folder) as store:
        for run in (RUN, OTHER):
            store.create_run(run, run[:-2], {"seed": 1, "name": EVIL}, {"ludus": "0"})
            store.record_step(
                run, "evaluate/before", 0, [], {"evaluate/success": 0.25}, seconds=1.0
            )
            for step in range(STEPS):
                groups = [
                    Group(
                        f"rl-{step:06d}/g{g:04d}",
                        Task(id=f"task-{step}-{g}", answer=EVIL, data={"seed": g}),
                        [trajectory(step, g, m) for m in range(SIZE)],
                    )
                    for g in range(GROUPS)
                ]
                trained = float(step < STEPS - 1)
                metrics = {
                    "rollout/reward": 0.1 * step, "train/loss": 1.0 - step, "odd/nan": math.nan,
                    "train/optimizer_steps": trained, "time/elapsed_s": 10.0 * step,
                    "rollout/episodes_total": 12.0 * step, "time/step_s": 2.0,
                }  # fmt: skip
                store.record_step(
                    run, "rl", step, groups, metrics, seconds=2.0, policy_version=step
                )
            save_tokenizer(folder / run / "tokenizer")
        store.finish_run(OTHER, "failed", f"it broke {EVIL}")
    return folder


def save_tokenizer(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.decoder = decoders.Fuse()  # no spaces between tokens
    tokenizer.save(str(folder / "tokenizer.json"))


def write_live(folder: Path, age_s: float = 0.0, **changes: object) -> None:
    """The record of a running step."""
    state = {
        "pid": 1, "time": time.time() - age_s, "stage": "rl", "step": 4, "steps": 9, "step_s": 3.2,
        "playing": 7, "done": 5, "by_turn": [1, 4, 2], "tokens": 900, "tokens_per_s": 321.0,
        "busy": {"train": 0, "sample": 1, "env_wait": 3, "tool": 2, "judge": 0},
        "seconds": {"sample": 2.0, "env_wait": 1.2, "idle": 0.1},
        "slowest": [{"id": EVIL, "turns": 2, "tokens": 40, "s": 3.1}],
    }  # fmt: skip
    (folder / RUN / "live.json").write_text(json.dumps({**state, **changes}))


@contextmanager
def viewer(
    folder: Path,
    tokens: tuple[str, ...] = (),
    store: str | None = None,
    logs: tuple[Path, ...] = (),
) -> Iterator[str]:
    """The service in a thread; yields its address."""
    app = viewer_service(Settings(tokens=tokens), Data.open(folder, store, logs))
    server = uvicorn.Server(server_config(app, ConnectionLimits()))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(512)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            app.state.on_stop()
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()
