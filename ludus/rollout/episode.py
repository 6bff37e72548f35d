"""The episode driver: one task, one session, one environment, many turns.

    run_episode                      for each attempt: deadline, status, score, retry
      env.reset -> session.open
      session.turn -> env.step -> session.answer      until the episode ends
      judge, or the sum of the step rewards

All rollouts run through it: training and evaluation (`collect.Collector`), and episodes with an
endpoint's model (`jobs.RolloutJob`).
"""

from __future__ import annotations

import asyncio
import time
from bdb import BdbQuit
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ludus.config.schema import RolloutConfig
from ludus.core.errors import (
    ContextOverflow,
    EnvError,
    EpisodeError,
    EpisodeTimeout,
    LudusError,
    SamplerError,
    ToolError,
    Unscorable,
    described,
)
from ludus.core.types import Message, Score, Status, StepResult, Task, Trajectory
from ludus.envs.base import limits_of
from ludus.models.chat.parsing import parse_react
from ludus.rollout.hosts.blocked import watched_loop
from ludus.rollout.hosts.host import LARGEST, EnvFactory, HostedEnv, check_total
from ludus.rollout.hosts.threads import EnvThread, is_cancelled
from ludus.rollout.sessions.agent_session import AgentSession
from ludus.rollout.sessions.session import Session, Turn, TurnSession, with_system_prompt
from ludus.rollout.tool_use import EpisodeTools
from ludus.tasks.mixture import for_part
from ludus.telemetry.episodes import EPISODES
from ludus.telemetry.logs import get_logger
from ludus.telemetry.occupancy import busy
from ludus.telemetry.traces import Span, invoke_agent
from ludus.telemetry.waits import Waits, metered

if TYPE_CHECKING:
    from ludus.judges.base import Judge
    from ludus.rollout.workflow import Agent

log = get_logger(__name__)

STATUS_OF: dict[type[EpisodeError], Status] = {
    ToolError: Status.ERROR_TOOL,
    SamplerError: Status.ERROR_SAMPLER,
    EpisodeTimeout: Status.ERROR_TIMEOUT,
    Unscorable: Status.UNSCORABLE,
}
"""The status of an episode that ended with an error; any other error has status error_env."""


@dataclass(frozen=True, slots=True)
class Episode:
    """An episode to play.

    Args:
        judge: scores the episode in place of the environment.
        tools: answer its tool calls.
        agent: plays it with the session's model; None: the built-in agent, with `_play_turns`.
        on_error: called with the error that ended an attempt; its cause is the original error.
        on_end: called with the trajectory after the last attempt.
        retries: the number of retries for each reason, of all episodes that share it.
    """

    task: Task
    session: TurnSession | AgentSession
    envs: EnvFactory
    config: RolloutConfig
    judge: Judge | None = None
    tools: EpisodeTools | None = None
    agent: Agent | None = None
    on_error: Callable[[EpisodeError], object] | None = None
    on_end: Callable[[Trajectory], object] | None = None
    retries: Counter[str] = field(default_factory=Counter)


