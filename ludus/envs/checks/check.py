"""Conformance checks of an environment, run by `ludus check-env NAME`.

    for finding in await check_env("babyai"):
        print(finding)

Every check plays real episodes and reports findings. A failing check does not stop the others; a
hanging environment stops all of them, since its thread cannot be killed.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import random
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from ludus.core.errors import ConfigError, EnvError, EpisodeTimeout
from ludus.core.modules import told
from ludus.core.types import Message, Spec, Task
from ludus.envs import ENVS
from ludus.envs.base import Env, NoExpert
from ludus.envs.checks.declarations import check_declarations
from ludus.envs.checks.determinism import check_determinism
from ludus.envs.checks.differences import difference
from ludus.envs.checks.expert import check_expert
from ludus.envs.checks.levels import healthy_levels
from ludus.envs.checks.outcomes import check_speed
from ludus.envs.checks.own_tasks import own_tasks
from ludus.envs.checks.play import SLOW_S, ForksOn, Player, Turn, actions_of
from ludus.envs.checks.rubbish import check_rubbish
from ludus.envs.checks.subject import Finding, Subject
from ludus.envs.forks import copy_returned

STOPPED = "; the remaining checks did not run"

LARGE = 100_000
"""Characters of the messages of one call that are told."""

PROCESS_S = 3.0
"""Seconds in which a new process usually starts."""


async def check_env(
    env: Spec | str | type[Env],
    num_tasks: int = 6,
    tasks: Sequence[Task] | None = None,
    timeout_s: float = 10.0,
    report: Callable[[Finding], object] = lambda _: None,
    tell: Callable[[str], object] = lambda _: None,
) -> list[Finding]:
    """Check an environment on `num_tasks` of its own tasks, spread over its tiers, or on `tasks`.
    A tier whose first episode fails is an error, and the others are checked.

    The environment conforms if no finding has severity `error`. `timeout_s` limits each call.
    `report` receives each finding when it is found, `tell` what the expert reached. Where steps are
    slow, fewer tasks and turns are played. The checks watch this process's `sys.stdout` and random
    states: run nothing else in the process.

    Errors: ConfigError for an unknown name, a wrong argument, or a constructor that raises;
    MissingDependency. Other errors of the environment are findings.
    """
    subject = _subject(env, timeout_s)
    subject.report, subject.tell = report, tell
    printed, before = Printed(), _random_states()
    player = Player(subject.make, timeout_s, subject.error)
    try:
        with contextlib.redirect_stdout(printed):
            if subject.spec is not None:
                # Refuses wrong arguments once, not in each check.
                await player.new(partial(ENVS.build, subject.spec, "env"))
            if tasks is None:
                levels = await healthy_levels(subject, player)
                tasks = await own_tasks(subject, player, num_tasks, levels)
            subject.tasks = list(tasks)
            without_tools = getattr(subject.env_class, "tools", None) is Env.tools
            for name, check in CHECKS.items() if subject.tasks else ():
                if name == "tools" and without_tools:
                    continue
                await _guarded(name, check, subject, player)
    except EpisodeTimeout as error:
        kind = "processes" if isinstance(error, ForksOn) else "time"
        subject.error(kind, f"{error}{STOPPED}")
    except _Unplayable as error:
        subject.error("episode", f"{error}{STOPPED}")
    else:
        if told_of_fork := copy_returned():
            subject.error("processes", told_of_fork)
    finally:
        player.close()
    if player.left_out:
        subject.note("left out", f"{', '.join(player.left_out)}: the environment is slow")
    _check_sizes(subject, player)
    if printed.size:
        much = f" {printed.size / 1e6:.0f} MB" if printed.size >= 1e6 else ""
        text = f"it prints{much}, for example {printed.start[:60]!r}; use logging"
        subject.error("standard output", text)
    for library, state in _random_states().items():
        if before.get(library, state) != state:
            text = f"it changes the global random state of {library}; use its own generator"
            subject.error("random state", text)
    return list(subject.findings)


class Printed(io.StringIO):
    """Keeps the start of the output, and its size in characters."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.size = "", 0

    def write(self, text: str) -> int:
        self.start = self.start or text
        self.size += len(text)
        return len(text)


class _Unplayable(Exception):
    """The first episode failed before its first step was taken: so would all others."""


def _check_sizes(subject: Subject, player: Player) -> None:
    for call, size in player.largest.items():
        if size >= LARGE:
            subject.note(
                "size",
                f"{call} returned messages of {size:,} characters: an episode has to fit "
                f"`model.context_length`, in tokens, of which these are about {size / 4:,.0f}",
            )


def _subject(env: Spec | str | type[Env], timeout_s: float) -> Subject:
    if isinstance(env, type):
        return Subject(None, env, env, timeout_s)
    spec = Spec(name=env) if isinstance(env, str) else env
    args, target = ENVS.check(spec), ENVS.load(spec.name)
    if inspect.isfunction(target):
        raise ConfigError(f"{spec.name!r} is a function: derive a class from ludus.Env")
    if not isinstance(target, type) or not issubclass(target, Env):
        raise ConfigError(f"{spec.name!r} is not an environment: derive the class from ludus.Env")
    return Subject(spec, target, partial(target, **args), timeout_s)


def _random_states() -> dict[str, str]:
    """The global random states of the loaded libraries."""
    states = {"random": repr(random.getstate())}
    if numpy := sys.modules.get("numpy"):
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = repr((name, keys.tobytes(), rest))
    if torch := sys.modules.get("torch"):
        states["torch"] = repr(torch.random.get_rng_state().numpy().tobytes())
    return states


