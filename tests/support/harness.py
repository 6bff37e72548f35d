"""Runs `ludus` commands, and reads what runs left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from ludus.store import RunStore
from ludus.telemetry.metrics import MetricsLog
from ludus.train.checkpoint.state import raw

RECIPES = Path(__file__).parents[1] / "recipes"
BABYAI, TEXTCRAFT = str(RECIPES / "babyai.yaml"), str(RECIPES / "textcraft.yaml")
MIXTURE, SOURCES = str(RECIPES / "mixture.yaml"), str(RECIPES / "sources.yaml")
SMALLEST = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
TIMEOUT_S = 120  # a guard against a hang
NO_PREFLIGHT = "from ludus.pipeline import launch\nlaunch.preflight = lambda *_: None\n"
"""Setup of a command that finds faults in the run itself, as later tasks may have them."""


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a command. `err` is without the configuration that `train` prints first."""

    code: int
    out: str
    err: str

    @property
    def all(self) -> str:
        return f"exit {self.code}\n{self.out}{self.err}"

    def ok(self) -> Done:
        assert self.code == 0, self.all
        return self

    def refused(self, code: int, *said: str) -> Done:
        """It ended with `code`, clear words and no traceback."""
        assert "Traceback" not in self.all, self.all
        assert self.code == code, self.all
        for words in said:
            assert words in self.err, f"{words!r} is not in:\n{self.err}"
        return self


@dataclass(slots=True)
class Process:
    """A command under way, in a session of its own."""

    zygote: Zygote
    pid: int
    stdout: Path
    stderr: Path

    def signal(self, number: int) -> None:
        """Send a signal to it and all its children, as a terminal does."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            os.kill(self.pid, number)  # it has not yet made its group

    def until(self, text: str) -> None:
        """Wait until it has said something on stderr."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (self.stderr.exists() and text in self.stderr.read_text()):
            assert time.monotonic() < deadline, self.stderr.read_text()
            time.sleep(0.005)

    def until_lines(self, path: Path, text: str, count: int, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until a file has `count` lines with a text."""
        deadline = time.monotonic() + timeout_s
        while not (path.exists() and path.read_text().count(text) >= count):
            assert time.monotonic() < deadline, self.stderr.read_text()
            time.sleep(0.005)

    def wait(self, timeout_s: float = TIMEOUT_S) -> Done:
        code = self.zygote.ask({"wait": self.pid, "timeout_s": timeout_s})["code"]
        if code is None:
            self.signal(signal.SIGKILL)
            raise AssertionError(f"it hangs:\n{self.stderr.read_text()}")
        err = self.stderr.read_text()
        if err.startswith("# differs from the defaults:\n"):
            err = err.partition("\n\n")[2]
        return Done(code, self.stdout.read_text(), err)


class Zygote:
    """See zygote.py. `folder` takes what the commands print."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = count()
        environment = {**os.environ, "COLUMNS": "300", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("zygote.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self._process.stdout is not None
        assert json.loads(self._process.stdout.readline()) == {"ready": True}

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        return dict(json.loads(stdout.readline()))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def start(
        self, cwd: Path, *argv: str, setup: str = "", env: Mapping[str, str] | None = None
    ) -> Process:
        number = next(self._numbers)
        stdout, stderr = (self._folder / f"{number}.{name}" for name in ("out", "err"))
        answer = self.ask(
            {
                "argv": argv,
                "cwd": str(cwd),
                "setup": setup,
                "env": dict(env or {}),
                "stdout": str(stdout),
                "stderr": str(stderr),
            }
        )
        return Process(self, answer["pid"], stdout, stderr)


@dataclass(frozen=True, slots=True)
class Ludus:
    """The command line in one folder: `ludus("train", BABYAI)`.

    `setup` is Python that runs before the command; `strike("module:name", n, "kill")` in it makes
    the n-th call of a function the last.
    """

    zygote: Zygote
    cwd: Path

    def __call__(
        self, *argv: object, setup: str = "", env: Mapping[str, str] | None = None
    ) -> Done:
        return self.start(*argv, setup=setup, env=env).wait()

    def start(
        self, *argv: object, setup: str = "", env: Mapping[str, str] | None = None
    ) -> Process:
        return self.zygote.start(self.cwd, *map(str, argv), setup=setup, env=env)

    def recipe(
        self, name: str, context_length: int, architecture: str = "qwen3", **sections: Any
    ) -> str:
        """Write NAME.yaml: the smallest model, and these sections. Returns the file's name."""
        model = {
            "architecture": {"name": architecture, "args": SMALLEST},
            "tokenizer": "words",
            "chat_template": "plain",
            "context_length": context_length,
        }
        path = self.cwd / f"{name}.yaml"
        path.write_text(json.dumps({"name": name, "model": model, **sections, "threads": 1}))
        return path.name

    def run(self, name: str = "tiny-1") -> Path:
        return self.cwd / "runs" / name

    @contextmanager
    def store(self) -> Iterator[RunStore]:
        with RunStore.open(None, self.cwd / "runs", read_only=True) as store:
            yield store

    def status(self, name: str = "tiny-1") -> str:
        with self.store() as store:
            return store.run(name).status.value

    def metrics(self, name: str = "tiny-1") -> list[dict[str, Any]]:
        lines = MetricsLog.read(self.run(name) / "metrics.jsonl")
        return [{"stage": line.stage, "step": line.step, **line.metrics} for line in lines]

    def state(self, name: str = "tiny-1") -> dict[str, Any]:
        """All that a run computed, without times: equal for two runs that did the same."""
        with self.store() as store:
            return {
                "checkpoints": _checkpoints(self.run(name)),
                "metrics": [_timeless(line) for line in self.metrics(name)],
                "steps": _steps(store, name),
                "evaluations": {
                    path.name: {**json.loads(path.read_text()), "seconds": 0}
                    for path in sorted((self.run(name) / "evaluations").glob("*.json"))
                },
                "demonstrations": [
                    path.read_text() for path in self.run(name).glob("demonstrations.jsonl")
                ],
            }


def _timeless(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in metrics.items()
        if not key.startswith(("time/", "memory/", "budget/")) and not key.endswith("seconds")
    }


def _steps(store: RunStore, name: str) -> list[dict[str, Any]]:
    """Every step with its groups down to tokens and log-probabilities."""
    steps = []
    for row in store.steps(name):
        groups = store.groups(name, row.stage, row.step)
        for trajectory in (t for group in groups for t in group.trajectories):
            trajectory.metrics = _timeless(trajectory.metrics)
        steps.append(
            {
                "at": (row.stage, row.step, row.policy_version),
                "metrics": _timeless(row.metrics),
                "groups": groups,
            }
        )
    return steps


def _checkpoints(run: Path) -> dict[str, Any]:
    """Weights, moments and counters, by the bytes."""
    found: dict[str, Any] = {}
    for folder in sorted((run / "checkpoints").iterdir()):
        for file in sorted(folder.glob("*.safetensors")):
            tensors = {
                key: (str(value.dtype), tuple(value.shape), raw(value).numpy().tobytes())
                for key, value in load_file(file).items()
            }
            found[f"{folder.name}/{file.name}"] = tensors
        state = json.loads((folder / "state.json").read_text())
        state["loop"].pop("timings")
        manifest = json.loads((folder / "manifest.json").read_text())
        kept = ("metric", "metric_name", "pinned")
        found[folder.name] = {**state, "manifest": {key: manifest.get(key) for key in kept}}
    return found
