"""Environments of services: `env: {name: remote, args: {url: ..., env: textcraft}}`.

Rollouts are the same as with the local environment, token for token: turns and answers are passed
on unchanged.

If a host dies, its running episodes end with EnvLost and are retried on another host; a new episode
waits for a host to return. A dead host is noticed within two seconds.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ludus.core.errors import EnvError, EnvLost
from ludus.core.types import Message, Observation, StepResult, Task, ToolCall, ToolSpec
from ludus.envs.base import Env, NoExpert
from ludus.envs.remote.ask import EXPERT_SLACK_S, NoAnswer, NotFound, ask
from ludus.envs.remote.fleet import Place
from ludus.envs.remote.host import Session, Use
from ludus.envs.remote.hosts import HostList
from ludus.envs.remote.wire import ExpertAction, Gone, Schema, read
from ludus.telemetry.episodes import current_episode

LONGEST_ACTION = 100_000
"""Characters of an action that are sent; the built-in environments read at most 500."""

MAX_LOST = 3
"""Hosts that one reset may lose: its task may be what ends them."""

_numbers = itertools.count()


class RemoteEnv(Env):
    """A session of an environment service.

    Its own tasks hold a tier and a seed, from which the service makes the task, so the
    environment's packages are needed at the service only. LUDUS_TOKEN is the service's token.
    """

    blocking: ClassVar[bool] = False

    def __init__(
        self,
        url: Annotated[
            str | list[str],
            Field(
                description="The service's address, http://host:port; for several hosts a list of "
                "addresses, `file:PATH` (an address a line) or `dns+http://NAME:PORT`."
            ),
        ],
        env: Annotated[
            str | None, Field(description="Name of the environment; null: the service's only one.")
        ] = None,
        patience_s: Annotated[
            float, Field(ge=0, description="Seconds that a reset waits for a host to take it.")
        ] = 25.0,
        affinity: Annotated[
            Literal["episode", "task"],
            Field(
                description="What is spread over the hosts: `episode`, or `task`, where a host "
                "keeps what a task needs: all its episodes go to one host."
            ),
        ] = "episode",
        calls_per_host: Annotated[
            int, Field(ge=1, description="Most calls that are under way at one host.")
        ] = 256,
        sessions_per_host: Annotated[
            int,
            Field(ge=0, description="Most sessions open at one host; 0: as many as it takes."),
        ] = 0,
    ) -> None:
        hosts = HostList.of(url)
        self._place = Place(hosts, Use(env, calls_per_host, sessions_per_host, hosts.is_fleet))
        self.patience_s, self._affinity = patience_s, affinity
        self._session: Session | None = None
        self._playing = False
        self._texts: dict[str, str] = {}
        self._expert: ExpertAction | None = None  # its next turn, where its steps were asked for

    async def reset(self, task: Task) -> Observation:
        own = task.source == "remote"
        episode = task.data if own else {"task": task.model_dump(mode="json", exclude_none=True)}
        deadline, lost = time.monotonic() + self.patience_s, 0
        fleet, key = self._place.fleet(), self._key(task)
        self._playing, self._expert = False, None
        while True:
            if self._session is None or not fleet.keeps(self._session):
                await self.close()
                self._session = await fleet.open(key, deadline)
            session = self._session
            try:
                opening = await session.call("reset", **episode)
                break
            except Gone as error:
                lost += 1
                await self._lose(session, key)
                if lost >= MAX_LOST or time.monotonic() > deadline:
                    raise EnvLost(str(error)) from error
        self._playing = True
        return read(session.host.url, Observation, opening)

    async def step(self, action: Message) -> StepResult:
        session, self._expert = self._open_session, None
        content = action.content[:LONGEST_ACTION]
        message = action.model_copy(update={"content": content})
        try:
            answer = await session.call("step", message=message.model_dump(mode="json"))
        except Gone as error:
            await self._lose(session, session.key)
            raise EnvLost(str(error)) from error
        except Exception:
            self._playing = False
            raise
        result = read(session.host.url, StepResult, answer)
        self._playing = not result.done
        return result

    async def close(self) -> None:
        session, self._session, self._playing = self._session, None, False
        if session is not None:
            session.close()

    async def _lose(self, session: Session, key: str) -> None:
        self._place.fleet().avoid(key, session.host)
        await self.close()

    def _key(self, task: Task) -> str:
        """The key by which a host is assigned."""
        if self._affinity == "task":
            return task.id
        return current_episode() or f"{task.id} {os.getpid()} {next(_numbers)}"

    @property
    def _open_session(self) -> Session:
        if not self._playing or self._session is None:
            raise EnvError("remote: the episode is over, or was never reset; call reset first")
        return self._session

    def tools(self) -> Sequence[ToolSpec]:
        return self._schema.tools

    def call_of(self, action: str) -> ToolCall:
        told = self._place.description()
        path, failure = f"/envs/{told.env}/call", EnvError("remote: no host is listed")
        for url in dict.fromkeys([told.url, *self._place.hosts.read()]):
            try:
                call = ask(ToolCall, url, "POST", path, {"action": action})
                break
            except NoAnswer as error:
                failure = error
        else:
            raise failure
        self._texts[call.model_dump_json()] = action
        return call

    def text_of(self, call: ToolCall) -> str:
        """The text of a call made by `call_of`; empty for any other call, which the service reads
        at the step."""
        return self._texts.get(call.model_dump_json(), "")

    def expert_steps(self) -> str | None:
        self._expert = self._ask_expert()
        return self._expert.steps or None

    def expert_action(self) -> str:
        turn, self._expert = self._expert or self._ask_expert(), None
        return turn.action

    def _ask_expert(self) -> ExpertAction:
        """The expert's turn. Errors: NoExpert."""
        if not self._playing or self._session is None:
            raise NoExpert("remote: no episode is being played")
        url, path = self._session.host.url, f"/sessions/{self._session.id}/expert"
        limit = self._schema.expert_deadline_s + EXPERT_SLACK_S
        try:
            return ask(ExpertAction, url, "POST", path, {}, limit)
        except NotFound as error:
            raise NoExpert(str(error)) from error

    @property
    def score_range(self) -> tuple[float, float]:  # type: ignore[override]
        """The environment's score range, as the service reports it."""
        return self._schema.score_range

    @property
    def success_at(self) -> float:  # type: ignore[override]
        """The environment's success threshold, as the service reports it."""
        return self._schema.success_at

    @property
    def max_turns(self) -> int:  # type: ignore[override]
        """The environment's turn limit, as the service reports it."""
        return self._schema.max_turns

    @property
    def _schema(self) -> Schema:
        return self._place.description().schema

    @classmethod
    def check_tier(cls, tier: str) -> None:
        """Accept any tier; the service checks it."""

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        """A task of a tier and a seed, from which the service makes its own task."""
        return Task(
            id=f"remote/{tier or 'any'}/{seed}",
            data={"tier": tier, "seed": seed},
            tier=tier,
            source="remote",
        )
