"""TextWorldExpress: eight small text games, generated from seeds, on the authors' engine (Jansen
and Côté, EACL 2023, arXiv:2208.01174).

    user        Your task is to collect a coin. ...

                You are in the kitchen. In one part of the room you see ...
                actions: close door to south, inventory, look around, move east, take coin
    assistant   take coin
    user        You take the coin.
                The task is completed.

Games: cookingworld, twc (TextWorld Commonsense: tidy up), coin, mapreader, arithmetic, sorting,
simonsays and peckingorder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import Field
from textworld_express.constants import JAR_PATH

from ludus.core.errors import ConfigError, EnvError, did_you_mean
from ludus.core.types import Message, Observation, StepResult, Task
from ludus.envs.actions import Guide, MaxSteps, OneTool, act_tool, action_text, answer, printable
from ludus.envs.base import NoExpert
from ludus.envs.java.machine import Engine, Jvm, find_java
from ludus.envs.java.pool import JvmEnv, NumJvms, Session, pool_of

ENGINE = Engine(
    name="textworldexpress",
    jar=JAR_PATH,
    interface="textworldexpress.runtime.PythonInterface",
    draws=False,  # only arithmetic's generator does, and each call to it begins with a seed
)

GAMES: dict[str, int] = {
    "coin": 4,
    "simonsays": 6,
    "arithmetic": 6,
    "sorting": 7,
    "peckingorder": 10,
    "mapreader": 10,
    "twc": 16,
    "cookingworld": 27,
}
"""The games, and the approximate length of their gold paths."""

FIRST_SEEDS = {"train": 0, "dev": 10_000, "test": 20_000}
NUM_SEEDS = 1000
"""Number of seeds of a fold in the engine."""

UNSEEDED = frozenset({"coin", "twc"})
"""Games whose engine draws the gold path from an unseeded generator: another path each time."""

HIDDEN = frozenset({"coin"})
"""Games whose expert knows where the thing is that the agent looks for. A search by the rules alone
finds the coin in 11 turns in 52 % of the games, in 16 in 74 %, in 24 in 92 %."""

TRIES = 50
"""Maximum number of walks for a gold path of `twc`, as in the engine."""

GUIDE = """You play a text game: carry out the task with as few commands as you can. Answer with \
one command a turn, as the list of actions has them."""


class Game(NamedTuple):
    """The game of a task; there are 24,000."""

    name: str
    fold: str
    seed: int


class TextWorldExpress(JvmEnv, OneTool):
    """A game of TextWorldExpress; the task's data holds game, fold and seed.

    Reward: the step's increase of the game's score, which is 0 to 1. `StepResult.info` has
    `success`, `score`, `game` and `num_steps`.
    """

    success_at: ClassVar[float] = 0.999  # the sum of fractions, rounded
    max_turns: ClassVar[int] = 50
    several_processes: ClassVar[bool] = True
    tool = act_tool()

    def __init__(
        self,
        list_actions: Annotated[
            bool, Field(description="List the possible actions at the end of every observation.")
        ] = True,
        max_steps: MaxSteps = None,
        guide: Guide = False,
        num_jvms: NumJvms = 4,
        heap_mb: Annotated[
            int, Field(ge=64, description="Maximum size of a JVM's heap, in MiB.")
        ] = 256,
    ) -> None:
        find_java("textworldexpress")
        self.list_actions, self.max_steps, self.guide = list_actions, max_steps, guide
        self._pool = pool_of(ENGINE, num_jvms, heap_mb)

    async def reset(self, task: Task) -> Observation:
        await self.close()
        self._game = _named(task)
        self._taken = []
        self._score = 0.0
        opening, self._gold = self._open(self._load)
        text = f"{GUIDE}\n\n{opening}" if self.guide else opening
        return Observation(
            messages=[Message(role="user", content=text)], info={"game": self._game.name}
        )

    @classmethod
    def expert_knows_more(cls, task: Task, **args: Any) -> bool:
        return _named(task).name in HIDDEN

    def _load(self, session: Session) -> tuple[str, tuple[str, ...]]:
        return session.run(lambda engine: self._generate(engine, session.jvm))

    def _generate(self, engine: Any, jvm: Jvm) -> tuple[str, tuple[str, ...]]:
        """Generate the game. Returns its opening and its gold path."""
        game, classes = self._game, jvm.classes
        if game.name == "arithmetic":  # its generator draws from the engine's global one
            jvm.seed(game.seed)
        if game.name == "sorting":  # in the same call, so that no other game uses the copy
            _renew_problem(classes, game)
        # Loading reads the engine's lists of objects, which takes longer than all else.
        if engine.__dict__.get("loaded") != game.name:
            if error := engine.load(game.name, ""):
                raise EnvError(f"textworldexpress: {game.name}: {error}")
            engine.loaded = game.name
        drawn = game.name not in UNSEEDED
        state = json.loads(engine.generateNewGameJSON(game.seed, game.fold, drawn))
        path: tuple[str, ...] = ()
        if game.name != "coin":  # whose way is found when it is asked for
            if game.name == "twc":
                _draw_tidying(engine, classes, game)
            actions = classes.java.lang.String.join("\n", engine.getGoldActionSequence())
            path = tuple(actions.lower().splitlines())
        return f"{engine.getTaskDescription().strip()}\n\n{self._view(state)}", path

    def _view(self, state: dict[str, Any]) -> str:
        # The engine distinguishes T-shirt and t-shirt; our actions are in lower case.
        self._spelled = {action.lower(): action for action in state["validActions"]}
        lines = [line.rstrip() for line in state["observation"].strip().splitlines()]
        if self.list_actions:
            lines.append(f"actions: {', '.join(sorted(self._spelled))}")
        return "\n".join(lines)

    async def step(self, action: Message) -> StepResult:
        if self._session is None:
            raise EnvError(
                "textworldexpress: the episode is over, or was never reset; call reset first"
            )
        text = printable(action_text(self, action))
        spelled = self._spelled.get(text, text)
        state = json.loads(self._session.run(lambda engine: str(engine.stepJSON(spelled))))
        self._taken.append(text)
        reward, self._score = state["score"] - self._score, float(state["score"])
        success = bool(state["tasksuccess"]) or self._score >= 1
        terminated = success or bool(state["taskfailure"])
        truncated = not terminated and len(self._taken) == self.max_steps
        reply = self._view(state)
        if terminated or truncated:
            await self.close()
            end = "The task is completed." if success else "The task has failed."
            reply = f"{state['observation'].strip()}\n{'out of steps.' if truncated else end}"
        return StepResult(
            messages=answer(action, reply),
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            info={
                "success": success,
                "score": self._score,
                "game": self._game.name,
                "num_steps": len(self._taken),
            },
        )

    def expert_action(self) -> str:
        """The next action of the engine's gold path, in `coin` of the shortest way from here.

        Errors: NoExpert after leaving that path.
        """
        if self._session is None:
            raise NoExpert("textworldexpress: no episode is being played")
        taken = tuple(self._taken)
        if self._game.name == "coin" and (not self._gold or self._gold[: len(taken)] != taken):
            self._gold = taken + self._session.run(lambda engine: _way_to_coin(engine.game()))
        return self._next_of(self._gold)

    @classmethod
    def tiers(cls) -> Sequence[str]:
        """The games, shortest first; `coin/dev` and `coin/test` have held-out seeds."""
        find_java("textworldexpress")
        return [
            game if fold == "train" else f"{game}/{fold}" for fold in FIRST_SEEDS for game in GAMES
        ]

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        """The tier's game number `seed % 1000`; no tier: of all games."""
        games = list(GAMES)
        chosen = tier or games[seed % len(games)]
        name, slash, fold = chosen.partition("/")
        if name not in GAMES or (slash and fold not in FIRST_SEEDS):
            near = did_you_mean(*((fold, FIRST_SEEDS) if name in GAMES else (name, GAMES)))
            raise ConfigError(f"{chosen!r} is not a tier of textworldexpress{near}")
        fold = fold or "train"
        number = seed if tier else seed // len(games)
        return Task(
            id=f"textworldexpress/{tier or 'all'}/{seed}",
            data={"game": name, "fold": fold, "seed": FIRST_SEEDS[fold] + number % NUM_SEEDS},
            tier=chosen,
            source="textworldexpress",
        )


