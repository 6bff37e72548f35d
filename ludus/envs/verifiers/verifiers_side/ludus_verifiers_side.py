"""Runs inside verifiers' environment: plays episodes of a taskset, one step at a time.

It does not import ludus, since verifiers pins packages that ludus has in other versions. It reads
calls from standard input, one JSON object a line, and answers on standard output:

    {"id": 1, "op": "describe"}                            -> {"num_tasks": 5, "tools": [...]}
    {"id": 2, "op": "reset", "index": 3}                   -> {"session": "1", "messages": [...]}
    {"id": 3, "op": "step", "session": "1", "message": M}  -> {"messages": [...], "done": false}
    {"id": 4, "op": "close", "session": "1"}               -> {}

verifiers calls a model; ludus steps an environment. So the model that a harness sees is a small
HTTP server here: a request of the harness is the end of a step, the next action is its answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import Any

from ludus_side_session import Refused
from ludus_side_worker import Worker, described, search


async def serve(given: dict[str, Any], answers: Any) -> None:
    """Answer calls until standard input ends."""
    loop = asyncio.get_running_loop()
    calls: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    def read() -> None:
        with suppress(RuntimeError, ValueError):
            for line in sys.stdin.buffer:
                loop.call_soon_threadsafe(calls.put_nowait, json.loads(line))
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(calls.put_nowait, None)

    threading.Thread(target=read, daemon=True).start()

    def say(id: int, **fields: Any) -> None:
        answers.write(json.dumps({"id": id, **fields}).encode() + b"\n")
        answers.flush()

    def refusal(error: BaseException) -> dict[str, Any]:
        kind = error.kind if isinstance(error, Refused) else "env"
        text = str(error) if isinstance(error, Refused) else described(error)
        return {"type": kind, "message": text}

    worker = Worker(given)
    try:
        await worker.start()
    except Exception as error:
        say(0, error=refusal(error))
        await worker.close()
        return
    say(0, result={})
    operations = {
        "describe": worker.describe,
        "reset": worker.reset,
        "step": worker.step,
        "close": worker.close_session,
    }

    async def carry_out(call: dict[str, Any]) -> None:
        try:
            say(call["id"], result=await operations[call["op"]](call))
        except Exception as error:
            say(call["id"], error=refusal(error))

    running: set[asyncio.Task[None]] = set()
    while (call := await calls.get()) is not None:
        task = asyncio.create_task(carry_out(call))
        running.add(task)
        task.add_done_callback(running.discard)
    for task in running:
        task.cancel()
    with suppress(Exception):
        await asyncio.wait_for(worker.close(), 5)


def main() -> None:
    """Serve the taskset of the arguments, a JSON object, until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("arguments", type=json.loads)
    given = parser.parse_args().arguments
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the taskset prints is not an answer
    os.environ["LUDUS_VERIFIERS_KEY"] = "ludus"
    search(os.getcwd())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    with suppress(BrokenPipeError):
        asyncio.run(serve(given, answers))
    os.killpg(0, signal.SIGKILL)  # what the taskset has started


if __name__ == "__main__":
    main()
