"""The agent: one model, one environment, many turns -> one Trajectory."""

from __future__ import annotations

import math
from bdb import BdbQuit
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ludus.config.schema import RolloutConfig
from ludus.core.errors import (
    ContextOverflow,
    EnvError,
    EpisodeError,
    LudusError,
    Unscorable,
)
from ludus.core.seeds import derive_seed
from ludus.core.types import Message, Score, Status, Task, Trajectory
from ludus.models.chat.renderer import Renderer
from ludus.models.samplers.base import Sampler, SamplingParams
from ludus.rollout.acting import act
from ludus.rollout.host import HostedEnv
from ludus.rollout.session import TreeBuilder, with_system_prompt
from ludus.rollout.status import status_of
from ludus.tasks.mixture import for_part
from ludus.telemetry.occupancy import busy

if TYPE_CHECKING:
    from ludus.judges.base import Judge


@dataclass(frozen=True, slots=True)
class Agent:
    """Plays episodes: renders, samples, parses, steps, until the episode ends.

    Args:
        sampler: where turns come from.
        renderer: messages to ids and back.
        config: format, limits, sampling.
        judge: scores the episode where the environment does not; None: the sum of step rewards.
        on_error: called with the error that ended an episode; its cause is what went wrong.
    """

    sampler: Sampler
    renderer: Renderer
    config: RolloutConfig
    judge: Judge | None = None
    on_error: Callable[[EpisodeError], object] | None = None

    async def play(
        self, task: Task, env: HostedEnv | None, trajectory: Trajectory, seed: int
    ) -> None:
        """Fill `trajectory`, whose id names the sampler's session (the caller opens and closes it).

        Whatever goes wrong inside the episode ends up as its status and error; errors that concern
        the run (diverged weights, a broken config) are raised.
        """
        builder = TreeBuilder(trajectory)
        try:
            try:
                trajectory.status = await self._turns(task, env, builder, seed)
            except ContextOverflow as error:  # an end like any other: what it earned so far counts
                trajectory.status, trajectory.error = Status.TRUNCATED_LENGTH, str(error)
            if trajectory.num_turns:
                await self._score(task, env, trajectory)
            else:  # the policy had no say in it, so nothing of it may count against the policy
                trajectory.dropped = f"nothing was sampled: {trajectory.error}"
        except EpisodeError as error:
            trajectory.status, trajectory.error = status_of(error), str(error)
            if self.on_error is not None:
                self.on_error(error)

    async def _turns(
        self, task: Task, env: HostedEnv | None, builder: TreeBuilder, seed: int
    ) -> Status:
        config = self.config
        messages = list(task.prompt)
        if env is not None:
            messages += (await env.reset(task)).messages
            if not messages:
                raise EnvError("reset returned no messages, and the task has no prompt")
        messages = with_system_prompt(messages, config.system_prompt)
        builder.given(messages, self.renderer.open(messages))
        limit = for_part(config.max_turns, task)
        max_turns = limit or (env.env.max_turns if env else 1)
        for turn in range(max_turns):
            prompt = builder.prompt_ids
            room = self.sampler.context_length - len(prompt)
            if room < 1:
                raise ContextOverflow(
                    f"the conversation has {len(prompt)} tokens before turn {turn + 1}; "
                    f"model.context_length is {self.sampler.context_length}"
                )
            params = self._params(min(config.max_tokens_per_turn, room), derive_seed(seed, turn))
            completion = await self.sampler.sample(prompt, params, session=builder.trajectory.id)
            parsed = self.renderer.parse(completion.token_ids)
            segment = builder.sampled(completion, parsed.message)
            if completion.finish_reason == "length":
                return Status.TRUNCATED_LENGTH
            if env is None:
                return Status.COMPLETED
            result = await act(env, parsed.message, parsed.error, self.config.format, _refusal)
            segment.reward = result.reward
            if result.done:
                builder.given(result.messages, [])  # said by the environment, seen by nobody
                return Status.COMPLETED
            if turn + 1 < max_turns:
                builder.answered(parsed.message, result.messages, self.renderer)
        return Status.TRUNCATED_TURNS

    def _params(self, max_tokens: int, seed: int) -> SamplingParams:
        config = self.config
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            stop=tuple(config.stop),
            stop_token_ids=tuple(self.renderer.stop_token_ids),
            seed=seed,
        )

    async def _score(self, task: Task, env: HostedEnv | None, trajectory: Trajectory) -> None:
        """Set the reward: the judge's verdict, or the sum of what the steps earned."""
        if self.judge is not None:
            score = await _verdict(self.judge, task, trajectory)
            trajectory.reward, trajectory.scores = score.value, dict(score.parts)
            threshold = 1.0
        else:
            # An environment that scores only the last step leaves the others None. One that never
            # spoke of a reward in an episode that was cut has given nothing, which is 0.
            earned = [s.reward for s in trajectory.segments if s.reward is not None]
            if env is None or (not earned and trajectory.status is Status.COMPLETED):
                raise Unscorable("the environment gave no reward, and no `judge` is configured")
            trajectory.reward, trajectory.scores = sum(earned), env.env.scores()
            threshold = env.env.success_at
        trajectory.metrics["success"] = float(trajectory.reward >= threshold)


async def _verdict(judge: Judge, task: Task, trajectory: Trajectory) -> Score:
    """The judge's score. Errors: Unscorable where it breaks or gives none."""
    try:
        with busy("judge"):
            score = await judge(task, trajectory)
    except (LudusError, BdbQuit):
        raise
    except Exception as error:
        raise Unscorable(f"the judge raised {type(error).__name__}: {error}") from error
    if not isinstance(score, Score) or not math.isfinite(score.value):
        raise Unscorable(f"the judge returned {score!r:.80}; it has to return a finite Score")
    return score


def _refusal(turn: Message, error: str) -> list[Message]:
    return [Message(role="tool" if turn.tool_calls else "user", content=error)]