def _renew_problem(classes: Any, game: Game) -> None:
    """Replace a sorting problem in the engine's list by a new copy: the items to sort belong to the
    problem, so concurrent games of a JVM would otherwise share them."""
    by_name = classes.java.lang.Class.forName
    generator = by_name("textworldexpress.data.SortingProblemGenerator$")
    problems = generator.getField("MODULE$").get(None)
    old = problems.getProblem(game.seed, game.fold).get()
    items = old.getClass().getDeclaredField("inputItems")
    items.setAccessible(True)
    listed = getattr(problems, f"{game.fold}Set")()
    size = len(listed)
    places = ((game.seed + number) % size for number in range(size))  # it is the first of them
    place = next(place for place in places if listed[place] == old)
    listed[place] = classes.textworldexpress.preprocessing.SortingProblem(items.get(old))


def _way_to_coin(game: Any) -> tuple[str, ...]:
    """Returns the fewest commands that take the coin from here; empty: it cannot be reached.

    The engine's own path is a random walk of up to 26 rooms, so it is computed from the map.
    """
    # A room's JSON has its neighbours, doors and contents in one call, which is most of the time.
    walks: list[tuple[int, tuple[str, ...], str, Any]] = [(0, (), "", game.agentLocation)]
    seen = set[str]()
    while walks:
        _, walk, name, find = heappop(walks)  # no two walks are equal, so names are not compared
        if name in seen:
            continue
        place = find()
        room = json.loads(place.toJSON())
        if "coin" in room["contents"]:
            return (*walk, "take coin")
        seen.add(room["name"])
        for side in ("North", "South", "East", "West"):
            there, door = room[f"location{side}"], room[f"door{side}"]
            if there is not None and there not in seen:
                closed = door is not None and not door["isOpen"]
                opening = (f"open door to {side.lower()}",) if closed else ()
                longer = (*walk, *opening, f"move {side.lower()}")
                heappush(walks, (len(longer), longer, there, getattr(place, f"location{side}")))
    return ()


