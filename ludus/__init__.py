"""ludus trains language-model agents by reinforcement learning: many turns, tools, environments.

The public names are loaded on first use, so that ``import ludus`` needs neither torch nor any
other heavy package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "AgentEnv": "ludus.rollout.agent_env",
    "AgentTools": "ludus.rollout.agent_tools",
    "AsyncEvaluationClient": "ludus.judges.remote.client",
    "Env": "ludus.envs.base",
    "EvaluationClient": "ludus.judges.remote.client",
    "Group": "ludus.core.types",
    "LudusError": "ludus.core.errors",
    "Message": "ludus.core.types",
    "Model": "ludus.rollout.workflow",
    "Observation": "ludus.core.types",
    "Outcome": "ludus.rollout.outcome",
    "RunConfig": "ludus.config.schema",
    "Segment": "ludus.core.types",
    "Spec": "ludus.core.types",
    "StepResult": "ludus.core.types",
    "Task": "ludus.core.types",
    "ToolCall": "ludus.core.types",
    "ToolSpec": "ludus.core.types",
    "Trajectory": "ludus.core.types",
    "breakpoint_at": "ludus.core.debugging.breakpoints",
}

if TYPE_CHECKING:
    from ludus.config.schema import RunConfig as RunConfig
    from ludus.core.debugging.breakpoints import breakpoint_at as breakpoint_at
    from ludus.core.errors import LudusError as LudusError
    from ludus.core.types import Group as Group
    from ludus.core.types import Message as Message
    from ludus.core.types import Observation as Observation
    from ludus.core.types import Segment as Segment
    from ludus.core.types import Spec as Spec
    from ludus.core.types import StepResult as StepResult
    from ludus.core.types import Task as Task
    from ludus.core.types import ToolCall as ToolCall
    from ludus.core.types import ToolSpec as ToolSpec
    from ludus.core.types import Trajectory as Trajectory
    from ludus.envs.base import Env as Env
    from ludus.judges.remote.client import AsyncEvaluationClient as AsyncEvaluationClient
    from ludus.judges.remote.client import EvaluationClient as EvaluationClient
    from ludus.rollout.agent_env import AgentEnv as AgentEnv
    from ludus.rollout.agent_tools import AgentTools as AgentTools
    from ludus.rollout.outcome import Outcome as Outcome
    from ludus.rollout.workflow import Model as Model

__all__ = [*sorted(_EXPORTS), "__version__"]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'ludus' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
