"""The samplers of a run: replicas behind one `PolicySampler`."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ludus.backends.ray.channel import ActorLost, Channel, reason_of
from ludus.backends.ray.deaths import Deaths, Replacements
from ludus.backends.ray.publication.weights import Weights
from ludus.backends.ray.sampler_actor import COUNTERS
from ludus.core.errors import LudusError
from ludus.models.grammars import Grammars
from ludus.models.samplers.base import Completion, SamplingParams
from ludus.telemetry.occupancy import busy

SHUTDOWN_S = 5.0
"""Seconds that replicas have to stop their own processes before they are ended."""


@dataclass(eq=False)
class Replica:
    """One sampler, its actor and its sessions."""

    index: int
    channel: Channel
    sessions: set[str] = field(default_factory=set)

    @property
    def alive(self) -> bool:
        return self.channel.lost is None


class WeightsLost(LudusError):
    """Published weights are not in the object store: they never were, or their rank has died."""


class SamplerPool:
    """Distributes sessions over replicas; replaces replicas that die.

    A session stays on its replica, which keeps its KV cache. Where the replica dies, its turns are
    sampled again by another, with the same seeds, so no episode ends and none is doubled.

    Args:
        spawn: starts the replica of an index, ready to sample the initial weights.
        deterministic: a session's replica derives from its name only.
        max_deaths: replicas that may die before the run stops.
        policy: for messages, in a run of several: ` (NAME)`.
    """

    shares_weights = False

    def __init__(
        self,
        replicas: list[Any],
        spawn: Callable[[int], Awaitable[Any]],
        context_length: int,
        grammars: Callable[[], Grammars],
        *,
        deterministic: bool,
        max_deaths: int,
        policy: str = "",
    ) -> None:
        self._policy = policy
        self.replicas = [self._replica(i, actor) for i, actor in enumerate(replicas)]
        self._spawn = spawn
        self._grammars = grammars
        self._deterministic = deterministic
        self._deaths = Deaths("samplers", max_deaths)
        self._replacements = Replacements(self._replace, self._deaths)
        self.context_length = context_length
        self.policy_version = 0
        self._weights: Weights | None = None
        self._home: dict[str, Replica] = {}
        self._past: dict[str, float] = dict.fromkeys(COUNTERS, 0.0)
        self.publication: dict[str, float] = {}
        """Seconds of the last publication's parts, as metrics."""
        self.refresh: Callable[[], Any] | None = None
        """Awaited before a turn: publishes weights whose publication was put off."""
        self.restore: Callable[[Weights], Awaitable[Weights | None]] | None = None
        """Returns lost weights anew; None where others are published before the next turn."""

    # Sessions

    def open(self, session: str) -> None:
        """Register an episode."""
        if session in self._home:
            raise ValueError(f"session {session!r} is open already")
        self._move(session, self._choose(session))

    def close(self, session: str) -> None:
        """Remove an episode and cancel its running turn. Idempotent."""
        replica = self._home.pop(session, None)
        if replica is not None:
            replica.sessions.discard(session)
            if replica.alive:
                replica.channel.tell("close", session)

    async def sample(
        self, prompt_ids: list[int], params: SamplingParams, *, session: str
    ) -> Completion:
        """Sample one turn, on the session's replica.

        Errors: those of the replica's sampler; LudusError where too many replicas died.
        """
        if self.refresh is not None:
            await self.refresh()
        while True:
            replica = self._home.get(session)
            if replica is None:
                raise ValueError(f"session {session!r} is not open")
            if replica.alive:
                try:
                    with busy("sample"):
                        completion: Completion = await replica.channel.call(
                            "sample", prompt_ids, params, session
                        )
                    return completion
                except ActorLost as lost:
                    self._bury(replica, lost)
            await self._rehome(session)

    def check_grammar(self, grammar: str) -> None:
        """Errors: ConfigError for a grammar that cannot be followed; MissingDependency."""
        self._grammars().check(grammar)

    def _choose(self, session: str) -> Replica:
        alive = [replica for replica in self.replicas if replica.alive] or self.replicas
        if self._deterministic:
            return alive[zlib.crc32(session.encode()) % len(alive)]
        return min(alive, key=lambda replica: len(replica.sessions))

    def _move(self, session: str, replica: Replica) -> None:
        self._home[session] = replica
        replica.sessions.add(session)
        if replica.alive:
            replica.channel.tell("open", session)

    async def _rehome(self, session: str) -> None:
        """Open a session of a dead replica on a live one; wait for one where there is none."""
        for dead in [replica for replica in self.replicas if replica.channel.lost]:
            self._bury(dead, dead.channel.lost or ActorLost(""))
        if not any(replica.alive for replica in self.replicas):
            await self._replacements.wait()
        self._replacements.check()
        replica = self._home.get(session)
        if replica is not None and not self.replicas[replica.index].alive:
            replica = self._choose(session)
            self._move(session, replica)
        elif replica is not None and self.replicas[replica.index] is not replica:
            self._move(session, self.replicas[replica.index])

    # Deaths

    @property
    def num_deaths(self) -> int:
        return self._deaths.num

    def _bury(self, replica: Replica, lost: ActorLost) -> None:
        """Start the replacement of a dead replica, once. Errors: LudusError: too many died."""
        index = replica.index
        if self.replicas[index] is not replica or index in self._replacements:
            return
        for name in COUNTERS:
            if name.startswith("num_"):
                self._past[name] += replica.channel.counters.get(name, 0.0)
        self._replacements.begin(index, lost)

    async def _replace(self, index: int) -> None:
        actor = await self._spawn(index)
        while True:  # weights may be published meanwhile
            weights, version = self._weights, self.policy_version
            try:
                await self._update(actor, weights, version)
            except WeightsLost:
                if self.restore is None or weights is None:
                    raise
                restored = await self.restore(weights)
                if self._weights is weights:
                    self._weights = restored
                continue
            if version == self.policy_version:
                break
        self.replicas[index] = self._replica(index, actor)

    # Weights

    def put_again(self, weights: Weights) -> None:
        """Take the same weights from a rank that lives, for replicas to come."""
        if self._weights is not None and self._weights.version == weights.version:
            self._weights = weights

    @property
    def weights(self) -> Weights | None:
        """The last publication; None before the first."""
        return self._weights

    @property
    def alive(self) -> list[Replica]:
        """The replicas that live, as far as is known."""
        return [replica for replica in self.replicas if replica.alive]

    def lose(self, replica: Replica, lost: ActorLost) -> None:
        """Replace a replica that has died. Errors: LudusError: too many died."""
        replica.channel.fail(lost)
        self._bury(replica, lost)

    async def update(
        self, weights: Weights | None, version: int, received: Sequence[Replica] = ()
    ) -> None:
        """Give all replicas weights (None: those that they have) under a version.

        Turns go on until the swap. Dead replicas are replaced.

        Args:
            received: replicas that have these weights already, and swap only.

        Errors: TrainingError; WeightsLost.
        """
        self._weights, self.policy_version = weights or self._weights, version
        replicas = self.alive
        done = await asyncio.gather(
            *(
                self._update(r.channel.actor, None if r in received else weights, version)
                for r in replicas
            ),
            return_exceptions=True,
        )
        times: list[tuple[float, float]] = []
        for replica, result in zip(replicas, done, strict=True):
            if isinstance(result, ActorLost):
                self.lose(replica, result)
            elif isinstance(result, BaseException):
                raise result
            else:
                times.append(result)
        for name, seconds in zip(("fetch", "swap"), zip(*times, strict=True), strict=False):
            self.publication[f"time/publish_{name}_s"] = max(seconds)

    @staticmethod
    async def _update(actor: Any, weights: Weights | None, version: int) -> tuple[float, float]:
        """Returns the seconds of the transfer, and those for which no turn went on."""
        from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

        began = time.perf_counter()
        if weights is not None and not weights.is_stored:
            raise WeightsLost(f"weights {version} were broadcast, and are not stored")
        try:
            if weights is not None:
                await actor.receive.remote(weights)
            fetched = time.perf_counter() - began
            return fetched, await actor.swap.remote(version)
        except RayActorError as error:
            raise ActorLost(f"a sampler has died: {reason_of(error)}") from None
        except RayTaskError as error:
            if isinstance(error.cause, LudusError):
                raise error.cause from None
            if isinstance(error.cause, ObjectLostError):
                raise WeightsLost(f"weights {version} are lost") from None
            raise

    # Counters of all replicas, for a meter

    def __getattr__(self, name: str) -> int:
        if name not in COUNTERS:
            raise AttributeError(name)
        now = sum(replica.channel.counters.get(name, 0.0) for replica in self.replicas)
        return int(self._past[name] + now)

    # The protocol's rest: replicas pause and publish themselves, in `update`

    def publish(self, version: int) -> None:
        """Does nothing: see `update`."""

    def pause(self) -> None:
        """Does nothing: replicas have weights of their own."""

    def resume(self) -> None:
        """Does nothing, see `pause`."""

    def shutdown(self) -> None:
        """Stop the processes that replicas have started, and refuse further calls."""
        import ray

        self._replacements.close()
        alive = self.alive
        with suppress(Exception):  # a cluster that is gone
            stopped = [replica.channel.actor.shutdown.remote() for replica in alive]
            if stopped:
                ray.wait(stopped, num_returns=len(stopped), timeout=SHUTDOWN_S)
        for replica in alive:
            replica.channel.fail(ActorLost(f"{replica.channel.name} was shut down"))

    def _replica(self, index: int, actor: Any) -> Replica:
        return Replica(index, Channel(actor, f"sampler {index}{self._policy}"))
