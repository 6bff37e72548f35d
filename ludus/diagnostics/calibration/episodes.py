"""Episodes that calibrate a recipe: those of the expert, and those of random actions."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, cast

from ludus.core.errors import ConfigError, counted, described
from ludus.core.system.signals import run
from ludus.core.types import Message, Spec, Task
from ludus.data.demonstrations import (
    EPISODES_PER_JOB,
    Dropped,
    Summary,
    dropped_path,
    generate_demonstrations,
    load_demonstrations,
)
from ludus.data.expert import Demonstration, run_expert
from ludus.envs.base import Env
from ludus.envs.checks.play import MAX_TURNS, EpisodeProcessDied, play_in_process
from ludus.pipeline.preflight.episodes import Played, Recorded, play_one
from ludus.rollout.hosts.host import LocalEnvs
from ludus.rollout.hosts.threads import EnvThread

LONGEST_S = 20.0
"""Seconds of an episode of the expert at most."""

PROBE = 2
"""Episodes that show whether an episode takes seconds."""

FIRST = 4 * EPISODES_PER_JOB
"""Episodes that show how long an episode takes: jobs come back whole."""

HERE_S = 4.0
"""Seconds of the expert's episodes in this process at most."""

MARGIN = 0.5
"""Share of the episodes, counted by those in this process, that are played: processes start, and
share cores."""

MOST_TURNS = MAX_TURNS
"""Turns after which an episode of the expert fails."""

LONGEST_TURNS = 400
"""Turns after which an episode of random actions ends."""


@dataclass(frozen=True, slots=True)
class RandomEpisode:
    """An episode of random actions. `step_s`: mean wall time of a step; `opening_s`: of constructor
    and reset; `error`: it failed."""

    reward: float
    success: bool
    step_s: float = 0.0
    error: str = ""
    opening_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Expert:
    """Episodes of the expert.

    Args:
        dropped: episodes without a demonstration.
        seconds: wall time, with the start of the processes.
        per_s: episodes a second, without that start.
    """

    demonstrations: Sequence[Demonstration] = ()
    dropped: Sequence[Dropped] = ()
    seconds: float = 0.0
    per_s: float = 1.0

    def joined(self, more: Expert) -> Expert:
        """These episodes and more of them."""
        return Expert(
            [*self.demonstrations, *more.demonstrations],
            [*self.dropped, *more.dropped],
            self.seconds + more.seconds,
            more.per_s,
        )

    def without(self, tiers: Collection[str]) -> Expert:
        """These episodes without those of some tiers."""
        shown = [one for one in self.demonstrations if one.tier not in tiers]
        dropped = [one for one in self.dropped if one.tier not in tiers]
        return replace(self, demonstrations=shown, dropped=dropped)

    @property
    def failed(self) -> Counter[str]:
        """The number of dropped episodes, by kind."""
        return Counter(one.kind for one in self.dropped)

    @property
    def reason(self) -> str:
        """The reason of the first dropped episode; empty: there is none."""
        return self.dropped[0].reason if self.dropped else ""

    @property
    def num_played(self) -> int:
        return len(self.demonstrations) + len(self.dropped)

    @property
    def success(self) -> float:
        return fmean(d.success for d in self.demonstrations) if self.demonstrations else 0.0

    @property
    def turns(self) -> list[int]:
        """Turns of each episode, ascending."""
        return sorted(d.num_turns for d in self.demonstrations)

    @property
    def rewards(self) -> list[float]:
        return [d.reward for d in self.demonstrations]


