"""The subject of a calibration: an agent of the user, its tasks, and what scores its episodes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ludus.config.registry import Registry
from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError, did_you_mean
from ludus.core.types import Spec, Task
from ludus.diagnostics.calibration.rows import check_answers
from ludus.diagnostics.calibration.subject import (
    Subject,
    as_arguments,
    environment,
    is_rows,
    rows_of,
    slug,
)
from ludus.envs import ENVS
from ludus.envs.base import Env
from ludus.judges import JUDGES
from ludus.rollout.agent_tools import check_agent_tools
from ludus.rollout.workflow import AGENTS, Agent
from ludus.tasks import READERS
from ludus.tasks.readers import read_tasks

NUM_FIRST = 256
"""Tasks of a reader that are looked at first."""

SEEDS = {"num_tasks", "first_seed"}
"""Arguments of a reader whose tasks come from seeds."""

PARTS = ("tasks", "env", "judge")
"""Parts of an agent's recipe whose arguments the command takes as PART.KEY=VALUE."""

_SUBJECTS: Registry[Any] = Registry("environment or agent", {})


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """Options of the command that only an agent has.

    Args:
        tools: a recipe, whose tools the agent uses; `recipe`: its name.
    """

    tasks: str | None = None
    env: str | None = None
    judge: str | None = None
    tools: RunConfig | None = None
    recipe: str | None = None

    @property
    def given(self) -> list[str]:
        """The options that are set."""
        return [f"--{name}" for name in (*PARTS, "tools") if getattr(self, name) is not None]

    def command(self, given: str, args: Mapping[str, Any], model: str) -> str:
        """The command with its arguments and options."""
        named = {name: getattr(self, name) for name in PARTS} | {"tools": self.recipe}
        options = {name: value for name, value in named.items() if value is not None}
        told = [f"{key}={value}" for key, value in args.items()]
        told += [f"--{name} {value}" for name, value in {**options, "model": model}.items()]
        return " ".join(["ludus init", given, *told])


@dataclass(frozen=True, slots=True)
class AgentSubject:
    """An agent with its tasks.

    Args:
        given: as the user named it; `command`: the command with its options.
        tasks: rows, tasks from seeds, or an environment with its tasks.
        judge: of episodes for which the agent returns no reward; `chosen`: the user named it.
    """

    given: str
    name: str
    command: str
    agent: Spec
    plays: Agent
    tasks: Subject
    judge: Spec | None = None
    chosen: bool = False
    tools: Sequence[Spec] = ()
    tool_calls: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)


def is_agent(given: str) -> bool:
    """True for a name of an agent, or `FILE.py:NAME` of a function of `task` and `model`, of one
    that is async, or of a class whose objects are called so. Errors: ConfigError."""
    if ":" not in given:
        return given in AGENTS.names() and given not in ENVS.names()
    target: Any = _SUBJECTS.load(given)
    if not inspect.isclass(target):
        names = set(inspect.signature(target).parameters)
        return {"task", "model"} <= names or inspect.iscoroutinefunction(target)
    is_env = issubclass(target, Env) or (hasattr(target, "reset") and hasattr(target, "step"))
    return not is_env and inspect.isfunction(getattr(target, "__call__", None))  # noqa: B004


def refuse_options(given: str, options: AgentOptions) -> None:
    """Refuse options of an agent for another subject. Errors: ConfigError."""
    if options.given:
        raise ConfigError(
            f"{', '.join(options.given)}: only an agent takes this, and {given} is none (an agent "
            "is a function of `task` and `model`: async def run(task, model))"
        )


def open_agent(
    given: str,
    args: Mapping[str, Any],
    tiers: str | None,
    options: AgentOptions,
    model: str | None,
) -> AgentSubject:
    """Find an agent, its tasks and its judge. Errors: ConfigError, DataError, MissingDependency."""
    own, parts = _divided(args, options)
    spec = Spec(name=given, args=own)
    with as_arguments(given, "agent"):
        plays = Agent.build(spec)
    if not {"task", "model"} <= plays.names:
        raise ConfigError(
            f"agent: {given} is called with ({', '.join(sorted(plays.names))}); it has to take "
            "`task` and `model`: async def __call__(self, task, model)"
        )
    try:
        check_agent_tools(plays.play, options.tools is not None)
    except ConfigError as error:
        raise ConfigError(f"{error} (`ludus init`: --tools RECIPE)") from None
    if given == "relay":
        raise ConfigError(
            "relay plays several roles, each with its policy, which `ludus init` does not choose: "
            "write `roles` in a recipe of your own (docs/roles.md)"
        )
    if model is None:
        raise ConfigError(
            f"{given} is an agent: its calls are free text, which no expert shows to a model from "
            "scratch: name a pretrained one with --model (a folder, or a name on the hub), or write"
            " a recipe with examples of your own (`sft.data`, docs/maths-agent.md)"
        )
    tasks = _tasks(given, plays, tiers, options, parts)
    judge = _judge(options, parts["judge"], tasks)
    return AgentSubject(
        given=given,
        name=_name(given),
        command=options.command(given, args, model),
        agent=spec,
        plays=plays,
        tasks=tasks,
        judge=judge,
        chosen=options.judge is not None,
        **_of_tools(options.tools),
    )


def _of_tools(recipe: RunConfig | None) -> dict[str, Any]:
    """The tools of a recipe, with their limits."""
    if recipe is None:
        return {}
    limits = {name: one.model_dump(exclude_unset=True) for name, one in recipe.limits.items()}
    calls = recipe.rollout.tool_calls.model_dump(exclude_unset=True)
    return {"tools": recipe.tools, "tool_calls": calls, "limits": limits}


