"""Agents that play `Say` as the built-in loop plays it, each with another client or framework."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import openai
from gateway_world import TOOL
from played_envs import SAY

from ludus.core.types import Message, ToolCall
from ludus.models.chat.renderer import Renderer

Play = Callable[..., Awaitable[None]]


class Game:
    """The episode's environment, with the replies of the built-in loop to turns without action."""

    def __init__(self, model: Any, env: Any, renderer: Renderer, style: str) -> None:
        self.model, self.style, self.has_tools = model, style, style == "tools"
        self._env, self._renderer = env, renderer
        self.done = False

    async def open(self) -> str:
        (message,) = (await self._env.reset()).messages
        return str(message.content)

    def refusal(self, num_calls: int) -> str | None:
        """The reply to the last turn, if it has no valid action. A turn that was cut ends all."""
        session = self.model._session
        if session.cut is not None:
            self.done = True
            return None
        error = self._renderer.parse(session.trajectory.segments[-1].token_ids).error
        if error is None and self.has_tools and num_calls != 1:
            error = f"make exactly one tool call a turn, not {num_calls}."
        return error

    async def step(self, text: str) -> str:
        return self._read(await self._env.step(text.strip()))

    async def call(self, arguments: dict[str, Any]) -> str:
        return self._read(await self._env.call(ToolCall(name="say", arguments=arguments)))

    async def after(self, text: str) -> str:
        """The reply to a turn without tool calls; empty at the end."""
        refused = self.refusal(0)
        if self.done:
            return ""
        return refused if refused is not None else await self.step(text)

    def _read(self, result: Any) -> str:
        self.done = result.done
        return "" if result.done else str(result.messages[0].content)


class Chat:
    """A conversation over some client: what the agents of APIs differ in."""

    def __init__(self, game: Game) -> None:
        self.game, self.model = game, game.model
        self.messages: list[Any] = []

    def tell(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def answer(self, id: str, text: str) -> None:
        self.messages.append({"role": "tool", "tool_call_id": id, "content": text})

    async def ask(self) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
        """The next turn: text, and the calls by id with their arguments."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close what the client holds."""


class InProcess(Chat):
    """`model.chat`."""

    def tell(self, text: str) -> None:
        self.messages = self.messages or [Message(role="system", content=self.game.style)]
        super().tell(text)

    async def ask(self) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
        reply = await self.model.chat(self.messages, [SAY] if self.game.has_tools else [])
        self.messages.append(reply)
        return reply.content, [(call.id, call.arguments) for call in reply.tool_calls]


class OpenAI(Chat):
    """OpenAI's client, without a socket."""

    def __init__(self, game: Game) -> None:
        super().__init__(game)
        self._client = self.client()
        self._tools: Any = {"tools": [TOOL]} if game.has_tools else {}
        self.messages = [{"role": "system", "content": game.style}]

    def client(self) -> openai.AsyncOpenAI:
        return self.model.openai()  # type: ignore[no-any-return]

    async def ask(self) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
        reply = await self._client.chat.completions.create(
            model=self.model.name, messages=self.messages, **self._tools
        )
        message = reply.choices[0].message
        self.messages.append(message.model_dump(exclude_none=True))
        calls: list[Any] = message.tool_calls or []
        return message.content or "", [(c.id, json.loads(c.function.arguments)) for c in calls]


class OverHttp(OpenAI):
    """The same on a socket."""

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=self.model.base_url, api_key=self.model.api_key, max_retries=0
        )

    async def close(self) -> None:
        await self._client.close()


