"""Requests for rollouts with an endpoint's model: `POST /rollouts` and `ludus rollout`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SecretStr

from ludus.config.schema import RolloutConfig, ToolCallsConfig
from ludus.core.errors import ConfigError, LudusError
from ludus.core.types import Spec, Task, Wire
from ludus.envs import ENVS
from ludus.models.endpoint.client import Endpoint
from ludus.rollout.hosts.host import EnvFactory
from ludus.rollout.jobs import EpisodeRecord, RolloutJob
from ludus.rollout.tool_use import RunTools, joined_functions, unknown_function
from ludus.tasks.agentgym import ITEMS, index_of, task_of

MAX_SEED = 2**63 - 1
MAX_IDS = 10_000
Id = Annotated[int, Field(ge=0, le=MAX_SEED)] | Annotated[str, Field(min_length=1, max_length=64)]
Short = Annotated[str, Field(min_length=1, max_length=300)]


def _no_code(value: Any) -> Any:
    if value == "code":
        raise ValueError(
            "code is not possible with an endpoint, whose API cannot continue a turn after a "
            "result: choose plain, react or tools, and the model calls the tools natively"
        )
    return value


EndpointFormat = Annotated[Literal["plain", "react", "tools"], BeforeValidator(_no_code)]


class RolloutRequest(Wire):
    """The episodes to play, and the model.

    A number in `ids` is an AgentGym index if AgentGym has the environment and `tier` is null, like
    the text `babyai_12`. Otherwise it is a seed of the tier.
    """

    env: Short
    model: Short
    base_url: Annotated[str, Field(min_length=1, max_length=2000)]
    ids: Annotated[list[Id], Field(min_length=1, max_length=MAX_IDS)]
    api_key: SecretStr | None = None
    tier: Short | None = None
    max_round: Annotated[int, Field(ge=1, le=1000)] | None = Field(
        None, description="Turns of an episode; null: the environment's own."
    )
    format: EndpointFormat = "react"
    tools: list[Short] | None = Field(
        None, max_length=1000, description="Functions of the tools on offer; null: all."
    )
    system_prompt: Annotated[str, Field(max_length=100_000)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=1_000_000)] = 512
    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] = 0
    concurrency: Annotated[int, Field(ge=1, le=512)] = 16
    turn_deadline_s: Annotated[float, Field(gt=0, le=3600)] = 120.0
    episode_deadline_s: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    deadline_s: Annotated[float, Field(gt=0, le=86_400)] = 3600.0
    max_retries: Annotated[int, Field(ge=0, le=10)] = 1
    stream: bool = Field(False, description="Answer JSON lines: one an episode, as it ends.")

    def endpoint(self, tools: RunTools | None = None) -> Endpoint:
        """The model's endpoint, with the limits of `tools`.

        Errors: ConfigError for a bad `base_url`.
        """
        key = self.api_key.get_secret_value() if self.api_key else None
        limits = tools.limits if tools is not None else None
        seconds = self.turn_deadline_s
        return Endpoint(self.base_url, self.model, key, timeout_s=seconds, limits=limits)

    def job(
        self,
        endpoint: Endpoint,
        envs: EnvFactory,
        tasks: Sequence[Task],
        on_episode: Callable[[EpisodeRecord], object],
        tools: RunTools | None = None,
        tool_calls: ToolCallsConfig | None = None,
    ) -> RolloutJob:
        """The job that plays `tasks`, one for each id, with `tools` and the limits of their calls.

        Errors: ConfigError for functions that `tools` do not have, or that the environment has too.
        """
        names = [function.name for function in tools.functions] if tools else []
        tasks = [task.model_copy(update={"tools": self.tools}) for task in tasks]
        for task in tasks[:1]:
            if fault := unknown_function(task, names):
                raise ConfigError(fault)
        if tools is not None and self.format == "tools":
            joined_functions(envs.tools(), tools.functions)
        config = RolloutConfig(
            format=self.format,
            tool_calls=tool_calls or ToolCallsConfig(),
            system_prompt=self.system_prompt,
            max_turns=self.max_round,
            max_tokens_per_turn=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            concurrency=self.concurrency,
            episode_deadline_s=self.episode_deadline_s,
            max_retries=self.max_retries,
        )
        work = [
            (task, EpisodeRecord(id=id, task_id=task.id, tier=task.tier))
            for id, task in zip(self.ids, tasks, strict=True)
        ]
        seed, deadline = self.seed, self.deadline_s
        return RolloutJob(
            endpoint,
            envs,
            config,
            work,
            seed=seed,
            deadline_s=deadline,
            tools=tools,
            on_episode=on_episode,
        )


class RolloutAnswer(Wire):
    """The statistics of a job, and the record of each id, in the order of the request.

    Means are over the `num_evaluated` episodes that could be scored, and null if there is none.
    `stopped` is the reason for an early end: "deadline" or "cancelled".
    """

    env: str
    mean_reward: float | None
    success_rate: float | None
    num_evaluated: int
    num_ids: int
    time_taken: float
    stopped: str | None = None
    results: list[EpisodeRecord]


def answer_of(
    env: str, episodes: list[EpisodeRecord], seconds: float, stopped: str | None
) -> RolloutAnswer:
    """The answer of a job, complete or not."""
    scored = [e for e in episodes if e.scored]
    rewards = [e.reward for e in scored if e.reward is not None]
    return RolloutAnswer(
        env=env,
        mean_reward=sum(rewards) / len(scored) if scored else None,
        success_rate=sum(e.success for e in scored) / len(scored) if scored else None,
        num_evaluated=len(scored),
        num_ids=len(episodes),
        time_taken=round(seconds, 3),
        stopped=stopped,
        results=episodes,
    )


def agentgym_spec(spec: Spec, tier: str | None) -> Spec:
    """The environment with AgentGym's arguments, if the ids are AgentGym's."""
    if spec.name not in ITEMS or tier is not None:
        return spec
    return Spec(name=spec.name, args={**ITEMS[spec.name].args, **spec.args})


def tasks_of(spec: Spec, ids: Sequence[int | str], tier: str | None) -> Iterator[Task]:
    """The task of each id. Errors: ConfigError for an id that the environment does not have."""
    env_class: Any = ENVS.load(spec.name)
    if not hasattr(env_class, "task"):
        raise ConfigError(f"{spec.name} does not make tasks from seeds")
    for id in ids:
        if isinstance(id, str) and tier is not None:
            raise ConfigError(f"{id!r:.80}: AgentGym's items have no tier; leave `tier` out")
        index = index_of(spec.name, id) if isinstance(id, str) else id
        try:
            if spec.name in ITEMS and tier is None:
                yield task_of(spec.name, env_class, index)
            else:
                yield env_class.task(tier, index)
        except LudusError:
            raise
        except NotImplementedError:
            raise ConfigError(f"{spec.name} does not make tasks from seeds") from None
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(f"id {id!r}: {error}") from error


def parse_ids(text: str | None) -> list[int | str]:
    """Parse a list of ids such as `0-99,120,babyai_3`. Errors: ConfigError."""
    ids: list[int | str] = []
    for part in filter(None, (part.strip() for part in (text or "").split(","))):
        if match := re.fullmatch(r"(\d{1,18})-(\d{1,18})", part):
            first, last = int(match[1]), int(match[2])
            if not first <= last < first + MAX_IDS:
                raise ConfigError(f"--ids: {part} is not a range of at most {MAX_IDS} ids")
            ids += range(first, last + 1)
        elif re.fullmatch(r"\d{1,18}", part):
            ids.append(int(part))
        elif re.fullmatch(r"[a-z]+_\d{1,12}", part):
            ids.append(part)
        else:
            raise ConfigError(f"--ids: {part!r:.80} must look like 12, 0-99 or babyai_12")
    return ids
