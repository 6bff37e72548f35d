"""AgentScope's own compression of its context: a summary in place of the history."""

from __future__ import annotations

from typing import Any

import pytest
from agent_frameworks import WARNINGS
from rollout_world import Scripted

from ludus.config.schema import RolloutConfig
from ludus.core.types import Message, Spec, Status, Task, ToolCall
from ludus.models.chat.by_task import TaskRenderers
from ludus.models.chat.renderer import Renderer
from ludus.models.chat.tokenizers import train_tokenizer
from ludus.models.samplers.base import Completion, SamplingParams
from ludus.rollout.collect import Collector
from ludus.rollout.workflow import Agent
from ludus.services.gateway.gateway import HttpGateway
from ludus.train.batches.samples import rows

pytest.importorskip("agentscope", reason="needs the extra agents")
pytestmark = [pytest.mark.usefixtures("unclosed_clients"), pytest.mark.filterwarnings(*WARNINGS)]

SUMMARY = {
    "task_overview": "the word",
    "current_state": "looked it up",
    "important_discoveries": "it is red",
    "next_steps": "answer",
    "context_to_preserve": "none",
}


def calling(name: str, **arguments: Any) -> Message:
    return Message(role="assistant", tool_calls=[ToolCall(name=name, arguments=arguments)])


class Summarises(Scripted):
    """Looks up twice, summarises where it is asked to, and answers after the summary."""

    async def sample(
        self, prompt_ids: list[int], params: SamplingParams, *, session: str
    ) -> Completion:
        text = self.renderer.text(prompt_ids)
        if "continuation summary" in text:
            turn: Any = calling("generate_structured_output", **SUMMARY)
        elif "it is red" in text:
            turn = "red"
        else:
            turn = calling("look", page=text.count("lorem"))
        one = Scripted(self.renderer, turn)
        one.open(session)
        return await one.sample(prompt_ids, params, session=session)


async def run(task: Task, model: Any) -> float:
    from agentscope.agent import Agent as ReAct
    from agentscope.agent import ContextConfig
    from agentscope.credential import OpenAICredential
    from agentscope.message import UserMsg
    from agentscope.model import OpenAIChatModel
    from agentscope.permission import PermissionContext, PermissionMode
    from agentscope.state import AgentState
    from agentscope.tool import FunctionTool, Toolkit

    def look(page: int) -> str:
        """Read a page."""
        return "lorem " + "ipsum dolor sit amet " * 40

    account = OpenAICredential(api_key=model.api_key, base_url=model.base_url)
    client = {"http_client": model.http_client()}
    chat = OpenAIChatModel(account, model.name, context_size=900, client_kwargs=client)
    state = AgentState(permission_context=PermissionContext(mode=PermissionMode.BYPASS))
    tools = Toolkit(tools=[FunctionTool(look)])
    agent = ReAct(
        "reader", "Find the word.", chat, tools, state=state,
        context_config=ContextConfig(trigger_ratio=0.6, reserve_ratio=0.05),
    )  # fmt: skip
    message = await agent.reply(UserMsg("user", "Which word?"))
    return float(message.get_text_content() == "red")


async def test_each_sampled_token_trains_once_in_its_own_context() -> None:
    renderer = Renderer(train_tokenizer(Spec(name="bpe"), ["Which word?"], "plain"))
    collector = Collector(
        Summarises(renderer, "", context_length=20_000),
        TaskRenderers(renderer),
        RolloutConfig(max_retries=0, max_turns=12, deterministic=False),
        None,
        agent=Agent(run, frozenset({"task", "model"})),
        gateway=HttpGateway(),
    )
    try:
        (group,) = await collector.collect([Task(id="t")], 0, 1)
    finally:
        await collector.close()
    (played,) = group.trajectories
    assert (played.status, played.error, played.reward) == (Status.COMPLETED, None, 1.0)
    found = rows(played, 1.0)
    texts = [renderer.text(row.token_ids) for row in found]
    assert sum(sum(row.loss_mask) for row in found) == played.num_sampled_tokens
    history, summary, after = texts
    assert "lorem" in history
    assert "continuation summary" in summary
    assert "lorem" not in after
    assert after.count("it is red") == 1
