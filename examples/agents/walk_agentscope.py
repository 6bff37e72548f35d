"""AgentScope's agent walks to a goal: a reply a turn, with its own memory.

    ludus train recipes/agent-tiny-agentscope.yaml

Guide: docs/agents.md.
"""

from agentscope.agent import Agent
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel
from walk import Walk

from ludus import Model, Outcome, Task


async def run(task: Task, model: Model) -> Outcome:
    account = OpenAICredential(api_key=model.api_key, base_url=model.base_url)
    client = {"http_client": model.http_client()}  # without a socket
    length = model.context_length
    chat = OpenAIChatModel(account, model.name, context_size=length, client_kwargs=client)
    agent, walk = Agent("walker", "Walk to the goal.", chat), Walk(task.data)
    while not walk.done:
        reply = await agent.reply(UserMsg("user", walk.view()))
        walk.move(reply.get_text_content() or "")
    return Outcome(walk.reward, success=walk.reward == 1)
