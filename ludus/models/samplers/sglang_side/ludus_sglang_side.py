"""Runs inside SGLang's process: its entry point, on a Unix socket.

It does not import ludus, since SGLang has an environment of its own. SGLang's children import this
file too, under another name, so nothing runs at import.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import runpy
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any


def listen_on(path: str) -> None:
    """Make the HTTP server listen on a Unix socket: SGLang itself offers a TCP port only."""
    import uvicorn

    original = uvicorn.Config.__init__

    def on_socket(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **{**options, "uds": path})

    setattr(uvicorn.Config, "__init__", on_socket)  # noqa: B010 - mypy knows no assignment


def label_tokens() -> None:
    """Add the version of the weights to each answer, and the route that sets it.

    Releases after 0.4 have both. A request holds the lock of the weights from before its first
    token until its answer, so one version sampled all of its tokens.
    """
    from sglang.srt.managers import io_struct

    if hasattr(io_struct, "UpdateWeightVersionReqInput"):
        return
    from fastapi import Request
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    served = {"version": "default"}

    async def update_weight_version(request: Request) -> dict[str, Any]:
        served["version"] = str((await request.json())["new_version"])
        return {"success": True, "new_version": served["version"]}

    # `from __future__ import annotations` hides the type from FastAPI, which looks for it here.
    update_weight_version.__annotations__["request"] = Request
    app.add_api_route("/update_weight_version", update_weight_version, methods=["POST"])
    original = TokenizerManager._wait_one_response

    async def labelled(self: Any, *args: Any, **options: Any) -> AsyncIterator[dict[str, Any]]:
        async for answer in original(self, *args, **options):
            answer["meta_info"]["weight_version"] = served["version"]
            yield answer

    TokenizerManager._wait_one_response = labelled


def _end_with_children() -> None:
    """Kill this process group when one of SGLang's processes dies: its turns would wait for ever.

    SGLang ends itself where a process reports an error, not where it is killed.
    """
    while True:
        children: dict[Any, Any] = {p.sentinel: p for p in multiprocessing.active_children()}
        for sentinel in multiprocessing.connection.wait(list(children), timeout=0.2):
            child = children[sentinel]
            child.join(5)  # the sentinel is closed before the process has an exit code
            if child.exitcode != 0:
                print(f"Error: process {child.pid} of SGLang ended: {child.exitcode}", flush=True)
                os.killpg(0, signal.SIGKILL)
        time.sleep(0 if children else 0.2)


def _end_with_pipe(folder: Path) -> None:
    """Wait until standard input is closed, then delete the folder and kill this process group."""
    while os.read(0, 1):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    option = sys.argv.index("--uds")
    socket = Path(sys.argv[option + 1])
    del sys.argv[option : option + 2]
    threading.Thread(target=_end_with_pipe, args=(socket.parent,), daemon=True).start()
    threading.Thread(target=_end_with_children, daemon=True).start()
    tempfile.tempdir = str(socket.parent)  # sockets of its own; deleted with the folder
    listen_on(str(socket))
    label_tokens()
    runpy.run_module("sglang.launch_server", run_name="__main__")