class Responses(OverHttp):
    """OpenAI's Responses API, with the whole conversation in each request."""

    def __init__(self, game: Game) -> None:
        super().__init__(game)
        self.messages = []
        if game.has_tools:
            self._tools = {"tools": [{"type": "function", **TOOL["function"]}]}

    def answer(self, id: str, text: str) -> None:
        self.messages.append({"type": "function_call_output", "call_id": id, "output": text})

    async def ask(self) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
        reply = await self._client.responses.create(
            model=self.model.name,
            instructions=self.game.style,
            input=self.messages,
            store=False,
            **self._tools,
        )
        self.messages += [item.model_dump(exclude_none=True) for item in reply.output]
        calls = [item for item in reply.output if item.type == "function_call"]
        return reply.output_text, [(c.call_id, json.loads(c.arguments)) for c in calls]


class Messages(Chat):
    """Anthropic's Messages API."""

    def __init__(self, game: Game) -> None:
        import anthropic

        super().__init__(game)
        model = self.model
        self._client = anthropic.AsyncAnthropic(
            base_url=model.base_url.removesuffix("/v1"), api_key=model.api_key, max_retries=0
        )
        tool = {"name": "say", "description": SAY.description, "input_schema": SAY.parameters}
        self._tools: Any = {"tools": [tool]} if game.has_tools else {}

    def answer(self, id: str, text: str) -> None:
        block = {"type": "tool_result", "tool_use_id": id, "content": text}
        self.messages.append({"role": "user", "content": [block]})

    async def ask(self) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
        reply = await self._client.messages.create(
            model=self.model.name,
            system=self.game.style,
            max_tokens=1000,
            messages=self.messages,
            **self._tools,
        )
        self.messages.append({"role": "assistant", "content": reply.content})
        text = "".join(block.text for block in reply.content if block.type == "text")
        calls = [block for block in reply.content if block.type == "tool_use"]
        return text, [(call.id, dict(call.input)) for call in calls]

    async def close(self) -> None:
        await self._client.close()


def talking(kind: type[Chat]) -> Play:
    """The loop of an agent over an API."""

    async def play(game: Game) -> None:
        chat = kind(game)
        try:
            chat.tell(await game.open())
            while not game.done:
                text, calls = await chat.ask()
                refused = game.refusal(len(calls))
                if game.done:
                    return
                reply = refused
                if reply is None:
                    reply = await (game.call(calls[0][1]) if calls else game.step(text))
                if calls:
                    chat.answer(calls[0][0], reply)
                else:
                    chat.tell(reply)
        finally:
            await chat.close()

    return play


def stopping(game: Game) -> Any:
    """A client without a socket, which makes no call after the end of the game: frameworks ask for
    another turn after each result."""

    async def check(request: Any) -> None:
        if game.done:
            raise RuntimeError("the game has ended")

    return game.model.http_client(event_hooks={"request": [check]})


async def agents_sdk(game: Game) -> None:
    """The OpenAI Agents SDK."""
    from agents import Agent, FunctionTool, OpenAIChatCompletionsModel, Runner, set_tracing_disabled

    set_tracing_disabled(True)

    async def say(context: Any, arguments: str) -> str:
        return await game.call(json.loads(arguments))

    given = (SAY.name, SAY.description, SAY.parameters, say)
    tools: Any = [FunctionTool(*given, strict_json_schema=False)] if game.has_tools else []
    client = game.model.openai(http_client=stopping(game))
    model = OpenAIChatCompletionsModel(game.model.name, client)
    agent = Agent(name="say", instructions=game.style, model=model, tools=tools)
    items: list[Any] = [{"role": "user", "content": await game.open()}]
    while not game.done:
        result = await Runner.run(agent, items, max_turns=50)
        reply = await game.after(result.final_output)
        items = [*result.to_input_list(), {"role": "user", "content": reply}]


