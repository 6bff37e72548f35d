"""The main module of a rollout process (`rollout.processes`): builds a collector, plays shares.

It reads the run's configuration and tokenizer, builds the same model, and takes its weights from
shared memory before each share. It ends when the connection closes, or its parent dies.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from ludus.core.errors import LudusError, described
from ludus.core.system.garbage import collect_rarely
from ludus.rollout.hosts.processes import COUNTERS, Played, Queue, Setup, Share
from ludus.telemetry.relayed_logs import relay_logs

PARENT_CHECK_S = 1.0


class Player:
    """Plays shares with a model and a sampler of its own."""

    def __init__(self, setup: Setup, weights_fd: int, queue: Queue) -> None:
        import torch

        from ludus.backends.local import make_sampler
        from ludus.models.chat.tokenizers import load_tokenizer
        from ludus.models.shared_weights import SharedWeights
        from ludus.pipeline.build import make_collector
        from ludus.pipeline.parts.tokenizer import make_renderers
        from ludus.store.folders import RunFolder
        from ludus.tools.limits.limiter import Limits
        from ludus.train.checkpoint.policy import build_policy
        from ludus.train.trainer import configure_torch

        sys.path[:] = setup.path
        config, folder = setup.config, RunFolder(setup.folder)
        configure_torch(config)
        torch.set_num_threads(setup.threads)
        tokenizer = load_tokenizer(str(folder.tokenizer))
        model = build_policy(config.model, tokenizer, config.seed)
        self._weights = SharedWeights(model, weights_fd)
        self._weights.close()
        self._sampler: Any = make_sampler(config, model, tokenizer, folder.path / "sampler")
        renderers = make_renderers(config, tokenizer)
        self._collector = make_collector(config, self._sampler, renderers, Limits({}, ()))
        self._queue = queue
        collect_rarely()  # as `loop.run_stage`

    async def play(self, share: Share) -> Played:
        """Play a share with the weights that are in the shared memory."""
        self._weights.read()
        self._sampler.publish(share.version)
        before = {name: getattr(self._sampler, name) for name in COUNTERS}
        collector = replace(self._collector, stage=share.stage, config=share.config)
        taken: list[int] = []
        await collector.play(share.episodes(self._queue, taken))
        counters = {name: getattr(self._sampler, name) - before[name] for name in COUNTERS}
        return Played({number: share.groups[number].trajectories for number in taken}, counters)


def portable(error: Exception) -> Exception:
    """Returns the error, or one with its text where it does not survive pickling."""
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:
        pass
    return LudusError(described(error))


def main() -> None:
    """Serve the connection. Arguments: file descriptors of it, the weights and the queue."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    connection, weights_fd = Connection(int(sys.argv[1])), int(sys.argv[2])
    queue, lock = Queue(int(sys.argv[3])), threading.Lock()

    def send(message: Any) -> None:
        with lock:  # threads of environments log
            connection.send(message)

    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        player = Player(connection.recv(), weights_fd, queue)
    except Exception as error:
        send(described(error))
        return
    send(None)
    relay_logs(send)  # from here on: the run's own process has logged what building a run logs
    with asyncio.Runner() as runner:
        while True:
            try:
                share = connection.recv()
            except EOFError:
                return
            try:
                reply: Any = runner.run(player.play(share))
            except Exception as error:
                reply = portable(error)
            send(reply)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os._exit(1)


if __name__ == "__main__":
    main()
