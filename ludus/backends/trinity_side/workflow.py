"""ludus as Trinity's workflow: a runner plays all episodes of a task with the episode driver.

    LudusWorkflow    Trinity's hook: one call plays one group
    TrinitySampler   Trinity's rollout model as a `Sampler`

Experiences have the ids that the engine saw and sampled; Trinity gets no text.
"""

from __future__ import annotations

from typing import Any

from trinity.common.experience import EID, Experience
from trinity.common.workflows import Workflow

from ludus.backends.host_side.player import Player, rows_of
from ludus.backends.host_side.sampler import Sessionless, engine_settings
from ludus.config.schema import RunConfig
from ludus.core.errors import SamplerError
from ludus.core.types import Trajectory
from ludus.models.samplers.base import Completion, SamplingParams, check_turn


class TrinitySampler(Sessionless):
    """Samples turns with Trinity's rollout model.

    Its public methods take texts, or no stop ids, so the method below them is called.
    """

    version = 0
    """Of the weights, which stay the same while a group is played."""

    def __init__(self, model: Any, context_length: int, num_ids: int) -> None:
        self.context_length = context_length
        self._model, self._num_ids = model, num_ids

    async def sample(
        self, prompt_ids: list[int], params: SamplingParams, *, session: str
    ) -> Completion:
        """Sample one turn. Errors: ContextOverflow; SamplerError where Trinity's model fails."""
        check_turn(prompt_ids, params, self.context_length, self._num_ids)
        wanted = {**engine_settings(params), "logprobs": 0}  # of the sampled ids alone
        try:
            answer = await self._model._generate_internal.remote(
                prompt={"prompt_token_ids": prompt_ids}, **wanted
            )
        except Exception as error:
            raise SamplerError(f"Trinity's rollout model failed: {error!r:.300}") from error
        output = answer.outputs[0]
        ids, reason = list(output.token_ids), output.finish_reason
        if not ids or reason not in ("stop", "length"):
            raise SamplerError(f"Trinity's rollout model ended the turn by {reason!r}")
        logprobs = [by_id[id].logprob for id, by_id in zip(ids, output.logprobs, strict=True)]
        return Completion(ids, logprobs, reason, type(self).version)


class LudusWorkflow(Workflow):  # type: ignore[misc]
    """Plays all episodes of a task. Trinity makes one for each task of a step."""

    is_async = True
    can_repeat = True

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        """The recipe has the number of episodes, and a task is played in one runner."""

    async def run_async(self) -> list[Experience]:
        """Returns the experiences of the episodes that can train. Errors: ValueError for none."""
        player = Player.of_this_process(self._sampler_of)
        TrinitySampler.version = await self.model.model_version_async
        split, place = str(self.task.raw_task["split"]), int(self.task.raw_task["place"])
        step = int(str(self.task.batch_id).partition("/")[0])
        played = await player.play_group(split, place, step)
        if not played:
            raise ValueError(f"no episode of task {place} of {split} can train")
        return [row for number, t in enumerate(played) for row in experiences(t, number)]

    def _sampler_of(self, config: RunConfig, num_ids: int) -> TrinitySampler:
        return TrinitySampler(self.model.model, config.model.context_length, num_ids)


def experiences(trajectory: Trajectory, number: int) -> list[Experience]:
    """Returns Trinity's experiences of a trajectory, which is `number` of its group."""
    return [
        Experience(
            eid=EID(run=number, step=step),
            tokens=[*row.prompt_ids, *row.response_ids],
            prompt_length=len(row.prompt_ids),
            action_mask=row.mask,
            logprobs=row.logprobs,
            reward=trajectory.reward,
            metrics={"success": trajectory.metrics.get("success", 0.0)},
        )
        for step, row in enumerate(rows_of(trajectory))
    ]