def play_expert(
    env: Spec,
    tasks: Sequence[Task],
    folder: Path,
    seconds: float,
    workers: int = 2,
    fit: Callable[[], object] | None = None,
) -> Expert:
    """Let the expert play as many tasks as fit into `seconds`, in processes of its own.

    Their number follows from episodes in this process. Where those do not end, PROBE tasks are
    played, then at most FIRST, then the rest, by the time that those before took. `fit` is called
    before them, and refuses what no model can read.
    """
    begun, played, timeout_s = time.perf_counter(), Expert(), LONGEST_S
    sizes: tuple[int, ...] = (PROBE, FIRST, len(tasks))
    kind, reason = _first_alone(env, tasks[0]) if ":" in env.name else ("", "")
    if kind == "timeout":  # the next ones would take as long
        first = tasks[0]
        dropped = Dropped(task_id=first.id, tier=first.tier, kind=kind, reason=reason)
        return Expert(dropped=[dropped])
    if fit is not None:
        fit()
    per_s = 0.0
    if not kind:
        per_s = workers * run(rate_here(env, tasks[:EPISODES_PER_JOB]))
    if per_s > 0:  # the first episode of each process loads the environment's files
        sizes, timeout_s = (len(tasks),), min(4 * workers / per_s + HERE_S, LONGEST_S)
        left = seconds - (time.perf_counter() - begun)
        tasks = tasks[: max(int(MARGIN * left * per_s), PROBE)]
    for size in sizes:
        left = seconds - (time.perf_counter() - begun)
        at = played.num_played
        number = size if not at else min(size, int(left * played.per_s))
        if at >= len(tasks) or number <= 0:
            break
        more = _batch(env, tasks[at : at + number], folder / f"{at}.jsonl", workers, timeout_s)
        played = played.joined(more)
        check_openings(env, tasks, more.demonstrations)
        if not played.demonstrations:
            break
        # An episode that hangs must not take the time of all others.
        timeout_s = min(max(4 / played.per_s, 2.0), LONGEST_S)
    return replace(played, per_s=max(played.per_s, per_s)) if per_s else played


def _first_alone(env: Spec, task: Task) -> tuple[str, str]:
    """Play an episode in another process, which one's own code may end or hold up for ever; returns
    the kind and the reason of a failure, both empty where there is none.

    Errors: ConfigError for an environment that ends its process.
    """
    try:
        turns = play_in_process(env, task, None, LONGEST_S)
    except EpisodeProcessDied as error:
        raise ConfigError(f"{env.name} {error.fault}") from None
    except TimeoutError:
        return "timeout", f"took longer than {LONGEST_S:g} s"
    except Exception as error:
        return "error", described(error)
    if len(turns) > MOST_TURNS and not any(turns[-1][3:]):
        return "timeout", f"the episode does not end in {counted(MOST_TURNS, 'turn')}"
    return "", ""


def check_openings(env: Spec, tasks: Sequence[Task], shown: Sequence[Demonstration]) -> None:
    """Errors: ConfigError for an episode that begins with the expert's turn: there is nothing that
    a model could answer."""
    asked = {task.id for task in tasks if task.prompt}
    for one in shown:
        if one.task_id not in asked and one.messages and one.messages[0].role == "assistant":
            raise ConfigError(
                f"{env.name}: reset returned no messages for task {one.task_id}, which has no "
                "prompt either, so a model has nothing to answer: return an Observation with at "
                'least one message, such as Message(role="user", content=...)'
            )


async def rate_here(env: Spec, tasks: Sequence[Task]) -> float:
    """Episodes of the expert a second in this process; 0 where one fails or they take too long.
    The first, with which an environment may load its files, does not count."""
    ends = [time.perf_counter()]
    async for played in _each(env, tasks, HERE_S / 2, HERE_S, expert_of):
        if played.demonstration is None:
            return 0.0
        ends.append(time.perf_counter())
    number = len(ends) - 2
    return number / max(ends[-1] - ends[1], 1e-6) if number > 0 else 0.0


async def play_again(env: Spec, tasks: Sequence[Task], seconds: float) -> list[Demonstration]:
    """The expert's episodes of tasks, played in this process, as many as fit into `seconds`."""
    found = [played async for played in _each(env, tasks, seconds, seconds, expert_of)]
    return [played.demonstration for played in found if played.demonstration is not None]


async def play_openings(
    env: Spec, tasks: Sequence[Task], seconds: float
) -> list[tuple[Task, list[Message]]]:
    """The opening observations of tasks, as many as fit into `seconds`."""

    async def opens(env: Recorded) -> None:
        await env.reset(env.task.model_copy(deep=True))

    found = [played async for played in _each(env, tasks, seconds, seconds, opens)]
    return [(played.task, played.opening) for played in found if played.opened]