async def run_episode(thread: EnvThread, episode: Episode) -> None:
    """Play one episode; the result is its session's trajectory.

    Infrastructure failures are retried, up to `config.max_retries` times. An error inside the
    episode becomes its status and error text. Errors that concern the run (diverged weights, a
    wrong config) are raised. If the caller cancels, the trajectory keeps what was played so far.
    """
    session, config, tools = episode.session, episode.config, episode.tools
    trajectory = session.trajectory
    deadline = None if thread.inline else config.episode_deadline_s
    # An agent keeps its thread busy: its environment has another.
    env_thread = thread if episode.agent is None else EnvThread(inline=thread.inline)
    place = EPISODES.begin(trajectory)
    try:
        for attempt in range(1 + config.max_retries):
            if attempt:
                _tell_retry(episode, attempt)
                session.close()
            session.start()
            if tools is not None:
                tools.start(attempt)
            started, timer = time.monotonic(), asyncio.timeout(deadline)
            env: HostedEnv | None = None
            waits = Waits()
            try:
                env = episode.envs.host(episode.task, env_thread, config.step_deadline_s)
                with watched_loop(deadline), metered() as waits, _span(episode, attempt) as span:
                    async with timer:
                        if isinstance(session, AgentSession):
                            assert episode.agent is not None
                            end = await episode.agent.run(episode.task, session, env, thread, tools)
                        else:
                            end = await _play_turns(episode, session, env)
                        session.end(*end)
                        await _score(episode, env)
                        session.share_reward()
                    _record(span, trajectory)
            except EpisodeError as error:
                kinds = (status for kind, status in STATUS_OF.items() if isinstance(error, kind))
                session.end(next(kinds, Status.ERROR_ENV), str(error))
                if episode.on_error is not None:
                    episode.on_error(error)
            except TimeoutError:
                if not timer.expired():
                    raise
                limit = f"rollout.episode_deadline_s = {deadline:g} s"
                session.end(Status.ERROR_TIMEOUT, f"the episode took longer than {limit}")
            except asyncio.CancelledError:
                session.end(Status.ABORTED, "the run was stopped")
                raise
            finally:
                try:
                    if tools is not None:
                        await tools.end()
                finally:
                    if env is not None:
                        await env.close()
            if tools is not None:
                trajectory.metrics["tool_errors"] = float(tools.num_errors)
            if waits.seconds is not None:
                trajectory.metrics["endpoint_wait_seconds"] = waits.seconds
            if env is not None:
                trajectory.metrics["env_seconds"] = env.seconds
            trajectory.metrics["seconds"] = time.monotonic() - started
            trajectory.metrics["retries"] = float(attempt)
            if not trajectory.status.retryable:
                break
    finally:
        EPISODES.end(place)
        session.close()
        if env_thread is not thread:
            env_thread.close()
    if episode.on_end is not None:
        episode.on_end(trajectory)


MAX_REASONS = 10
"""Reasons of retries that are counted, and told, each for itself."""


def _tell_retry(episode: Episode, attempt: int) -> None:
    """Log a retry. A fault of an agent or an environment is that of all its episodes: after three
    times, one reason is told at the 10th, the 100th, and so on. Texts that differ in each episode
    count as one reason from the 10th on."""
    trajectory, retries = episode.session.trajectory, episode.retries
    status, error = trajectory.status.value, trajectory.error
    reason = f"{status} {error}"[:200]
    if reason not in retries and len(retries) >= MAX_REASONS:
        reason = "others"
    retries[reason] += 1
    num = retries[reason]
    if num <= 3 or str(num).strip("0") == "1":
        fields = {"attempt": attempt + 1, "status": status, "error": error}
        tier = {"tier": episode.task.tier} if episode.task.tier is not None else {}
        again = {"times": num} if num > 3 else {}
        which = {"trajectory": trajectory.id, "task": trajectory.task_id}
        log.warning("retrying episode", **which, **tier, **fields, **again)


def _span(episode: Episode, attempt: int) -> Span:
    trajectory = episode.session.trajectory
    return invoke_agent(
        trajectory.role,
        conversation=trajectory.id,
        task=trajectory.task_id,
        policy=trajectory.policy,
        attempt=attempt + 1,
    )


def _record(span: Span, trajectory: Trajectory) -> None:
    """Set the outcome of an attempt on its span; an error that ends it is recorded by the span."""
    span.set(status=trajectory.status.value)
    if trajectory.reward is not None:
        span.scored("reward", trajectory.reward)


async def _play_turns(
    episode: Episode, session: TurnSession, env: HostedEnv | None
) -> tuple[Status, str | None]:
    """Play the turns. Returns how the episode ended, and the error text of an overflow."""
    task, config, tools = episode.task, episode.config, episode.tools
    messages = list(task.prompt)
    if env is not None:
        messages += (await env.reset(task)).messages
        if not messages:
            raise EnvError("reset returned no messages, and the task has no prompt")
    session.open(with_system_prompt(messages, config.system_prompt))
    limit = for_part(config.max_turns, task)
    in_turns = tools is not None and config.format != "code"  # else calls stand inside a turn
    num_calls = tools.max_calls if tools is not None and in_turns else 0
    max_turns = limit or (env.max_turns if env else 1) + num_calls
    for number in range(1, max_turns + 1):
        if tools is not None:
            tools.begin_turn()
        try:
            turn = await session.turn()
        except ContextOverflow as error:  # a regular end: earned rewards count
            return Status.TRUNCATED_LENGTH, str(error)
        if turn.finish_reason == "length":
            return Status.TRUNCATED_LENGTH, None
        result = await _answer(episode, session, env, turn)
        if result is None:
            return Status.COMPLETED, None
        spent = tools is not None and tools.spent
        session.answer(result, turn_follows=number < max_turns and not spent)
        if result.done:
            return Status.COMPLETED, None
        if spent:
            break
    return Status.TRUNCATED_TURNS, None


