"""Forks `ludus` commands from a process that has done the imports already.

A command imports for seconds (torch, transformers) and these tests need a hundred of them. What is
forked is the command itself: a session and a folder of its own, its own files for stdin, stdout and
stderr, `ludus.cli.main`, exit handlers. Requests and answers are JSON lines.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

PRELOADED = (
    "ludus.cli", "ludus.pipeline.launch", "ludus.pipeline.evaluation.evaluate",
    "ludus.diagnostics.doctor",
    "ludus.pipeline.debug", "ludus.store.show", "ludus.store.export", "ludus.coevolve.flow",
    "ludus.envs.babyai.env", "ludus.envs.babyai.expert",
    "ludus.envs.textcraft.env", "ludus.envs.checks.check", "ludus.config.reference",
    "alembic.command",
    "transformers.models.qwen3.modeling_qwen3", "transformers.models.auto.modeling_auto",
    "statsmodels.api", "scipy.stats", "torch.optim", "sqlalchemy.dialects.sqlite",
    "rich.progress", "pebble", "peft",
)  # fmt: skip

COPIERS: list[subprocess.Popen[bytes]] = []


def strike(target: str, nth: int, how: str) -> None:
    """Cause a fault at the n-th call of `module:attribute`.

    `how`: kill, kill after (it), interrupt (SIGINT), terminate (SIGTERM), either of them twice, or
    full (the disk, from there on).
    """
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original, calls = getattr(owner, name), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth and how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if calls == nth and how == "kill after":
            result = original(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)
            return result
        if calls == nth and how == "full":
            fill_disk()
        if calls == nth and how.startswith(("interrupt", "terminate")):
            for _ in range(2 if how.endswith("twice") else 1):
                signal.raise_signal(signal.SIGINT if "interrupt" in how else signal.SIGTERM)
        return original(*args, **kwargs)

    setattr(owner, name, counted)


def fill_disk() -> None:
    """Leave no room in `runs`: by a file where it is a disk of its own, else by a limit."""
    if not os.path.ismount("runs"):
        for stream in (1, 2):  # the limit is of all regular files: what is printed takes a pipe
            copier = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=stream)
            assert copier.stdin is not None
            os.dup2(copier.stdin.fileno(), stream)
            copier.stdin.close()
            COPIERS.append(copier)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        return
    with open("runs/filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def serve() -> dict[str, Any]:
    """Answer requests until stdin closes; returns a request in the child that is to run it."""
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = wait(request["wait"], request["timeout_s"])
        elif child := os.fork():
            answer = {"pid": child}
        else:
            return dict(request)
        print(json.dumps(answer), flush=True)
    os._exit(0)


def wait(pid: int, timeout_s: float) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return {"code": os.waitstatus_to_exitcode(status)}
        time.sleep(0.005)
    return {"code": None}


def become(request: dict[str, Any]) -> None:
    """The rest of the process is the command."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under `nohup`
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open(request["stdout"], flags), 1)
    os.dup2(os.open(request["stderr"], flags), 2)
    sys.stdin = os.fdopen(0, closefd=False)
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    sys.path.insert(0, "")
    sys.argv = ["ludus", *request["argv"]]
    if request["setup"]:
        exec(request["setup"], {"strike": strike})


def run() -> int:
    """The command's exit code, as Python would make it."""
    from ludus.cli import main

    try:
        main()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def end(code: int) -> NoReturn:
    """Python's end, threads and exit handlers included, but for the freeing of what was imported.

    That would walk, and so copy, all the memory that the child shares with its parent.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if COPIERS:
        os.closerange(1, 3)
    for copier in COPIERS:
        copier.wait(30)
    os._exit(code)


if __name__ == "__main__":
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    print(json.dumps({"ready": True}), flush=True)
    become(serve())
    end(run())
