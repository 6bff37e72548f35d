"""A CodeAgent of smolagents, whose calls extend one another with the roles that the guide names."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from agent_frameworks import WARNINGS
from rollout_world import Scripted

from ludus.config.schema import RolloutConfig
from ludus.core.types import Spec, Status, Task
from ludus.models.chat.by_task import TaskRenderers
from ludus.models.chat.renderer import Renderer
from ludus.models.chat.tokenizers import train_tokenizer
from ludus.models.samplers.base import Completion, SamplingParams
from ludus.rollout.collect import Collector
from ludus.rollout.workflow import Agent
from ludus.services.gateway.gateway import HttpGateway
from ludus.train.batches.samples import rows

pytest.importorskip("smolagents", reason="needs the extra agents")
pytestmark = [pytest.mark.usefixtures("unclosed_clients"), pytest.mark.filterwarnings(*WARNINGS)]

TURNS = ["I compute.\n<code>\nprint(12 * 7 + 5)\n</code>", "<code>\nfinal_answer(89)\n</code>"]
ROLES = {"tool-call": "user", "tool-response": "user"}


class AfterTheResult(Scripted):
    """Computes, then answers, whichever session asks."""

    async def sample(
        self, prompt_ids: list[int], params: SamplingParams, *, session: str
    ) -> Completion:
        done = "Execution logs:\n89" in self.renderer.text(prompt_ids)
        one = Scripted(self.renderer, TURNS[done])
        one.open(session)
        return await one.sample(prompt_ids, params, session=session)


def run(task: Task, model: Any, roles: dict[str, str] | None) -> float:
    from smolagents import CodeAgent, LogLevel, OpenAIModel

    chat = OpenAIModel(
        model.name,
        api_base=model.base_url,
        api_key=model.api_key,
        custom_role_conversions=roles,
    )
    agent = CodeAgent([], chat, max_steps=3, verbosity_level=LogLevel.OFF)
    return float(agent.run("12 * 7 + 5 ?") == 89)


@pytest.mark.parametrize(("roles", "num_rows"), [(None, 2), (ROLES, 1)])
async def test_each_turn_trains_once(roles: dict[str, str] | None, num_rows: int) -> None:
    renderer = Renderer(train_tokenizer(Spec(name="bpe"), ["12 * 7 + 5 ?"], "plain"))
    collector = Collector(
        AfterTheResult(renderer, "", context_length=30_000),
        TaskRenderers(renderer),
        RolloutConfig(max_retries=0, max_turns=6, deterministic=False),
        None,
        agent=Agent(partial(run, roles=roles), frozenset({"task", "model"}), blocks=True),
        gateway=HttpGateway(),
    )
    try:
        (group,) = await collector.collect([Task(id="t")], 0, 1)
    finally:
        await collector.close()
    (played,) = group.trajectories
    assert (played.status, played.error, played.reward) == (Status.COMPLETED, None, 1.0)
    found = rows(played, 1.0)
    assert len(found) == num_rows
    assert sum(sum(row.loss_mask) for row in found) == played.num_sampled_tokens
