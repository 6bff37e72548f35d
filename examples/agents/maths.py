"""AgentScope's ReAct agent computes with the run's Python tool. Guide: docs/maths-agent.md."""

from agentscope.agent import Agent
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel
from agentscope.permission import PermissionContext, PermissionMode
from agentscope.state import AgentState
from agentscope.tool import FunctionTool, Toolkit

from ludus import AgentTools, Model, Task

PROMPT = r"Compute with Python. Answer in \boxed{}."
BYPASS = PermissionContext(mode=PermissionMode.BYPASS)  # nobody is there to allow a call


async def run(task: Task, model: Model, tools: AgentTools) -> None:
    account = OpenAICredential(api_key=model.api_key, base_url=model.base_url)
    chat = OpenAIChatModel(
        account,
        model.name,
        context_size=model.context_length,
        client_kwargs={"http_client": model.http_client()},  # else a connection for each call
    )
    toolkit = Toolkit(tools=[FunctionTool(function) for function in tools.functions()])
    agent = Agent("maths", PROMPT, chat, toolkit, state=AgentState(permission_context=BYPASS))
    await agent.reply(UserMsg("user", task.prompt[0].content))  # the judge scores the last message