UNITS = {"determinism": 1, "expert": 1, "rubbish": 1, "tools": 1, "life cycle": 2}
UNITS |= {"independence": 3}
"""Episodes of a check of one task, where the environment is slow."""

UNENDED = (
    "; the step before it gave a reward and returned neither terminated nor truncated: if it ends "
    "the episode, return terminated=True"
)

Check = Callable[[Subject, Player], Awaitable[None]]


async def _guarded(name: str, check: Check, subject: Subject, player: Player) -> None:
    if player.late:
        player.slow = True  # nothing fits any more: what is left is left out
        text = f"{SLOW_S:g} s are over, though the first episode was fast: the slowest step took "
        subject.note("speed", f"{text}{player.slowest_s:.2g} s; a step of RL plays hundreds")
    starts_s = PROCESS_S if name == "determinism" and subject.spec is not None else 0.0
    if not player.fits(UNITS.get(name, 0), starts_s):
        player.left_out.append(name)
        return
    player.unended, player.at = False, None
    try:
        await check(subject, player)
    except EpisodeTimeout:
        raise
    except Exception as error:
        text = told(error, 200) + (UNENDED if player.unended else "")
        if name == "speed" and len(subject.first) < 2:
            where = "" if player.at is None else "{} of task {}: ".format(*player.at)
            raise _Unplayable(where + text) from error
        if name != "speed" and player.at is not None:
            name, task_id = player.at
            known = (finding.detail for finding in subject.findings)
            if any(detail == text or detail.endswith(f": {text}") for detail in known):
                return  # one fault shows in several checks and tasks
            text = f"task {task_id}: {text}"
        subject.error("episode" if name == "speed" else name, text)


async def _tools(subject: Subject, player: Player) -> None:
    """Convert an expert's action to a tool call and back."""
    env = await player.new()
    specs = list(env.tools())
    for spec in specs:
        if spec.parameters.get("type") != "object":
            subject.error("tools", f"{spec.name}: its parameters are not a schema of type object")
    if not specs:
        return
    try:
        await player.reset(env, subject.tasks[0])
        action = await player.expert(env)
    except NoExpert:
        return
    finally:
        await player.close_env(env)
    call = env.call_of(action)
    if call.name not in {spec.name for spec in specs}:
        subject.error("tools", f"call_of({action!r}) calls {call.name!r}, which is not offered")
    if env.text_of(call) != action:
        subject.error("tools", f"text_of(call_of({action!r})) is {env.text_of(call)!r}")


async def _life_cycle(subject: Subject, player: Player) -> None:
    """Steps before reset and after the end are refused; close works twice; reset works after it."""
    env, task = await player.new(), subject.tasks[0]
    await _refuses_step(subject, player, env, "before reset")
    first = [turn async for turn in player.turns(env, task)]
    if any(first[-1][3:]):
        await _refuses_step(subject, player, env, "after the episode's end")
    for time in ("first", "second"):
        try:
            await player.call("close", env.close)
        except EpisodeTimeout:
            raise
        except Exception as error:
            subject.error("close", f"the {time} close raised {told(error, 200)}")
    second = [turn async for turn in player.turns(env, task, actions_of(first))]
    if first != second and subject.repeats:
        text = (
            f"reset after close: {task.id} differs: {difference(first, second)}; set all that an "
            "episode changes in `reset`"
        )
        subject.error("life cycle", text)
    await player.close_env(env)


async def _refuses_step(subject: Subject, player: Player, env: Env, when: str) -> None:
    try:
        await player.call("step", lambda: env.step(Message(role="assistant", content="x")))
    except EnvError:
        return
    except EpisodeTimeout:
        raise
    except Exception as error:
        text = f"a step {when} raised {type(error).__name__}; raise EnvError"
    else:
        text = f"a step {when} was accepted; raise EnvError"
    subject.error("life cycle", text)


async def _independence(subject: Subject, player: Player) -> None:
    """Interleaved episodes, of different tasks and of the same task, do not affect each other."""
    if not subject.repeats:  # they would differ anyhow
        return
    first_tasks = subject.tasks[:4]
    episodes = [await player.episode(task) for task in first_tasks]
    tasks, alone = [*first_tasks, *first_tasks], [*episodes, *episodes]
    envs = [await player.new() for _ in tasks]
    plays = [
        player.turns(env, task, actions_of(turns))
        for env, task, turns in zip(envs, tasks, alone, strict=True)
    ]
    interleaved: list[list[Turn]] = [[] for _ in tasks]
    for i in [
        i for k in range(max(map(len, alone))) for i in range(len(tasks)) if k < len(alone[i])
    ]:
        if (turn := await anext(plays[i], None)) is not None:
            interleaved[i].append(turn)
    for task, one, other in zip(tasks, alone, interleaved, strict=True):
        if one != other:
            text = f"{task.id} differs beside other episodes: {difference(one, other)}"
            subject.error("independence", text)
    for env in envs:
        await player.close_env(env)


CHECKS: dict[str, Check] = {
    "declarations": check_declarations,
    "speed": check_speed,
    "determinism": check_determinism,
    "expert": check_expert,
    "rubbish": check_rubbish,
    "tools": _tools,
    "life cycle": _life_cycle,
    "independence": _independence,
}
