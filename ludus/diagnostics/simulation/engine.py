"""Simulation of a run: groups of episodes on samplers and environment workers, and the learner.

    episode   reset -> (turn on its replica -> answer of the environment) x turns -> complete
    learner   wait for groups -> train -> publish the weights -> next step

The learner's rule is that of `rollout/prefetch.py`: it takes the oldest complete groups, waits
briefly for those that are `max_staleness` versions old, and cuts what is left of them. With
`max_staleness` 0 this is the synchronous mode. An event is the end of a turn, the answer of an
environment, or a phase of the learner; no event belongs to a token.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Generator
from typing import Any

from ludus.diagnostics.simulation.clock import Clock, Signal
from ludus.diagnostics.simulation.cores import Cores, Process
from ludus.diagnostics.simulation.parts import Counts, Episode, Group, Setup, Step, Workers
from ludus.diagnostics.simulation.replica import Replica, Turn
from ludus.rollout.prefetch import longest_wait


class Simulation:
    """A run in simulated time; `run` returns its steps, those of the warm-up first."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.clock = Clock(setup.max_events)
        self.rng = random.Random(setup.seed)
        costs, self._cores = setup.costs, Cores(setup.cores)
        share = self._cores.share if math.isfinite(setup.cores) else None
        self.replicas = [
            Replica(
                self.clock,
                costs.decoding,
                costs.prefill_token_s,
                costs.capacity,
                lockstep=setup.lockstep,
                on_busy=share,
            )
            for _ in range(setup.samplers)
        ]
        self.workers = Workers(setup.workers)
        self._learner = Process(self.clock, self._cores.share)
        self._driver = Process(self.clock, self._cores.share)
        self._hosts: list[Process] = []
        if share is not None and setup.layout != "local":
            self._hosts = [Process(self.clock, share) for _ in range(setup.workers)]
        self._cores.of([*self.replicas, self._learner, self._driver, *self._hosts])
        self.version = self._num_groups = 0
        self.steps: list[Step] = []
        self.counts: list[Counts] = []
        self._free = setup.concurrency
        self._waiting: deque[Episode] = deque()
        self._pending: list[Group] = []
        self._complete = self._due_running = 0
        self._totals = Counts()
        self._open, self._open_since = 0, 0.0
        self._changed = Signal(self.clock)

    def run(self) -> list[Step]:
        """Simulate. Errors: ConfigError above `max_events`."""
        self.clock.run(self.clock.process(self._learn()))
        return self.steps

    @property
    def num_open(self) -> int:
        """Episodes that have begun, and not ended."""
        return self._open

    @property
    def num_pending(self) -> int:
        """Episodes of groups that no step has taken."""
        return sum(len(group.episodes) for group in self._pending)

    @property
    def counted(self) -> list[Step]:
        """The steps after the warm-up."""
        return self.steps[self.setup.warmup :]

    def totals(self) -> Counts:
        """Totals of the counted steps."""
        first, last = self.counts[self.setup.warmup], self.counts[-1]
        names = Counts.__dataclass_fields__
        return Counts(**{name: getattr(last, name) - getattr(first, name) for name in names})

    # The learner

    def _learn(self) -> Generator[Any, Any, None]:
        setup, costs, last_s = self.setup, self.setup.costs, 0.0
        self._note()
        for left in range(setup.warmup + setup.steps, 0, -1):
            started = self.clock.now
            ahead = setup.max_staleness + 1
            self._start_up_to((min(ahead, left) if setup.ends else ahead) * setup.groups_per_step)
            while self._complete < setup.groups_per_step:
                yield self._changed.wait()
            due = self._due()
            yield from self._wait_for(due, last_s)
            cut = self._cut(due)
            groups = self._take(due)
            rollout_s = self.clock.now - started
            trained = [e for group in groups for e in group.episodes if not e.cut]
            tokens = sum(e.sizes.length for e in trained)
            prompts = sum(e.sizes.prompt for e in trained)
            at = self.clock.now
            yield from self._train(costs.train_seconds(tokens, prompts, setup.group_size))
            train_s, at = self.clock.now - at, self.clock.now
            yield from self._publish()
            last_s = self.clock.now - started
            sampled = sum(e.sizes.sampled * e.sizes.turns for e in trained)
            ages = sum(self.version - 1 - e.ages / e.sizes.turns for e in trained)
            stale = ages / max(len(trained), 1)
            parts = rollout_s, train_s, self.clock.now - at
            self.steps.append(Step(started, *parts, len(trained), tokens, sampled, stale, cut))
            self._note()

    def _train(self, seconds: float) -> Generator[Any, Any, None]:
        setup = self.setup
        stops = setup.layout == "colocated" or (setup.layout == "local" and setup.shares_weights)
        if stops:
            self._pause()
        self._totals.learner_s -= self.clock.now
        done = self.clock.event()
        self._learner.run(seconds, done.succeed)
        yield done
        self._totals.learner_s += self.clock.now
        if stops:
            self._resume()

    def _publish(self) -> Generator[Any, Any, None]:
        self._pause()
        yield self.clock.timeout(self.setup.costs.sync_s)
        self.version += 1
        for replica in self.replicas:
            replica.clear_cache()
        self._resume()

    def _due(self) -> list[Group]:
        oldest = self.version - self.setup.max_staleness
        due = [g for g in self._pending if g.began is not None and g.began <= oldest]
        for group in due:
            group.due = True
        self._due_running = sum(group.left for group in due)
        return due

    def _wait_for(self, due: list[Group], last_s: float) -> Generator[Any, Any, None]:
        began, number = self.clock.now, len(due) * self.setup.group_size
        while self._due_running:
            limit = began + longest_wait(last_s, self._due_running, number)
            if self.clock.now >= limit:
                return
            yield self._changed.wait() | self.clock.timeout(limit - self.clock.now)

    def _cut(self, due: list[Group]) -> int:
        running = [e for group in due if group.left for e in group.episodes if not e.done]
        for episode in running:
            episode.cut = True
            if episode.running is not None:
                assert episode.replica is not None
                episode.replica.drop(episode.running)
                episode.cached = 0.0
            self._end(episode)
        return len(running)

    def _take(self, due: list[Group]) -> list[Group]:
        missing = self.setup.groups_per_step - sum(
            any(not e.cut for e in group.episodes) for group in due
        )
        chosen = list(due)
        for group in self._pending:
            if missing <= 0:
                break
            if not group.left and not group.due:
                chosen.append(group)
                missing -= 1
        taken = {id(group) for group in chosen}
        self._pending = [group for group in self._pending if id(group) not in taken]
        self._complete -= len(chosen)
        return chosen

    def _note(self) -> None:
        self._account()
        totals, now = self._totals, self.clock.now
        totals.time = now
        totals.sampler_s = sum(replica.busy_s for replica in self.replicas)
        totals.worker_s = self.workers.busy_s + sum(host.busy_s for host in self._hosts)
        totals.sampled = sum(replica.sampled for replica in self.replicas)
        totals.prefilled = sum(replica.prefilled for replica in self.replicas)
        names = Counts.__dataclass_fields__
        self.counts.append(Counts(**{name: getattr(totals, name) for name in names}))

    def _pause(self) -> None:
        for replica in self.replicas:
            replica.pause()

    def _resume(self) -> None:
        for replica in self.replicas:
            replica.resume()

    # Episodes

    def _start_up_to(self, count: int) -> None:
        while len(self._pending) < count:
            group = Group(self.setup.group_size, self._num_groups)
            self._num_groups += 1
            group.episodes = [
                Episode(group, self.setup.workload.draw(self.rng))
                for _ in range(self.setup.group_size)
            ]
            self._pending.append(group)
            self._waiting.extend(group.episodes)
        self._fill()

    def _fill(self) -> None:
        while self._free and self._waiting:
            episode = self._waiting.popleft()
            if episode.cut:
                continue
            self._account()
            self._free -= 1
            self._open += 1
            self._begin(episode)

    def _begin(self, episode: Episode) -> None:
        if episode.group.began is None:
            episode.group.began = self.version
        episode.replica = self._choose()
        episode.started = self.clock.now
        self._totals.started += 1
        self._attempt(episode)

    def _choose(self) -> Replica:
        """The sampler of an episode, which keeps its context."""
        if self.setup.sticks_by_name:
            return self.replicas[int(self.rng.random() * len(self.replicas))]
        return min(self.replicas, key=lambda replica: replica.open)

    def _attempt(self, episode: Episode) -> None:
        """Begin an episode, or begin it again."""
        assert episode.replica is not None
        workload, group = self.setup.workload, episode.group
        episode.waits = workload.waits(episode.sizes, self.rng, group.number, group.attempts)
        group.attempts += 1
        episode.version = self.version
        episode.replica.enter()
        self._answer(episode, 0.0, workload.reset_s, 0.0)

    def _answer(self, episode: Episode, own_s: float, env_s: float, latency: float) -> None:
        """The environment's answer, after `own_s` of ludus and `env_s` of the environment on a
        core, and its latency."""
        now, replica, layout = self.clock.now, episode.replica, self.setup.layout
        assert replica is not None
        if self._hosts:
            host = min(self._hosts, key=lambda process: process.waiting)
            self._driver.run(own_s, lambda _: host.run(env_s, self._wait, (episode, latency)))
            return
        seconds, ready = own_s + env_s, now
        if layout == "local":
            ready = replica.block(seconds) if seconds else now
        else:
            ready = self.workers.run(now, seconds)
        self._wait((episode, ready - now + latency))

    def _wait(self, item: tuple[Episode, float]) -> None:
        """Go on with an episode after so many seconds."""
        episode, seconds = item
        if seconds > 0:
            self.clock.at(self.clock.now + seconds, self._next, episode)
        else:
            self._next(episode)

    def _next(self, episode: Episode) -> None:
        if episode.cut:
            return
        sizes = episode.sizes
        if episode.turn == sizes.turns:
            self._end(episode)
            if not episode.group.left or episode.group.due:
                self._changed.set()
            return
        costs, replica = self.setup.costs, episode.replica
        assert replica is not None
        prefill = sizes.observed if episode.turn else sizes.prompt
        valid = episode.version == self.version
        again = costs.prompt_share if not episode.turn else costs.observed_share
        known = episode.cached + prefill * (1 - again)
        # The part that the group has computed already is cached at once.
        replica.idle_tokens += prefill * (1 - again) if valid else 0.0
        turn = Turn(sizes.sampled, prefill * again, known, lambda: self._turned(episode), valid)
        episode.running, episode.ages = turn, episode.ages + self.version
        episode.turn += 1
        replica.submit(turn)

    def _turned(self, episode: Episode) -> None:
        turn, costs = episode.running, self.setup.costs
        assert turn is not None
        episode.running, episode.cached, episode.version = None, turn.final, self.version
        latency = next(episode.waits)
        if latency <= self.setup.deadline_s:
            env_s = self.setup.workload.step_s + costs.turn_env_s
            self._answer(episode, costs.turn_s - costs.turn_env_s, env_s, latency)
        else:
            self.clock.at(self.clock.now + self.setup.deadline_s, self._overdue, episode)

    def _overdue(self, episode: Episode) -> None:
        """The environment did not answer in time: try again, or give the episode up."""
        if episode.cut:
            return
        if episode.retries == self.setup.max_retries:
            episode.cut = True
            self._end(episode)
            self._changed.set()
            return
        episode.retries += 1
        assert episode.replica is not None
        episode.replica.leave(episode.cached if episode.version == self.version else 0.0)
        episode.turn, episode.cached, episode.ages = 0, 0.0, 0.0
        self._attempt(episode)

    def _end(self, episode: Episode) -> None:
        group, episode.done = episode.group, True
        group.left -= 1
        self._complete += not group.left
        self._due_running -= group.due
        if episode.started is None:  # it was cut before it began
            return
        self._account()
        self._open -= 1
        self._free += 1
        if episode.cut:
            self._totals.cut += 1
        else:
            self._totals.finished += 1
            self._totals.episode_s += self.clock.now - episode.started
        assert episode.replica is not None
        episode.replica.leave(episode.cached if episode.version == self.version else 0.0)
        self._fill()

    def _account(self) -> None:
        now = self.clock.now
        self._totals.open_s += self._open * (now - self._open_since)
        self._open_since = now
