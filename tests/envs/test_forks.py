"""An environment that forks: the new process returns from the call too, and must not go on."""

from __future__ import annotations

import os
import time

import pytest
from faulty_envs import Digit

from ludus.core.errors import EnvError
from ludus.core.types import Message, StepResult
from ludus.envs.base import awaited
from ludus.envs.forks import copy_returned


async def test_the_copy_ends_and_the_next_call_tells() -> None:
    process, copies = os.getpid(), list[int]()

    class Forks(Digit):
        async def step(self, action: Message) -> StepResult:
            copies.append(os.fork())
            return await super().step(action)

    env, action = Forks(), Message(role="assistant", content="x")
    await awaited("reset", env.reset(Forks.task(None, 3)))

    async def play() -> None:
        for _ in range(100):
            await awaited("step", env.step(action))
            time.sleep(0.05)

    with pytest.raises(
        EnvError, match=r"Forks.step forks, and the new process returns from the call"
    ):
        await play()
    assert os.getpid() == process
    for copy in copies:
        assert os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) == 1
    copy_returned()  # of copies that ended after the error: the next test has none
