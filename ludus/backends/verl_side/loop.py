"""ludus in verl's processes: the data set, the agent loop, the sampler.

    TaskRows     the data set: a row names a task by its place
    LudusLoop    verl's hook: one call plays one episode with the episode driver
    VerlSampler  verl's `generate` as a `Sampler`
    QuickBuffer  verl's replay buffer, which looks for finished groups more often

Rows have the ids that the engine saw and sampled; verl gets no text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.data import Dataset
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
)
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from ludus.backends.host_side.player import Player, rows_of
from ludus.backends.host_side.sampler import Sessionless, engine_settings
from ludus.config.schema import RunConfig
from ludus.core.errors import SamplerError
from ludus.core.types import Trajectory
from ludus.models.samplers.base import Completion, SamplingParams, check_turn


class TaskRows(Dataset[dict[str, Any]]):
    """The tasks of one split in the order of training; a file has one JSON line a task."""

    def __init__(self, data_files: str, **_: Any) -> None:
        self._split = Path(data_files).stem
        with open(data_files, encoding="utf-8") as lines:
            self._size = sum(1 for _ in lines)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, place: int) -> dict[str, Any]:
        return {
            "raw_prompt": [],
            "agent_name": "ludus",
            "data_source": self._split,
            "reward_model": {"style": "ludus", "ground_truth": ""},
            "index": place,
        }


class QuickBuffer(ReplayBuffer):  # type: ignore[misc]
    """Looks for finished groups every 50 ms, not every 2 s: steps of tiny models take less."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"poll_interval": 0.05, **options})


class VerlSampler(Sessionless):
    """Samples turns with verl's servers, whose answers have the version of the weights."""

    def __init__(self, servers: Any, context_length: int, num_ids: int, decode: Any) -> None:
        self.context_length = context_length
        self._servers, self._num_ids, self._decode = servers, num_ids, decode

    async def sample(
        self, prompt_ids: list[int], params: SamplingParams, *, session: str
    ) -> Completion:
        """Sample one turn. Errors: ContextOverflow; SamplerError where verl's server fails."""
        check_turn(prompt_ids, params, self.context_length, self._num_ids)
        wanted = {**engine_settings(params), "logprobs": True}
        try:
            answer = await self._servers.generate(
                request_id=session, prompt_ids=prompt_ids, sampling_params=wanted
            )
        except Exception as error:
            raise SamplerError(f"verl's server failed: {error!r:.300}") from error
        ids, version = list(answer.token_ids), answer.extra_fields.get("global_steps")
        if answer.log_probs is None or not ids or answer.stop_reason == "aborted":
            raise SamplerError("verl's server aborted the turn")
        stopped = len(ids) < params.max_tokens or self._is_stopped(ids, params)
        return Completion(
            ids, list(answer.log_probs), "stop" if stopped else "length", int(version or 0)
        )

    def _is_stopped(self, ids: list[int], params: SamplingParams) -> bool:
        """True if a turn of the full length ends with a stop."""
        if ids[-1] in params.stop_token_ids:
            return True
        return bool(params.stop) and any(s in self._decode(ids) for s in params.stop)


class LudusLoop(AgentLoopBase):  # type: ignore[misc]
    """verl's agent loop: plays one episode. verl makes one for each."""

    def __init__(self, server_manager: Any, tokenizer: Any, **_: Any) -> None:
        # Not verl's own initialisation: it prepares a renderer, and ludus renders.
        def sampler_of(config: RunConfig, num_ids: int) -> VerlSampler:
            length = config.model.context_length
            return VerlSampler(server_manager, length, num_ids, tokenizer.decode)

        self._player = Player.of_this_process(sampler_of)

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        """Returns the rows of an episode; none where it cannot train, so verl leaves it out."""
        split, place = str(row["data_source"]), int(row["index"])
        step = int(row["global_steps"])
        trajectory = await self._player.play(str(row["uid"]), split, place, step)
        return [] if trajectory is None else rows(trajectory)


def rows(trajectory: Trajectory) -> list[AgentLoopOutput]:
    """Returns verl's rows of a trajectory."""
    success = trajectory.metrics.get("success", 0.0)
    versions = [v for segment in trajectory.segments for v, _ in segment.runs]
    return [
        AgentLoopOutput(
            prompt_ids=row.prompt_ids,
            response_ids=row.response_ids,
            response_mask=row.mask,
            response_logprobs=row.logprobs,
            reward_score=trajectory.reward,
            num_turns=trajectory.num_turns,
            metrics=AgentLoopMetrics(generate_sequences=trajectory.metrics.get("seconds", 0.0)),
            extra_fields={
                "reward_extra_info": {"success": success},
                "min_global_steps": min(versions, default=0),
                "max_global_steps": max(versions, default=0),
            },
        )
        for row in rows_of(trajectory)
    ]