def _draw_tidying(engine: Any, classes: Any, game: Game) -> None:
    """Give the engine a gold path of `twc`, as its `mkGameWithGoldPath` does, but with a seed.

    The engine's agent plays, so each try has its own copy of the game.
    """
    generator = classes.scala.util.Random(game.seed)
    new_agent = classes.textworldexpress.goldagent.TWCGoldAgent
    for _ in range(TRIES):
        agent = new_agent(engine.gameGenerator().mkGame(game.seed, game.fold))
        tried = agent.mkGoldPath(generator)
        if tried.productElement(0):
            break
    getattr(engine, "goldPath_$eq")(tried.productElement(1))  # of a failed try: empty


def _named(task: Task) -> Game:
    """Returns the game of a task's data. Errors: EnvError."""
    where = f"textworldexpress: task {task.id!r}: data"
    name, fold, seed = (task.data.get(key) for key in ("game", "fold", "seed"))
    if not isinstance(name, str) or name not in GAMES:
        raise EnvError(f"{where}.game {name!r} is not a game{did_you_mean(str(name), GAMES)}")
    if not isinstance(fold, str) or fold not in FIRST_SEEDS:
        raise EnvError(f"{where}.fold {fold!r} is not a fold{did_you_mean(str(fold), FIRST_SEEDS)}")
    first = FIRST_SEEDS[fold]
    if type(seed) is not int or not first <= seed < first + NUM_SEEDS:
        raise EnvError(f"{where}.seed {seed!r} is not {first} to {first + NUM_SEEDS - 1}")
    return Game(name, fold, seed)
