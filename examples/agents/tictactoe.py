"""Tic-tac-toe, from TextArena, for the roles `player` and `opponent`. Guide: docs/roles.md.

Training games are played by both roles; in held-out games the opponent moves at random.
"""

from __future__ import annotations

from random import Random

import textarena

from ludus import Message, Model, Outcome, Task

DRAW, FORFEIT, LOSS = 0.6, 0.5, 0.3
"""Rewards of a draw, of a game that the other lost by a wrong move, and of one lost with legal
moves. Who makes a wrong move gets a part of LOSS, more after more legal moves."""


async def run(task: Task, model: Model) -> Outcome:
    game = textarena.make("TicTacToe-v0-raw")
    game.reset(num_players=2, seed=0)
    game.state.error_allowance = 0  # a wrong move loses
    for square in task.data["opening"]:
        game.step(f"[{square}]")
    seats = ["player", "opponent"] if task.data["first"] else ["opponent", "player"]
    random = Random(task.id) if task.data["opponent"] == "random" else None
    done, num_moves = False, 0
    while not done:
        seat = game.state.current_player_id
        board = [mark for row in game.state.game_state["board"] for mark in row]
        if random is not None and seats[seat] == "opponent":
            move = str(random.choice([i for i, mark in enumerate(board) if not mark]))
        else:
            said = await model.role(seats[seat]).chat([view(board, "OX"[seat])])
            move = said.content.strip()
        done, _ = game.step(f"[{move}]")
        num_moves += 1
    rewards, infos = game.close()
    if any(info["invalid_move"] for info in infos.values()):
        value = {1: FORFEIT, -1: LOSS * (num_moves - 1) / 9}
    else:
        value = {1: 1.0, 0: DRAW, -1: LOSS}
    return Outcome(rewards={seats[i]: value[reward] for i, reward in rewards.items()})


def view(board: list[str], mark: str) -> Message:
    """The board as a player sees it: its squares, the other's, and the free ones."""
    squares = {"mine": mark, "theirs": "OX".replace(mark, ""), "free": ""}
    words = [
        f"{name} {' '.join(str(i) for i, held in enumerate(board) if held == what)}"
        for name, what in squares.items()
    ]
    return Message(role="user", content=" ".join(" ".join(words).split()))


def games(num_tasks: int, heldout: bool = False) -> list[Task]:
    """Games from openings of two moves, of which a quarter is held out."""
    tasks: list[Task] = []
    random = Random(int(heldout))
    while len(tasks) < num_tasks:
        opening = random.sample(range(9), 2)
        if ((opening[0] + 2 * opening[1]) % 4 == 0) != heldout:
            continue
        board = [""] * 9
        board[opening[0]], board[opening[1]] = "O", "X"
        opponent = "random" if heldout else "self"
        data = {"opening": opening, "first": random.random() < 0.5, "opponent": opponent}
        id = f"{opponent}-{len(tasks)}"
        tasks.append(Task(id=id, prompt=[view(board, "O")], data=data, source="tictactoe"))
    return tasks
