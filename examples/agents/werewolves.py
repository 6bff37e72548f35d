"""Werewolves for seven: two wolves, and five villagers, one of them the seer.

Each night the wolves choose a victim, and the seer looks at a player. Each day everyone says a line
to all, and all vote: who has the most votes leaves; on a tie nobody. The village wins without
wolves, the wolves when they are as many as the others. Guide: docs/werewolves.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random

from ludus import Message, Model, Outcome, Task

NAMES = ["ann", "bob", "cleo", "dan", "eve", "finn", "gus"]
WOLVES, SEER = 2, 2
"""Players in the order of `Task.data["players"]`: two wolves, then the seer."""

RULES = (
    "game : you play werewolves . you are ann , a wolf with bob . you are cleo , the seer . you "
    "are dan , a villager . alive ann bob cleo dan eve finn gus look at whom ? eat whom ? say a "
    "line . vote for whom ? dan is a villager . ann says : bob leaves by vote , a wolf . dan "
    "leaves at night , a villager . a tie , nobody leaves ."
)
"""Every word of the game, in the tasks' prompt: there a tokenizer from scratch learns them."""

Ask = Callable[[str, str], Awaitable[str]]
"""Asks a player, by name, and returns the answer."""


class Game:
    """A game. `ask` reaches the players; `random` decides where an answer names nobody."""

    def __init__(self, players: list[str], ask: Ask, random: Random) -> None:
        self.wolves, self.seer = players[:WOLVES], players[SEER]
        self.alive = sorted(players)
        self._ask, self._random = ask, random
        self._news: dict[str, list[str]] = {name: [] for name in players}
        self.asked: Counter[str] = Counter()
        self.unclear: Counter[str] = Counter()

    def role(self, name: str) -> str:
        return "wolf" if name in self.wolves else "villager"

    @property
    def winner(self) -> str | None:
        wolves = sum(name in self.wolves for name in self.alive)
        if not wolves:
            return "villager"
        return "wolf" if 2 * wolves >= len(self.alive) else None

    async def play(self) -> str:
        """Play to the end. Returns the role that wins."""
        for name in self._news:
            self._tell([name], self._introduction(name))
        while self.winner is None:
            await self._night()
            if self.winner is None:
                await self._day()
        assert self.winner is not None
        return self.winner

    async def _night(self) -> None:
        if self.seer in self.alive:
            looked = await self._choose(self.seer, "look at whom ?", [self.seer])
            self._tell([self.seer], f"{looked} is a {self.role(looked)} .")
        votes = [
            await self._choose(wolf, "eat whom ?", self.wolves)
            for wolf in self.wolves
            if wolf in self.alive
        ]
        self._leave(Counter(votes).most_common(1)[0][0], "at night")

    async def _day(self) -> None:
        for name in list(self.alive):
            said = " ".join((await self._question(name, "say a line .")).split()[:20])
            self._tell(self.alive, f"{name} says : {said}")
        votes = [await self._choose(name, "vote for whom ?", [name]) for name in list(self.alive)]
        first, *others = Counter(votes).most_common(2)
        if others and others[0][1] == first[1]:
            self._tell(self.alive, "a tie , nobody leaves .")
        else:
            self._leave(first[0], "by vote")

    def _leave(self, name: str, how: str) -> None:
        self.alive.remove(name)
        self._tell(self.alive, f"{name} leaves {how} , a {self.role(name)} .")

    async def _choose(self, name: str, question: str, without: list[str]) -> str:
        """The first player that an answer names; one at random if it names none that may be."""
        allowed = [other for other in self.alive if other not in without]
        answer = await self._question(name, question)
        self.asked[self.role(name)] += 1
        named = [word for word in answer.lower().replace(".", " ").split() if word in allowed]
        if not named:
            self.unclear[self.role(name)] += 1
        return named[0] if named else self._random.choice(allowed)

    async def _question(self, name: str, question: str) -> str:
        """Ask with all that has happened since the player was last asked."""
        news, self._news[name] = self._news[name], []
        return await self._ask(name, " ".join(["game :", *news, "alive", *self.alive, question]))

    def _tell(self, names: list[str], text: str) -> None:
        for name in names:
            self._news[name].append(text)

    def _introduction(self, name: str) -> str:
        if name in self.wolves:
            (other,) = [wolf for wolf in self.wolves if wolf != name]
            return f"you are {name} , a wolf with {other} ."
        return f"you are {name} , {'the seer' if name == self.seer else 'a villager'} ."

    def outcome(self, winner: str) -> Outcome:
        """A role's reward is 1 for the win, less for its answers that named nobody."""
        rewards = {
            role: float(role == winner) - 0.5 * self.unclear[role] / max(self.asked[role], 1)
            for role in ("wolf", "villager")
        }
        unclear = {f"unclear_{role}": float(self.unclear[role]) for role in rewards}
        return Outcome(rewards=rewards, success=winner == "wolf", metrics=unclear)


async def run(task: Task, model: Model) -> Outcome:
    """Each player keeps its conversation."""
    talks: dict[str, list[Message]] = {name: [] for name in task.data["players"]}

    async def ask(name: str, text: str) -> str:
        talks[name].append(Message(role="user", content=text))
        talks[name].append(await model.role(game.role(name)).chat(talks[name]))
        return talks[name][-1].content

    game = Game(task.data["players"], ask, Random(task.id))
    return game.outcome(await game.play())


def games(num_tasks: int, first_seed: int = 0) -> list[Task]:
    """Games from seeds: who is a wolf, and who the seer."""
    tasks = []
    for seed in range(first_seed, first_seed + num_tasks):
        players = Random(seed).sample(NAMES, len(NAMES))
        prompt = [Message(role="user", content=f"{RULES} game {seed}")]
        tasks.append(Task(id=f"werewolves-{seed}", prompt=prompt, data={"players": players}))
    return tasks
