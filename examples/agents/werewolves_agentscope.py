"""Werewolves with a player of AgentScope for each name, with its own memory. Guide:
docs/werewolves.md."""

from random import Random

from agentscope.agent import Agent
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel
from werewolves import Game

from ludus import Model, Outcome, Task

PROMPT = "you play werewolves ."


def player(name: str, model: Model) -> Agent:
    account = OpenAICredential(api_key=model.api_key, base_url=model.base_url)
    http = {"http_client": model.http_client()}
    chat = OpenAIChatModel(
        account, model.name, context_size=model.context_length, client_kwargs=http
    )
    return Agent(name, PROMPT, chat)


async def run(task: Task, model: Model) -> Outcome:
    async def ask(name: str, text: str) -> str:
        return (await players[name].reply(UserMsg("user", text))).get_text_content() or ""

    game = Game(task.data["players"], ask, Random(task.id))
    players = {name: player(name, model.role(game.role(name))) for name in task.data["players"]}
    return game.outcome(await game.play())