async def _each(
    env: Spec,
    tasks: Sequence[Task],
    seconds: float,
    limit_s: float,
    act: Callable[[Recorded], Awaitable[Any]],
) -> AsyncIterator[Played]:
    """Play tasks in this process, one after the other: none begins after `seconds`, and one under
    way is given up at `limit_s`, both from the start."""
    envs, thread, begun = LocalEnvs(env), EnvThread(), time.perf_counter()
    try:
        for task in tasks:
            spent = time.perf_counter() - begun
            if spent >= seconds:
                break
            played = await play_one(envs, thread, task, limit_s - spent, act)
            yield played
            if played.overdue:
                break
    finally:
        thread.close()


async def expert_of(env: Recorded) -> Demonstration:
    """Play the expert of an environment."""
    return await run_expert(cast(Env, env), env.task, max_turns=MOST_TURNS)


def _batch(env: Spec, tasks: Sequence[Task], path: Path, workers: int, timeout_s: float) -> Expert:
    """The expert's episodes."""
    times: list[float] = []
    summary: Summary = generate_demonstrations(
        env,
        tasks,
        path,
        num_workers=workers,
        timeout_s=timeout_s,
        only_successful=False,
        max_turns=MOST_TURNS,
        on_episode=lambda _: times.append(time.perf_counter()),
    )
    found = list(load_demonstrations(path))
    lines = dropped_path(path).read_text(encoding="utf-8").splitlines()
    dropped = [Dropped.model_validate_json(line) for line in lines]
    later = len(times) - EPISODES_PER_JOB
    span = times[-1] - times[EPISODES_PER_JOB - 1] if later > 0 else summary.seconds
    rate = (later if later > 0 else len(times)) / max(span, 1e-3)
    return Expert(found, dropped, summary.seconds, rate)


async def play_random(
    env: Spec,
    tasks: Sequence[Task],
    actions: Sequence[str],
    seconds: float,
    seed: int = 0,
    max_turns: int = LONGEST_TURNS,
) -> list[RandomEpisode]:
    """Play tasks with actions drawn from `actions`: what a policy gets that knows the words and
    not when to use them, in as many turns as the policy has. No episode begins after `seconds`; one
    under way has as long again."""
    rng, won, episodes = random.Random(seed), set[str](), list[RandomEpisode]()

    async def wander(env: Recorded) -> None:
        await env.reset(env.task)
        for _ in range(min(max_turns, LONGEST_TURNS)):
            message = Message(role="assistant", content=rng.choice(actions))
            result = await env.step(message)
            if result.done:
                if result.info.get("success", env.won):
                    won.add(env.task.id)
                break

    async for played in _each(env, tasks, seconds, 2 * seconds, wander):
        mean = fmean(played.seconds) if played.seconds else 0.0
        error = "" if played.overdue and played.seconds else played.error
        episodes.append(
            RandomEpisode(played.reward, played.task.id in won, mean, error, played.opening_s)
        )
    return episodes


def success_of(played: Sequence[RandomEpisode]) -> float:
    """The success of random actions; 0 where none was played to its end."""
    fine = [p.success for p in played if not p.error]
    return fmean(fine) if fine else 0.0


def success_of_one_answer(good: Sequence[Demonstration]) -> float:
    """The success of a policy that always gives the expert's most frequent answer, where episodes
    have one turn; else 0."""
    answers = Counter(
        next(m.content for m in reversed(d.messages) if m.role == "assistant")
        for d in good
        if d.num_turns == 1
    )
    [(_, most)] = answers.most_common(1) or [("", 0)]
    return most / len(good) if good and answers.total() == len(good) else 0.0


def random_line(played: Sequence[RandomEpisode], max_turns: object) -> str:
    """The success, rewards and speed of random actions in at most `max_turns` turns."""
    failed = [p for p in played if p.error]
    fine = [p for p in played if not p.error]
    if not fine:
        return f"random actions: every episode failed, {failed[0].error}" if failed else ""
    rewards = [p.reward for p in fine]
    lost = f"{len(failed)} more fail, " if failed else ""
    most = "" if max_turns == 1 else f", at most {max_turns} turns"
    return (
        f"random actions (the expert's, in random order{most}): "
        f"{fmean(p.success for p in fine):.0%} of {len(fine)} episodes succeed, {lost}"
        f"reward {fmean(rewards):.3g} (standard deviation {pstdev(rewards):.2g}), a step of the "
        f"environment takes {1000 * fmean(p.step_s for p in fine):.2g} ms"
    )