async def _answer(
    episode: Episode, session: TurnSession, env: HostedEnv | None, turn: Turn
) -> StepResult | None:
    """The tools' or the environment's answer to a turn; None where the turn ends the episode."""
    tools, format = episode.tools, episode.config.format
    message, error = turn.message, turn.error
    if tools is not None and tools.done:  # inside the turn
        return None
    if tools is not None and tools.spent:
        return StepResult()
    if tools is not None and error is None and (calls := message.tool_calls):
        acts = [c for c in calls if env and format == "tools" and c.name not in tools.offered]
        if not acts:
            return StepResult(messages=await tools.answer(calls), terminated=tools.done)
        if len(acts) < len(calls):
            turn = replace(turn, error="call tools, or act once: not both in one turn.")
    if env is not None:
        return await _act(env, turn, format, session.refusal)
    if tools is None or error is None or format == "code":
        return None
    tools.malformed()
    return StepResult(messages=session.refusal(message, error))


async def _act(
    env: HostedEnv, turn: Turn, format: str, refusal: Callable[[Message, str], list[Message]]
) -> StepResult:
    """Step the environment with the turn's action.

    A turn without a valid action does not reach the environment: its reply is `refusal`.
    """
    message, error = turn.message, turn.error
    if error is None and format == "tools":
        if len(message.tool_calls) == 1:
            return await env.call(message.tool_calls[0])
        error = f"make exactly one tool call a turn, not {len(message.tool_calls)}."
    action = message.content.strip()
    if error is None and format == "react":
        react = parse_react(message.content)
        action, error = react.action, react.error
    if error is not None:
        return StepResult(messages=refusal(message, error))
    return await env.step(Message(role="assistant", content=action))


async def _score(episode: Episode, env: HostedEnv | None) -> None:
    """Set the reward: the judge's score, or the sum of the step rewards. Errors: Unscorable."""
    session, judge = episode.session, episode.judge
    trajectory = session.trajectory
    if not session.played() or trajectory.reward is not None:  # by the agent
        return
    if judge is not None:
        score = await _judge(judge, episode.task, session)
        parts, success = dict(score.parts), score.succeeded
        session.set_reward(score.value, parts, success=success, explanation=score.explanation)
        return
    if env is None and isinstance(session, AgentSession) and session.any_cut is not None:
        session.set_reward(0.0, {}, success=False)  # as an environment that is cut: nothing earned
        return
    # An environment may score only the last step. An episode cut before any reward earned 0.
    rewards = [s.reward for s in trajectory.segments if s.reward is not None]
    if env is None or (not rewards and trajectory.status is Status.COMPLETED):
        raise Unscorable("the environment gave no reward, and no `judge` is configured")
    reward = sum(rewards)
    check_total(reward)
    score_range, success_at = limits_of(env.env)
    session.set_reward(
        reward,
        await env.scores(),
        success=reward >= success_at,
        score_range=score_range,
        explanation=await env.explanation(),
    )


async def _judge(judge: Judge, task: Task, session: Session) -> Score:
    """The judge's score. Errors: Unscorable where the judge raises or returns no finite Score."""
    try:
        with busy("judge"):
            score = await judge(task, session.trajectory)
    except (LudusError, BdbQuit):
        raise
    except asyncio.CancelledError as error:
        if is_cancelled():
            raise
        raise Unscorable("the judge raised CancelledError") from error
    except (Exception, SystemExit) as error:
        raise Unscorable(f"the judge raised {described(error)}") from error
    if not isinstance(score, Score) or not abs(score.value) <= LARGEST:
        raise Unscorable(f"the judge returned {score!r:.80}; it has to return a finite Score")
    try:
        "".join([score.explanation, *score.parts]).encode()
    except UnicodeEncodeError:
        raise Unscorable("the judge returned a Score with half a surrogate pair: no text") from None
    return score
