"""A host whose process plays nothing: it writes episodes, steps and weights as a real one does.

`backend: {name: FILE:ScriptedHost, args: {fail_after: 2}}`
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import ludus
from ludus.backends.hosted import EpisodesWriter, HostedGroup
from ludus.backends.hosts import HostJob, HostPlay
from ludus.config.schema import RunConfig
from ludus.core.types import Group, Message, Segment, Task, Trajectory


class ScriptedHost:
    """Ends with an error after `fail_after` steps, or waits after `hang_after` steps.

    `die_unrecorded`: it ends between the save of this step and its record;
    `die_unevaluated`: between the record of this step and its evaluation.
    """

    is_host: ClassVar[bool] = True
    name: ClassVar[str] = "scripted"

    def __init__(
        self,
        fail_after: int = 0,
        hang_after: int = 0,
        stale: bool = False,
        die_unrecorded: int = 0,
        die_unevaluated: int = 0,
    ) -> None:
        self.python = sys.executable
        self._args = {"fail_after": fail_after, "hang_after": hang_after, "stale": stale}
        self._args |= {"die_unrecorded": die_unrecorded, "die_unevaluated": die_unevaluated}

    def check(self, config: RunConfig) -> list[str]:
        return ["rollout.concurrency: one at a time"]

    def prepare(self, config: RunConfig, folder: Path, play: HostPlay) -> HostJob:
        assert config.rl is not None
        job = {
            **self._args,
            "folder": str(folder),
            "train": str(play.train),
            "heldout": str(play.heldout),
            "model": str(play.model),
            "steps": config.rl.steps,
            "groups": config.rl.groups_per_step,
            "size": config.rl.group_size,
            "every": config.checkpoint.every,
            "evaluate_every": config.evaluate.every,
            "done": self.steps_done(folder),
            "evaluate_first": play.evaluate_first,
        }
        (folder / "job.json").write_text(json.dumps(job))
        command = [self.python, __file__, str(folder / "job.json")]
        environment = {"PYTHONPATH": str(Path(ludus.__file__).parents[1])}
        log, steps = folder / "host.log", folder / "steps.jsonl"
        return HostJob(command, environment, steps, folder / "episodes", log)

    def steps_done(self, folder: Path) -> int:
        path = folder / "latest"
        return int(path.read_text()) if path.exists() else 0

    def weights(self, folder: Path, step: int) -> Path:
        return folder / f"weights-{step}"

    def metrics(self, values: Mapping[str, float]) -> dict[str, float]:
        return {"time/step_s": 0.5, "time/rollout_s": 0.25, "time/train_s": 0.25, **values}


def main(job: dict[str, Any]) -> None:
    folder, writer = Path(job["folder"]), EpisodesWriter(Path(job["folder"]) / "episodes")
    train, heldout = (Path(job[name]).read_text().splitlines() for name in ("train", "heldout"))
    (folder / "pid").write_text(str(os.getpid()))
    with (folder / "steps.jsonl").open("w", buffering=1) as steps:
        if job["evaluate_first"]:
            evaluate(heldout, job["done"], writer)
            steps.write(json.dumps({"step": job["done"], "data": {}}) + "\n")
        for step in range(job["done"] + 1, job["steps"] + 1):
            for number in range(job["groups"]):
                task = Task.model_validate_json(train[(step - 1) * job["groups"] + number])
                version = step - 1 - job["stale"]
                group = play(task, f"rl-{step - 1:06d}/g{number:04d}", job["size"], version)
                writer.write(HostedGroup("rl", step - 1, group))
            due = job["evaluate_every"] and step % job["evaluate_every"] == 0
            if due and step != job["die_unevaluated"]:
                evaluate(heldout, step, writer)
            if step % job["every"] == 0 or step == job["steps"]:
                shutil.copytree(job["model"], folder / f"weights-{step}", dirs_exist_ok=True)
                (folder / "latest").write_text(str(step))
            if step == job["die_unrecorded"]:
                raise MemoryError("out of memory, as scripted")
            steps.write(json.dumps({"step": step, "data": {"train/loss": 0.1 * step}}) + "\n")
            if step in (job["fail_after"], job["die_unevaluated"]):
                raise MemoryError("out of memory, as scripted")
            if step == job["hang_after"]:
                subprocess.Popen(["sleep", "600"], start_new_session=True)
                (folder / "hangs").touch()
                time.sleep(600)


def evaluate(heldout: Sequence[str], step: int, writer: EpisodesWriter) -> None:
    for number, line in enumerate(heldout):
        task = Task.model_validate_json(line)
        group = play(task, f"evaluate/rl-{step:06d}/g{number:04d}", 1, step)
        writer.write(HostedGroup("evaluate/rl", step, group))


def play(task: Task, id: str, size: int, version: int) -> Group:
    members = []
    for number in range(size):
        segments = [
            Segment(-1, [1, 2], message=Message(role="user", content="go")),
            Segment(0, [3], [-0.5], Message(role="assistant", content="left"), version, 1.0),
        ]
        t = Trajectory(f"{id}/e{number:03d}", id, task.id, segments, reward=float(number % 2))
        t.metrics = {"success": t.reward or 0.0, "seconds": 0.1}
        members.append(t)
    return Group(id, task, members)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
