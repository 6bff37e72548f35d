"""The agent: one model, one environment, many turns -> one Trajectory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ludus.core.errors import (
    ContextOverflow,
    EnvError,
    EpisodeError,
    EpisodeTimeout,
    ToolError,
    Unscorable,
)
from ludus.core.schema import RolloutConfig
from ludus.core.seeds import derive_seed
from ludus.core.types import Message, Status, StepResult, Task, Trajectory
from ludus.models.parsing import parse_react
from ludus.models.renderer import Renderer
from ludus.models.sampler import Sampler, SamplingParams
from ludus.rollout.host import HostedEnv
from ludus.rollout.tree import TreeBuilder

if TYPE_CHECKING:
    from ludus.judges.base import Judge

STATUS_OF: dict[type[EpisodeError], Status] = {
    ContextOverflow: Status.TRUNCATED_LENGTH,
    EnvError: Status.ERROR_ENV,
    ToolError: Status.ERROR_TOOL,
    EpisodeTimeout: Status.ERROR_TIMEOUT,
    Unscorable: Status.UNSCORABLE,
}


@dataclass(frozen=True, slots=True)
class Agent:
    """Plays episodes: renders, samples, parses, steps, until the episode ends.

    Args:
        sampler: where turns come from.
        renderer: messages to ids and back.
        config: format, limits, sampling.
        judge: scores the episode where the environment does not; None: the sum of step rewards.
    """

    sampler: Sampler
    renderer: Renderer
    config: RolloutConfig
    judge: Judge | None = None

    async def play(
        self, task: Task, env: HostedEnv | None, trajectory: Trajectory, seed: int
    ) -> None:
        """Fill `trajectory`, whose id names the sampler's session (the caller opens and closes it).

        Whatever goes wrong inside the episode ends up as its status and error; errors that concern
        the run (diverged weights, a broken config) are raised.
        """
        builder = TreeBuilder(trajectory)
        try:
            trajectory.status = await self._turns(task, env, builder, seed)
            await self._score(task, env, trajectory)
        except EpisodeError as error:
            trajectory.status = STATUS_OF[type(error)]
            trajectory.error = str(error)
            if trajectory.status.trainable:  # cut by the context: what it earned so far counts
                await self._score(task, env, trajectory)

    async def _turns(
        self, task: Task, env: HostedEnv | None, builder: TreeBuilder, seed: int
    ) -> Status:
        config = self.config
        messages = list(task.prompt)
        if config.system_prompt:
            messages.insert(0, Message(role="system", content=config.system_prompt))
        if env is not None:
            messages += (await env.reset(task)).messages
        builder.given(messages, self.renderer.open(messages))
        max_turns = config.max_turns or (env.env.max_turns if env else 1)
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
            result = await self._act(env, parsed.message, parsed.error)
            segment.reward = result.reward
            if result.done:
                builder.given(result.messages, [])  # said by the environment, seen by nobody
                return Status.COMPLETED
            if turn + 1 < max_turns:
                self._observe(builder, parsed.message, completion.token_ids, result.messages)
        return Status.TRUNCATED_TURNS

    async def _act(self, env: HostedEnv, message: Message, error: str | None) -> StepResult:
        """Step the environment; a turn that names no action is answered with what is wrong."""
        action, problem = self._action(env, message) if error is None else (None, error)
        if action is None:
            role = "tool" if message.tool_calls else "user"
            return StepResult(messages=[Message(role=role, content=problem)])
        result = await env.step(action)
        if message.tool_calls:
            call = message.tool_calls[0]
            for reply in result.messages[:1]:
                reply.role, reply.name, reply.tool_call_id = "tool", call.name, call.id
        return result

    def _action(self, env: HostedEnv, message: Message) -> tuple[Message | None, str]:
        """The action that a turn names in the configured format, or what is wrong with the turn."""
        if self.config.format == "plain":
            return Message(role="assistant", content=message.content.strip()), ""
        if self.config.format == "react":
            react = parse_react(message.content)
            if react.error is not None:
                return None, react.error
            return Message(role="assistant", content=react.action or ""), ""
        if len(message.tool_calls) != 1:
            return None, f"make exactly one tool call a turn, not {len(message.tool_calls)}."
        try:
            text = env.env.text_of(message.tool_calls[0])
        except (KeyError, TypeError, ValueError) as error:
            return None, f"{message.tool_calls[0].name}: {error}"
        return Message(role="assistant", content=text, tool_calls=message.tool_calls), ""

    def _observe(
        self, builder: TreeBuilder, turn: Message, sampled: list[int], replies: list[Message]
    ) -> None:
        """Append the environment's replies; under `strip`, in a branch without the thinking."""
        after = sampled
        if turn.thinking and self.renderer.thinking == "strip":
            after = self.renderer.strip_thinking(sampled)
            builder.replaced(turn.model_copy(update={"thinking": None}), after)
        builder.given(replies, self.renderer.extend(replies, after))

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
            score = await self.judge(task, trajectory)
            trajectory.reward, trajectory.scores = score.value, dict(score.parts)
            threshold = 1.0
        else:
            # An environment that scores only the last step leaves the others None. One that never
            # spoke of a reward in an episode that was cut has given nothing, which is 0.
            earned = [s.reward for s in trajectory.segments if s.reward is not None]
            if env is None or (not earned and trajectory.status is Status.COMPLETED):
                raise Unscorable("the environment gave no reward, and no `judge` is configured")
            trajectory.reward = sum(earned)
            threshold = env.env.success_at
        trajectory.metrics["success"] = float(trajectory.reward >= threshold)
