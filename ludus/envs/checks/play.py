"""Plays an untrusted environment, with timeouts and checks of its answers."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from ludus.core.errors import EnvError, EpisodeTimeout, LudusError
from ludus.core.modules import told
from ludus.core.system.signals import ctrl_c_kept_from_children
from ludus.core.types import Message, Observation, Spec, StepResult, Task
from ludus.envs import ENVS
from ludus.envs.base import (
    PREPARE_S,
    Env,
    NoExpert,
    awaited,
    exit_error,
    expert_action,
    expert_steps,
)
from ludus.envs.forks import Forked
from ludus.tasks.readers import check_unicode

T = TypeVar("T")

MAX_TURNS = 1000
"""Turn limit of an expert's episode."""

WORDS = "look {}"
"""An action without an expert."""

TURNS_WITHOUT_EXPERT = 5
"""Turns of an episode without an expert."""

SLOW_S = 20.0
"""Seconds for all checks of a slow environment."""

LATE_STEP_S = 1.0
"""Seconds of a step from which a task is slow though the first was not."""

Turn = tuple[str, tuple[str, ...], float | None, bool, bool]
"""Action, messages as JSON, reward, terminated, truncated."""


class ForksOn(EpisodeTimeout):
    """The environment forks, and the new process goes on: nothing more can be played."""


