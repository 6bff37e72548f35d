"""ALFWorld's engine in ludus against the stock engine: same games, commands and texts.

    python benchmarks/alfworld_speed.py [--games 6]

The expert plays each game once on each engine, alternately; then both execute the same aimless
commands. Every text and every list of commands is compared. Times are processor time.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from typing import Any

import textworld
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
from textworld.envs import PddlEnv

from ludus.core.types import Message, Task
from ludus.envs.alfworld import engine as alfworld_engine
from ludus.envs.alfworld import games as alfworld_games
from ludus.envs.alfworld.env import ALFWorld
from ludus.envs.alfworld.scenes import TASK_TYPES

Said = list[tuple[str, list[str]]]


class Ours:
    def __init__(self) -> None:
        self.engine = alfworld_engine.Engine()

    def reset(self, game: dict[str, Any]) -> tuple[str, list[str]]:
        return self.engine.reset(game), self.engine.commands

    def step(self, command: str) -> tuple[str, list[str]]:
        return self.engine.step(command), self.engine.commands


class Stock:
    """As ALFWorld's own environment stacks it."""

    def __init__(self) -> None:
        infos = textworld.EnvInfos(admissible_commands=True, won=True)
        self.env = AlfredDemangler(PddlEnv(infos), shuffle=False)

    def reset(self, game: dict[str, Any]) -> tuple[str, list[str]]:
        self.env.load({key: value for key, value in game.items() if key != "traj_data"})
        state = self.env.reset()
        return state.feedback, state["admissible_commands"]

    def step(self, command: str) -> tuple[str, list[str]]:
        state, _, _ = self.env.step(command)
        return state.feedback, state["admissible_commands"]


async def commands_of(task: Task, num_aimless: int) -> list[str]:
    """The expert's episode, with aimless commands before it."""
    env, rng = ALFWorld(), random.Random(task.id)
    commands, result = [], await env.reset(task)
    while True:
        aimless = len(commands) < num_aimless
        choices = result.info["available_actions"]
        commands.append(rng.choice(choices) if aimless else env.expert_action())
        result = await env.step(Message(role="assistant", content=commands[-1]))
        if result.done:
            await env.close()
            return commands


def play(
    engine: Ours | Stock, game: dict[str, Any], commands: list[str]
) -> tuple[Said, list[float]]:
    """Returns the texts, and the seconds of the reset and of the steps."""
    start = time.process_time()
    said = [engine.reset(game)]
    middle = time.process_time()
    said += [engine.step(command) for command in commands]
    return said, [middle - start, time.process_time() - middle]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--games", type=int, default=6)
    parser.add_argument("--aimless", type=int, default=10)
    args = parser.parse_args()
    engines = {"ludus": Ours(), "stock": Stock()}
    resets = {name: [0.0, 0.0] for name in engines}  # the first of a game, and the next
    steps, num_steps = dict.fromkeys(engines, 0.0), 0
    for number in range(args.games):
        task = ALFWorld.task(TASK_TYPES[number % len(TASK_TYPES)], 1000 + number)
        game = alfworld_games.game_of(task)
        commands = asyncio.run(commands_of(task, args.aimless))
        alfworld_engine.forget()
        said: dict[str, Said] = {}
        for turn, names in enumerate((["ludus", "stock"], ["stock", "ludus"])):
            for name in names:
                alfworld_engine.fast(name == "ludus")
                said[name], (reset_s, steps_s) = play(engines[name], game, commands)
                resets[name][turn] += reset_s
                steps[name] += steps_s
            assert said["ludus"] == said["stock"], f"{task.id}: the texts differ"
        num_steps += 2 * len(commands)
    for name in engines:
        first, again = (seconds / args.games for seconds in resets[name])
        print(
            f"{name}: {num_steps / steps[name]:.1f} steps a second, "
            f"{first:.2f} s a first reset, {again:.2f} s another of the same game"
        )
    print(f"steps: {steps['stock'] / steps['ludus']:.1f} times the stock engine's speed")
    print(f"{num_steps} steps in {args.games} games, every text identical")


if __name__ == "__main__":
    main()