def _name(given: str) -> str:
    """The recipe's name: the function's, or the file's where it is just `run`."""
    file, _, name = given.rpartition(":")
    return slug(Path(file).stem if file and name in ("run", "main", "agent") else name, ())


def _divided(
    args: Mapping[str, Any], options: AgentOptions
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The agent's own arguments, and those of each part. Errors: ConfigError for arguments of a
    part that is not named."""
    own: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {name: {} for name in PARTS}
    for key, value in args.items():
        part, dot, name = key.partition(".")
        if not dot:
            own[key] = value
        elif part not in PARTS or not name:
            raise ConfigError(
                f"{key}: write KEY=VALUE for an argument of the agent, or "
                + ", ".join(f"{part}.KEY=VALUE" for part in PARTS)
            )
        elif getattr(options, part) is None:
            raise ConfigError(f"{key}: it belongs to --{part}, which is not given")
        else:
            parts[part][name] = value
    return own, parts


def _tasks(
    given: str,
    plays: Agent,
    tiers: str | None,
    options: AgentOptions,
    parts: Mapping[str, dict[str, Any]],
) -> Subject:
    if options.tasks is not None and options.env is not None:
        raise ConfigError(
            "--tasks and --env: an environment of `ludus init` has tasks of its own: leave one out"
        )
    if options.env is not None:
        if "env" not in plays.names:
            raise ConfigError(
                f"--env: {given} takes no `env`: write async def run(task, model, env), or name "
                "its tasks with --tasks"
            )
        return environment(options.env, parts["env"], tiers, "env.")
    if tiers is not None:
        raise ConfigError(
            "--tiers selects levels of an environment, which an agent has with --env alone"
        )
    if options.tasks is None:
        needed = (
            "its environment: --env NAME"
            if "env" in plays.names
            else "--tasks FILE.jsonl, a data set of the hub, or a reader of your own "
            "(--tasks FILE.py:function)"
        )
        raise ConfigError(
            f"{given} is an agent, and nothing says which tasks it plays: give {needed}"
        )
    return _read(given, plays, options.tasks, parts["tasks"], options.judge)


def _read(
    given: str, plays: Agent, tasks: str, args: Mapping[str, Any], judge: str | None
) -> Subject:
    """The tasks of a file, a data set or a reader."""
    if is_rows(tasks):
        command = f"ludus init {given} --tasks {tasks} tasks."
        compared = partial(_compared, judge)
        found = rows_of(tasks, args, command, needs_answer=False, compared=compared)
    elif tasks == "env":
        raise ConfigError(
            "--tasks env: these are the tasks of an environment: name it in place of --tasks, with "
            "--env, for an agent that takes an `env`"
        )
    elif ":" in tasks or tasks in READERS.names():
        found = _from_seeds(tasks, args)
    else:
        is_env = tasks in ENVS.names()
        near = " (an environment: name it with --env)" if is_env else ""
        raise ConfigError(
            f"--tasks: {tasks!r} is no file of rows, data set or reader"
            f"{near or did_you_mean(tasks, READERS.names())}: give a .jsonl, .json, .parquet or "
            ".csv file, OWNER/NAME of the hub, or FILE.py:function"
        )
    if "env" in plays.names and all(task.env is None for task in found.tasks):
        raise ConfigError(
            f"{given} takes an `env`, and the tasks of {tasks} have none: name an environment with "
            "--env in place of --tasks, or that of the rows with tasks.env=NAME"
        )
    return found


def _from_seeds(name: str, args: Mapping[str, Any]) -> Subject:
    """Tasks that a reader makes from seeds."""
    known = set(READERS.arguments(name).model_fields)
    if not known >= SEEDS:
        raise ConfigError(
            f"--tasks: {name} takes ({', '.join(sorted(known))}): to divide its tasks into "
            "training and held-out ones, `ludus init` sets `num_tasks` and `first_seed`: give it "
            "these, or name a file of rows"
        )
    if set_here := SEEDS & set(args):
        raise ConfigError(f"tasks.{min(set_here)}: `ludus init` sets it, for both splits")
    first = Spec(name=name, args={**args, "num_tasks": NUM_FIRST, "first_seed": 0})
    with as_arguments(name, "--tasks", "tasks."):
        tasks = read_tasks(first, "--tasks")
    return Subject(
        "env", name, slug(name.rpartition(":")[2], ()), reader=name, fields=args, tasks=tasks
    )


def _compared(judge: str | None, tasks: Sequence[Task]) -> bool:
    """True where the judge `answer` compares with the answers of these tasks."""
    elsewhere = judge is not None or any(task.env or task.judge for task in tasks)
    return not elsewhere and any(task.answer is not None for task in tasks)


def _judge(options: AgentOptions, args: Mapping[str, Any], tasks: Subject) -> Spec | None:
    """The judge that is named; else `answer` where the tasks have answers and nothing else would
    score the episodes of an agent that returns no reward."""
    known: Sequence[Task] = tasks.tasks
    if options.judge is not None:
        judge = Spec(name=options.judge, args=dict(args))
        with as_arguments(options.judge, "judge", "judge."):
            built = JUDGES.build(judge, "judge")
        if hasattr(built, "score_groups"):
            raise ConfigError(
                f"--judge: {options.judge} scores the episodes of a step together, and `ludus init`"
                " plays few: leave it out, and set `judge` in the recipe"
            )
        return judge
    if tasks.env is not None or not _compared(None, known):
        return None
    check_answers(tasks.given, known)
    return Spec(name="answer")