class Player:
    """Plays episodes in its own thread and reports answers that violate the protocol.

    `report(check, detail)` is called for each violation. Errors: EpisodeTimeout if a call takes
    longer than `timeout_s`. Its thread cannot be killed, so all later calls fail too.

    `max_turns` of an episode are played; fewer where the environment is `slow`: then `unit_s` are
    the seconds of an episode, and `left_s` those left for the checks. `call_s`: seconds of the
    newest call, in its thread. `left_out`: checks that would take too long.
    `largest`: characters of the largest messages, by the call that returned them. `slowest_s`: of a
    step. `unended`: a step raised after one that gave a reward and did not end the episode. `at`:
    the call of an episode ("reset") and its task's id, where it runs, raised, or answered wrongly.
    """

    def __init__(
        self, make: Callable[[], Env], timeout_s: float, report: Callable[[str, str], None]
    ) -> None:
        self.make, self.timeout_s, self.report = make, timeout_s, report
        self.max_turns, self.slow, self.call_s, self.unit_s = MAX_TURNS, False, 0.0, 0.0
        self.largest: dict[str, int] = {}
        self.left_out: list[str] = []
        self.slowest_s, self.unended = 0.0, False
        self.at: tuple[str, str] | None = None
        self._task_of: dict[int, str] = {}  # by the identity of an environment
        self._rewarded: Env | None = None  # by its newest step, which did not end the episode
        self._begun = time.monotonic()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._hang: EpisodeTimeout | None = None

    @property
    def left_s(self) -> float:
        """Seconds left for the checks of a slow environment."""
        return SLOW_S - (time.monotonic() - self._begun)

    @property
    def late(self) -> bool:
        """True if the checks take long by steps that the first episode did not have."""
        return not self.slow and self.left_s < 0 and self.slowest_s >= LATE_STEP_S

    def fits(self, units: float, extra_s: float = 0.0) -> bool:
        """True if so many episodes, and so many seconds, fit into the time that is left."""
        return not self.slow or units * self.unit_s + extra_s <= self.left_s

    def close(self) -> None:
        """Stop the thread, unless it hangs."""
        if self._hang is None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def call(
        self, what: str, function: Callable[[], Awaitable[T]], timeout_s: float | None = None
    ) -> T:
        """Returns the result of `function`'s coroutine. Errors: EpisodeTimeout, or its own."""
        timeout_s = timeout_s or self.timeout_s

        if self._hang is not None:
            raise self._hang

        async def run() -> T:
            started = time.perf_counter()
            try:
                return await awaited(what, function())
            except asyncio.CancelledError as failure:
                raise exit_error(failure) from None
            except Forked as error:
                raise ForksOn(str(error)) from None
            except Exception:
                raise
            except BaseException as failure:  # would end the thread, and nothing would answer
                raise exit_error(failure) from None
            finally:
                self.call_s = time.perf_counter() - started

        future = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), self._loop))
        done, _ = await asyncio.wait([future], timeout=timeout_s)
        if not done:
            self._hang = EpisodeTimeout(f"{what} takes longer than {timeout_s:g} s")
            raise self._hang
        return future.result()

    async def new(self, make: Callable[[], Env] | None = None) -> Env:
        """Construct an environment, with `make` in place of the player's own."""

        async def construct() -> Env:
            return (make or self.make)()

        self.at = None
        return await self.call("the constructor", construct)

    async def reset(self, env: Env, task: Task) -> Observation:
        """Reset and check the answer. Errors: EnvError if it is not an Observation."""
        self._task_of[id(env)] = task.id
        with self._marked("prepare", env):
            await self.call("prepare", lambda: env.prepare(task), max(PREPARE_S, self.timeout_s))
        with self._marked("reset", env):
            observation: Any = await self.call("reset", lambda: env.reset(task))
            if not isinstance(observation, Observation):
                raise EnvError(f"reset returned {kind(observation)}, not an Observation")
            if not observation.messages:
                self.report("opening", "reset returned no messages")
            self._check_messages("reset", observation.messages)
        return observation

    async def step(self, env: Env, action: Message) -> StepResult:
        """Step and check the answer. Errors: EnvError if it is not a StepResult."""
        rewarded, self._rewarded = self._rewarded, None
        with self._marked("step", env):
            try:
                result: Any = await self.call("step", lambda: env.step(action))
            except Exception:
                self.unended = rewarded is env
                raise
            self.slowest_s = max(self.slowest_s, self.call_s)
            if not isinstance(result, StepResult):
                raise EnvError(f"step returned {kind(result)}, not a StepResult")
            if result.reward is not None and not math.isfinite(result.reward):
                self.report("rewards", f"step returned the reward {result.reward}")
            if not result.messages and not result.done:
                self.report("answers", "step returned no messages, though the episode continues")
            self._check_messages("step", result.messages)
        if result.reward and not result.done:
            self._rewarded = env
        return result

    async def expert(self, env: Env) -> str:
        """The expert's action. Errors: NoExpert, EnvError for anything else than a text."""

        async def ask() -> str:
            return expert_action(env)

        with self._marked("expert_action", env):
            return _text(
                await self.call("expert_action", ask), "expert_action returned a text that"
            )

    async def steps(self, env: Env) -> str:
        """The expert's lines before its action. Errors: EnvError for no text."""

        async def ask() -> str:
            return expert_steps(env)

        with self._marked("expert_steps", env):
            return _text(await self.call("expert_steps", ask), "expert_steps returned a text that")

    @contextmanager
    def _marked(self, name: str, env: Env) -> Iterator[None]:
        """Set `at` during a call of an episode; it stays where the block raises."""
        self.at = name, self._task_of.get(id(env), "?")
        yield
        self.at = None

    async def close_env(self, env: Env) -> None:
        """Close an environment; ignore its errors, which another check reports."""
        try:
            await self.call("close", env.close)
        except EpisodeTimeout:
            raise
        except Exception:
            return

    def _check_messages(self, what: str, messages: Iterable[Any]) -> None:
        size = 0
        for message in messages:
            size += len(message.content) if isinstance(message, Message) else 0
            if not isinstance(message, Message):
                self.report("messages", f"{what} returned {kind(message)} among its messages")
            elif message.role == "assistant":
                self.report("messages", f"{what} returned an assistant message: only models may")
            else:
                _text(message.content, f"{what} returned a message that")
        self.largest[what] = max(self.largest.get(what, 0), size)

    async def turns(
        self, env: Env, task: Task, actions: Sequence[str] | None = None
    ) -> AsyncGenerator[Turn]:
        """Yields the opening (as a turn without an action), then a turn for each action.

        Without `actions` the expert plays; without an expert, a few arbitrary words.
        """
        opening = await self.reset(env, task)
        yield "", _dump(opening.messages), None, False, False
        for number in range(self.max_turns if actions is None else len(actions)):
            action = await self.next_action(env, number) if actions is None else actions[number]
            if action is None:
                return
            result = await self.step(env, Message(role="assistant", content=action))
            # One that is not finite is reported, and is not equal to itself.
            reward = result.reward if math.isfinite(result.reward or 0.0) else None
            outcome = (reward, result.terminated, result.truncated)
            yield action, _dump(result.messages), *outcome
            if result.done:
                return

    async def next_action(self, env: Env, turn: int) -> str | None:
        """The expert's action; without an expert, a few words, and then None."""
        try:
            return await self.expert(env)
        except NoExpert:
            return WORDS.format(turn) if turn < TURNS_WITHOUT_EXPERT else None

    async def episode(self, task: Task, actions: Sequence[str] | None = None) -> list[Turn]:
        """Returns all turns of an episode, in a new environment."""
        env = await self.new()
        try:
            return [turn async for turn in self.turns(env, task, actions)]
        finally:
            await self.close_env(env)


