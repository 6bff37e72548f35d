"""AgentScope's ReAct agent solves AppWorld's tasks with code. Guide: docs/appworld-agent.md."""

from contextlib import aclosing

from agentscope.agent import Agent
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel
from agentscope.permission import PermissionContext, PermissionMode
from agentscope.state import AgentState
from agentscope.tool import FunctionTool, Toolkit

from ludus import AgentEnv, Model, Task

PROMPT = "Act with the tool `execute`, one piece of code at a time."
BYPASS = PermissionContext(mode=PermissionMode.BYPASS)  # nobody is there to allow a call


async def run(task: Task, model: Model, env: AgentEnv) -> None:
    async def execute(code: str) -> str:
        """Execute Python code in the interpreter of the episode; returns what it prints."""
        result = await env.step(code)
        return "\n".join(message.content for message in result.messages)

    opening = await env.reset()
    account = OpenAICredential(api_key=model.api_key, base_url=model.base_url)
    client = {"http_client": model.http_client()}  # else a connection for each call
    chat = OpenAIChatModel(
        account, model.name, context_size=model.context_length, client_kwargs=client
    )
    state = AgentState(permission_context=BYPASS)
    agent = Agent("appworld", PROMPT, chat, Toolkit(tools=[FunctionTool(execute)]), state=state)
    question = UserMsg("user", "\n".join(message.content for message in opening.messages))
    async with aclosing(agent.reply_stream(question)) as events:
        async for _ in events:
            if env.done:  # no further call of the model: the environment has scored the episode
                break