async def langgraph(game: Game) -> None:
    """A graph of LangGraph, with LangChain's client."""
    from langchain_core.messages import ToolMessage
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import tools_condition

    chat: Any = ChatOpenAI(
        model=game.model.name,
        base_url=game.model.base_url,
        api_key=game.model.api_key,
        http_async_client=stopping(game),
        max_retries=0,
    )
    chat = chat.bind_tools([TOOL]) if game.has_tools else chat

    async def ask(state: Any) -> Any:
        return {"messages": [await chat.ainvoke(state["messages"])]}

    async def act(state: Any) -> Any:
        calls = state["messages"][-1].tool_calls
        return {
            "messages": [
                ToolMessage(await game.call(call["args"]), tool_call_id=call["id"])
                for call in calls
            ]
        }

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("tools", act)
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", tools_condition)
    graph.add_edge("tools", "ask")
    run = graph.compile()
    messages: list[Any] = [("system", game.style), ("user", await game.open())]
    while not game.done:
        state = await run.ainvoke({"messages": messages}, {"recursion_limit": 100})
        reply = await game.after(state["messages"][-1].content)
        messages = [*state["messages"], ("user", reply)]


async def agentscope(game: Game) -> None:
    """AgentScope's agent, with its own memory."""
    from agentscope.agent import Agent
    from agentscope.credential import OpenAICredential
    from agentscope.message import TextBlock, UserMsg
    from agentscope.model import OpenAIChatModel
    from agentscope.permission import PermissionBehavior, PermissionDecision
    from agentscope.tool import ToolBase, ToolChunk, Toolkit

    class Say(ToolBase):
        name, description, input_schema = SAY.name, SAY.description, SAY.parameters
        is_concurrency_safe, is_read_only = False, True

        async def check_permissions(self, *args: Any, **kwargs: Any) -> Any:
            return PermissionDecision(behavior=PermissionBehavior.ALLOW, message="")

        async def call(self, **arguments: Any) -> ToolChunk:
            return ToolChunk(content=[TextBlock(text=await game.call(arguments))])

    account = OpenAICredential(api_key=game.model.api_key, base_url=game.model.base_url)
    chat = OpenAIChatModel(
        account,
        game.model.name,
        context_size=100_000,  # it shortens its memory before the context is full
        max_retries=0,
        client_kwargs={"http_client": stopping(game), "max_retries": 0},
    )
    tools = Toolkit(tools=[Say()] if game.has_tools else [])
    agent = Agent("say", game.style, chat, tools)
    reply = await game.open()
    while not game.done:
        said = await agent.reply(UserMsg("user", reply))
        reply = await game.after(said.get_text_content() or "")


APIS = {
    "model.chat": InProcess,
    "openai": OpenAI,
    "openai over HTTP": OverHttp,
    "Responses": Responses,
    "Messages": Messages,
}
FRAMEWORKS = {"agents": agents_sdk, "langgraph": langgraph, "agentscope": agentscope}

PROGRAM = """
import http.client, json, os, random
from urllib.parse import urlsplit

COLOURS = ("red", "green", "blue", "grey")
url = urlsplit(os.environ["OPENAI_BASE_URL"])
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
headers["Content-Type"] = "application/json"
connection = http.client.HTTPConnection(url.hostname, url.port)
with open(os.environ["LUDUS_TASK"]) as file:
    rng = random.Random(json.load(file)["data"]["seed"])
wanted = [rng.choice(COLOURS) for _ in range(3)]
messages = [{"role": "system", "content": "plain"}]
turn, reward, reply = 0, 0.0, "say " + wanted[0] + " ."
while turn < 3:
    messages.append({"role": "user", "content": reply})
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages})
    connection.request("POST", url.path + "/chat/completions", body, headers)
    answer = json.loads(connection.getresponse().read())
    if "choices" not in answer:
        break
    (choice,) = answer["choices"]
    messages.append(choice["message"])
    if choice["finish_reason"] == "length":
        break
    said, reply = choice["message"]["content"].strip(), "that is no colour ."
    if said in COLOURS:
        reward += said == wanted[turn]
        turn += 1
        reply = "" if turn == 3 else "say " + wanted[turn] + " ."
with open("outcome.json", "w") as file:
    json.dump({"reward": reward}, file)
"""
"""Plays `Say` in the style `plain`, and needs no package."""
