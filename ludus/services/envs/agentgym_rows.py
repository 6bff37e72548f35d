"""AgentGym's API of each environment: the JSON of its responses, as a table of rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ludus.core.types import Task
from ludus.services.envs.session import EnvSession, State

View = Callable[[EnvSession], Any]
"""Makes the JSON of a response from a session."""

AVAILABLE = "\nAVAILABLE ACTIONS: "
"""Begins the list of actions that AgentGym's client, not its server, adds to ALFWorld's opening."""


def _last(session: EnvSession) -> str:
    return session.last


def _observation(session: EnvSession) -> str:
    """The last text without what AgentGym's client adds to the opening of an episode."""
    description = str(session.info.get("task_description", ""))
    return session.last.removeprefix(description).lstrip("\n").partition(AVAILABLE)[0]


def _actions(session: EnvSession) -> list[str]:
    return [str(action) for action in session.info.get("available_actions", [])]


FIELDS: dict[str, View] = {
    "id": lambda session: session.number,
    "observation": _observation,
    "reward": lambda session: session.reward,
    "score": lambda session: session.score,
    "done": lambda session: session.state is State.OVER,
    "deleted": lambda session: False,
    "available_actions": _actions,
    "task_type": lambda session: str(session.info.get("type", "")),
    "world_type": lambda session: session.info.get("world_type", "Text"),
    "game": lambda session: session.info.get("game", 0),
}


def _fields(*names: str) -> View:
    """A response of these fields."""
    return lambda session: {name: FIELDS[name](session) for name in names}


_created = _fields("id")
_result = _fields("observation", "reward", "done")
_scored = _fields("observation", "reward", "score", "done")


class Inspection(NamedTuple):
    """A route whose response the environment makes (`Env.inspect`), by its own name of it."""

    method: Literal["GET", "POST"]
    what: str
    view: Callable[[EnvSession, Any], Any] = lambda session, found: found


@dataclass(frozen=True)
class Row:
    """AgentGym's API of one environment; `tasks.agentgym` knows its items.

    `args` are the environment's arguments where the served spec has no others. `on_create`,
    `on_reset` and `on_step` make the responses; `reads` are the GET routes of what the session
    knows, `inspections` the routes of what only the environment knows. `index` is the index of a
    reset that names none (`...`: it must name one), and None a random one, of `any_task`;
    `reset_fields` are the reset's other fields. With `starts`, `create` also starts an episode;
    `goal_task` makes its task from a requested goal.
    """

    args: Mapping[str, Any] = field(default_factory=lambda: {"texts": "agentgym"})
    id_key: str = "id"
    index_key: str = "data_idx"
    index: Any = ...
    on_create: View = _created
    on_reset: View = _result
    on_step: View = _result
    reads: Mapping[str, View] = field(default_factory=dict)
    inspections: Mapping[str, Inspection] = field(default_factory=dict)
    reset_fields: Mapping[str, Any] = field(default_factory=dict)
    any_task: Callable[[], Task] | None = None
    starts: bool = False
    goal_task: Callable[[str], Task] | None = None


def _babyai_observation(session: EnvSession) -> dict[str, Any]:
    """The observation always opens with the goal, as in AgentGym."""
    goal = f"Your goal: {session.info.get('mission', '')}\n"
    told = {**_scored(session), "deleted": False}
    return {**told, "observation": goal + session.last.removeprefix(goal)}


def _science_opening(session: EnvSession) -> dict[str, Any]:
    """The task description, apart from the first observation."""
    return {
        "task_name": str(session.info.get("task", "")),
        "var_num": int(session.info.get("variation", 0)),
        "task_description": str(session.info.get("task_description", "")),
        **_science_step(session),
        "deleted": False,
    }


def _science_step(session: EnvSession) -> dict[str, Any]:
    """Rewards and scores of the engine, up to 100 instead of 1."""
    score = float(session.info.get("score", 0.0))
    return {**_scored(session), "reward": 100 * session.reward, "score": score}


def _textcraft_goal(goal: str) -> Task:
    item = goal.strip().lower().removeprefix("craft ").rstrip(".")
    return Task(id=f"textcraft/goal/{item}", data={"goal": item, "seed": 0})


def _webshop_random() -> Task:
    """A random goal of all. Not `random`'s own generator, which a training run may have seeded."""
    seed = random.SystemRandom().randrange(2**31)
    return Task(id="webshop_random", data={"split": "all", "seed": seed}, source="agentgym")


def _webshop_instruction(session: EnvSession) -> str:
    return f"Instruction: {session.info.get('instruction', '')}"


def _webshop_actions(session: EnvSession) -> dict[str, Any]:
    """Clickables include the search button, as in AgentGym, though a click on it does nothing."""
    actions = _actions(session)
    search = any(action.startswith("search[") for action in actions)
    clicks = [action[6:-1] for action in actions if action.startswith("click[")]
    return {"has_search_bar": search, "clickables": ["search", *clicks] if search else clicks}


ROWS: dict[str, Row] = {
    "babyai": Row(
        on_reset=_fields("observation", "reward", "score", "deleted", "done"),
        on_step=_scored,
        reads={"observation": _babyai_observation},
        inspections={"render": Inspection("POST", "render")},
    ),
    "textcraft": Row(
        index=0,
        on_create=_fields("id", "observation", "done", "reward"),
        on_reset=_fields("id", "observation", "done", "reward"),
        reads={
            "observation": _last,
            "goal": lambda session: session.info.get("goal", ""),
            "detail": _fields("observation", "done", "reward", "deleted"),
        },
        starts=True,
        goal_task=_textcraft_goal,
    ),
    "scienceworld": Row(
        args={"texts": "agentgym", "max_steps": 100},  # the limit of AgentGym's engine
        on_reset=_science_opening,
        on_step=_science_step,
        reads={"observation": _observation, "detail": _science_opening},
        inspections={
            "action_hint": Inspection("GET", "action_hint"),
            "goals": Inspection("GET", "goals"),
        },
    ),
    "alfworld": Row(
        index_key="game",
        on_reset=_fields("id", "observation", "available_actions", "task_type"),
        on_step=_fields("observation", "reward", "available_actions", "done"),
        reads={
            "observation": _observation,
            "available_actions": _actions,
            "detail": _fields(
                "world_type",
                "game",
                "observation",
                "available_actions",
                "done",
                "reward",
                "deleted",
            ),
        },
        reset_fields={"world_type": (Literal["Text", "Embody", "Hybrid"], "Text")},
    ),
    "webshop": Row(
        id_key="env_idx",
        index_key="session_id",
        index=None,
        any_task=_webshop_random,
        on_create=lambda session: session.number,
        on_reset=lambda session: [session.last, None],
        on_step=lambda session: {
            "state": session.last,
            "reward": session.reward,
            "done": session.state is State.OVER,
            "info": None,
        },
        reads={
            "observation": _last,
            "available_actions": _webshop_actions,
            "instruction_text": _webshop_instruction,
        },
        inspections={
            "state": Inspection(
                "GET",
                "state",
                lambda session, found: {**found, "instruction_text": _webshop_instruction(session)},
            )
        },
    ),
}
