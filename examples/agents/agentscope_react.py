"""AgentScope's ReAct agent, with a calculator.

    ludus train examples/agents/sums.yaml agent=examples/agents/agentscope_react.py:run

Guide: docs/agents.md.
"""

from agentscope.agent import Agent
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel
from agentscope.permission import PermissionContext, PermissionMode
from agentscope.state import AgentState
from agentscope.tool import FunctionTool, Toolkit

from ludus import Model, Task
from ludus.tools.calculator import calculator as compute

PROMPT = "Use the calculator. Answer with the number alone."
BYPASS = PermissionContext(mode=PermissionMode.BYPASS)  # nobody is there to allow a call


def calculator(expression: str) -> str:
    """Compute the value of an arithmetic expression."""
    return compute(expression).content


async def run(task: Task, model: Model) -> None:
    account = OpenAICredential(api_key=model.api_key, base_url=model.base_url)
    chat = OpenAIChatModel(account, model.name, context_size=model.context_length)
    tools = Toolkit(tools=[FunctionTool(calculator)])
    agent = Agent("sums", PROMPT, chat, tools, state=AgentState(permission_context=BYPASS))
    await agent.reply(UserMsg("user", task.prompt[0].content))  # the judge scores the last message
