"""BabyAI's macro actions: walk to an object or through a door in one turn, as in AgentGym.

Paths use only cells that the agent has seen, never the hidden state. An object gets a number at
first sight and keeps it for the episode: `red ball 1`, `red ball 2`.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from ludus.envs.babyai.world import Cell, Seen, can_toggle, cell_at, describe_object

if TYPE_CHECKING:
    from ludus.envs.babyai.expert import Expert

LEFT, RIGHT, FORWARD, PICK_UP, TOGGLE = 0, 1, 2, 3, 5
STEPS: tuple[Cell, ...] = ((1, 0), (0, 1), (-1, 0), (0, -1))
"""The step forward for each of minigrid's four directions; turning right adds one."""

VERBS = {
    "toggle and go through ": "toggle and go through",
    "go through ": "go through",
    "go to ": "go to",
    "pick up ": "pick up",
    "pickup ": "pick up",
}
"""Prefixes of macro actions. `pick up OBJECT` from afar is accepted, as in AgentGym, but not
listed."""

STATES = ("open", "closed", "locked")
"""State words before a door's name in the view; ignored in actions."""


class Macros:
    """Names, memory and paths of one episode."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self._names: dict[int, str] = {}
        self._objects: dict[str, Any] = {}
        self._counts: Counter[str] = Counter()
        self._places: dict[str, Cell] = {}
        self._seen: set[Cell] = {(int(world.agent_pos[0]), int(world.agent_pos[1]))}

    def see(self, cells: list[Seen]) -> None:
        """Remember the cells in view, and number new objects."""
        for cell in cells:
            self._seen.add(cell.position)
            if cell.kind not in ("", "wall"):
                self._places[self._base_name(cell.content)] = cell.position

    def _base_name(self, content: Any) -> str:
        """The name without a door's state: `red ball 1`, `red door 1`."""
        name = self._names.get(id(content))
        if name is None:
            kind = f"{content.color} {content.type}"
            self._counts[kind] += 1
            name = f"{kind} {self._counts[kind]}"
            self._names[id(content)] = name
            self._objects[name] = content  # keeps the object alive, so its id stays unique
        return name

    def name(self, content: Any) -> str:
        """An object's name in the view: `red ball 1:`, `closed red door 1:`."""
        state = describe_object(content).split()[0] + " " if content.type == "door" else ""
        mark = "" if content is self._world.carrying else ":"
        return f"{state}{self._base_name(content)}{mark}"

    def available(self, cells: list[Seen]) -> list[str]:
        """The macro actions that are possible now, on objects in view."""
        actions = []
        for cell in cells:
            if cell.kind in ("", "wall"):
                continue
            name = self._base_name(cell.content)
            if self._way(cell.position):
                actions.append(f"go to {name}")
            if cell.kind == "door":
                words = "go through" if cell.content.is_open else "toggle and go through"
                if not isinstance(self.plan(f"{words} {name}"), str):
                    actions.append(f"{words} {name}")
        return actions

    def plan(self, text: str) -> list[int] | str:
        """Returns the primitive actions of a macro action, or a message that says what is wrong."""
        for words, verb in VERBS.items():
            if text.startswith(words):
                named = text.removeprefix(words).removeprefix("the ").split()
                name = " ".join(word for word in named if word not in STATES)
                if name not in self._places:
                    return "you see no such object. "
                if self._objects[name] is not cell_at(self._world, self._places[name]):
                    return "it is not there any more. "
                return self._go(verb, name)
        return "no such action. "

    def _go(self, verb: str, name: str) -> list[int] | str:
        content, place = self._objects[name], self._places[name]
        way = self._way(place)
        if way is None:
            return "no free way there. "
        if verb == "go to":
            return way or "you are there. "
        if verb == "pick up":
            if not content.can_pickup():
                return "that cannot be picked up. "
            full = self._world.carrying is not None
            return "your hands are full. " if full else [*way, PICK_UP]
        if content.type != "door":
            return "that is no door. "
        if verb == "go through":
            return [*way, FORWARD, FORWARD] if content.is_open else "the door is not open. "
        if content.is_open:
            return "the door is open. "
        if not can_toggle(self._world, content):
            return "the door is locked. "
        return [*way, TOGGLE, FORWARD, FORWARD]

    def _way(self, goal: Cell) -> list[int] | None:
        """The shortest sequence of turns and steps until the agent faces `goal`, over free cells
        seen so far; None without a path.

        Breadth-first search over (cell, direction). Turns are tried before steps, left before
        right, so the path is deterministic.
        """
        start = (int(self._world.agent_pos[0]), int(self._world.agent_pos[1]))
        first = (start, int(self._world.agent_dir))
        came_from: dict[tuple[Cell, int], tuple[tuple[Cell, int], int]] = {}
        queue, known = deque([first]), {first}
        while queue:
            state = queue.popleft()
            (x, y), direction = state
            ahead = (x + STEPS[direction][0], y + STEPS[direction][1])
            if ahead == goal:
                way = []
                while state != first:
                    state, action = came_from[state]
                    way.append(action)
                return way[::-1]
            turns = ((direction - 1, LEFT), (direction + 1, RIGHT))
            options = [(((x, y), new % 4), action) for new, action in turns]
            if self._free(ahead):
                options.append(((ahead, direction), FORWARD))
            for following, action in options:
                if following not in known:
                    known.add(following)
                    came_from[following] = (state, action)
                    queue.append(following)
        return None

    def _free(self, cell: Cell) -> bool:
        if cell not in self._seen:
            return False
        content = cell_at(self._world, cell)
        return content is None or bool(content.can_overlap())

    def advised(self, expert: Expert, advice: int) -> str | None:
        """The macro action that matches the bot's next actions, or None.

        `go to X` if the bot walks to X, `toggle and go through X` if it opens a door and walks on.
        """
        target = expert.target()
        if target is not None and advice in (LEFT, RIGHT, FORWARD):
            content = cell_at(self._world, target)
            name = self._names.get(id(content)) if content is not None else None
            if name is not None and self._places[name] == target and self._way(target):
                return f"go to {name}"
        if advice == TOGGLE and expert.passes_door():
            dx, dy = STEPS[self._world.agent_dir]
            door = (int(self._world.agent_pos[0]) + dx, int(self._world.agent_pos[1]) + dy)
            name = self._names.get(id(cell_at(self._world, door)))
            if name is not None and not isinstance(self.plan(f"toggle and go through {name}"), str):
                return f"toggle and go through {name}"
        return None
