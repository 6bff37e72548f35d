"""Walks to a goal, for the agents beside this file: tasks from seeds, and the game.

An agent reads where the goal is, among other things that it sees, and says a direction a turn.
"""

from __future__ import annotations

STEPS = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}
THINGS = [
    "tree", "house", "lake", "hill", "road", "stone", "gate", "tower", "farm", "bridge",
    "river", "field", "barn", "well", "fence", "church", "pond", "mill", "garden", "wall",
]  # fmt: skip
DISTANCES = (2, 3)


class Walk:
    """A walk. `data`: the goal's place, east and north of the start, and the sights by turn."""

    def __init__(self, data: dict[str, list]) -> None:
        self.left, self._sights = list(data["goal"]), data["sights"]
        self._distance = self.distance
        self.turns = 0

    @property
    def distance(self) -> int:
        return abs(self.left[0]) + abs(self.left[1])

    @property
    def done(self) -> bool:
        return not self.distance or self.turns == len(self._sights)

    @property
    def reward(self) -> float:
        """1 at the goal, less in its direction."""
        return max(0.0, 1 - self.distance / self._distance) if self.distance else 1.0

    def view(self) -> str:
        """The message before a turn."""
        east, north = self.left
        ways = ["north"] * (north > 0) + ["south"] * (north < 0)
        ways += ["east"] * (east > 0) + ["west"] * (east < 0)
        seen = [f"a {thing} in the {way}" for thing, way in self._sights[self.turns]]
        return f"{seen[0]} , the goal in the {' '.join(ways)} , {seen[1]} , {seen[2]} ."

    def move(self, text: str) -> None:
        """Walk in the first direction of a text; without any, stay."""
        for word in text.split():
            if word in STEPS:
                self.left = [a - b for a, b in zip(self.left, STEPS[word], strict=True)]
                break
        self.turns += 1


def walks(num_tasks: int, first_seed: int = 0) -> list:
    """Tasks, one a seed. There is a turn for each step of the shortest way, and no more."""
    # Here, since the program beside this file has no ludus, and starts anew for each episode.
    from random import Random

    from ludus import Message, Task

    tasks = []
    for seed in range(first_seed, first_seed + num_tasks):
        random, goal = Random(seed), (0, 0)
        while abs(goal[0]) + abs(goal[1]) not in DISTANCES:
            goal = (random.randint(-2, 2), random.randint(-2, 2))
        turns = abs(goal[0]) + abs(goal[1])
        sights = [
            [(random.choice(THINGS), random.choice(list(STEPS))) for _ in range(3)]
            for _ in range(turns)
        ]
        data = {"goal": goal, "sights": sights}
        prompt = [Message(role="user", content=Walk(data).view())]
        tasks.append(Task(id=f"walk-{seed}", prompt=prompt, data=data, source="walks"))
    return tasks