def _text(text: str, what: str) -> str:
    """The text itself. Errors: EnvError where a tokenizer cannot hold it."""
    try:
        check_unicode(text)
    except ValueError as error:
        raise EnvError(f"{what} {error}: {text!r:.60}") from None
    return text


def actions_of(turns: Sequence[Turn]) -> list[str]:
    """The actions of an episode; its opening has none."""
    return [action for action, *_ in turns[1:]]


def kind(value: object) -> str:
    """The type of a wrong answer, in words."""
    return "None" if value is None else f"a {type(value).__name__}"


def _dump(messages: Iterable[Message]) -> tuple[str, ...]:
    return tuple(
        m.model_dump_json() if isinstance(m, Message) else f"not a message: {kind(m)}"
        for m in messages
    )


class EpisodeProcessDied(EnvError):
    """The process of an episode ended before the episode did. `fault`: the environment's."""

    def __init__(self, task: Task, code: int | None) -> None:
        how = "" if code is None else f", with exit code {code}"
        super().__init__(f"a new process that plays {task.id} died{how}")
        self.fault = (
            f"ends its process in an episode of task {task.id}{how}: an environment must not call "
            "os._exit, nor crash in native code"
        )


def play_in_process(
    spec: Spec, task: Task, actions: list[str] | None, timeout_s: float
) -> list[Turn]:
    """Play the episode in a new process, with another hash seed; see `Player.turns`.

    Errors: TimeoutError, EpisodeProcessDied, and errors of the episode.
    """
    here, there = multiprocessing.Pipe(duplex=False)
    args = (there, spec.model_dump_json(), task.model_dump_json(), actions)
    process = multiprocessing.get_context("spawn").Process(target=_answer, args=args)
    with ctrl_c_kept_from_children(), _another_hash_seed():
        process.start()
    there.close()  # so the end of the process is the end of the pipe
    try:
        if not here.poll(timeout_s):
            raise TimeoutError(f"{task.id} takes longer than {timeout_s:g} s in a new process")
        answer: list[Turn] | Exception = here.recv()
    except EOFError:
        process.join()
        raise EpisodeProcessDied(task, process.exitcode) from None
    finally:
        process.kill()
        process.join()
        here.close()
    if isinstance(answer, Exception):
        raise answer
    return answer


@contextmanager
def _another_hash_seed() -> Iterator[None]:
    """For the processes that start meanwhile, where this one's hash seed was given to it."""
    given = os.environ.get("PYTHONHASHSEED", "")
    if given.isdecimal():
        os.environ["PYTHONHASHSEED"] = str((int(given) + 1) % 2**32)
    try:
        yield
    finally:
        if given:
            os.environ["PYTHONHASHSEED"] = given


def _answer(pipe: Connection, *given: Any) -> None:
    """The process of an episode: send its turns, or its error."""
    try:
        answer: list[Turn] | Exception = _play_here(*given)
    except LudusError as error:
        answer = error
    except Exception as error:  # its class may be one's own, which cannot be sent
        answer = EnvError(told(error))
    pipe.send(answer)


def _play_here(spec_json: str, task_json: str, actions: list[str] | None) -> list[Turn]:
    spec, task = Spec.model_validate_json(spec_json), Task.model_validate_json(task_json)
    player = Player(lambda: ENVS.build(spec), math.inf, lambda *_: None)
    player.timeout_s = 3600.0  # the process's timeout is shorter
    return asyncio.run(player.episode(task, actions))
