"""BabyAI in AgentGym's words (`texts: agentgym`): its observations, its actions and their paths.

    Your goal: go to the red ball
    In front of you in this room, you can see several objects: There is a red ball 1 2 steps in
    front of you and 1 steps to your right.  The room has walls around you. You are facing a wall 4
    steps away. You are not carrying anything.
    Available actions: ["turn left", "turn right", "move forward", "pickup red ball 1", ...]

Texts, numbering and paths are AgentGym's, peculiarities included: objects are numbered anew in each
view, nearest first; paths may lead through closed doors and cells out of sight, and an action stops
as soon as a step leaves the view unchanged. Tests compare them with texts recorded from its code.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ludus.envs.babyai.macros import FORWARD, LEFT, PICK_UP, RIGHT, STEPS, TOGGLE
from ludus.envs.babyai.world import VIEW, Cell, Seen, look

if TYPE_CHECKING:
    from ludus.envs.babyai.expert import Expert

DROP = 4
CHECK = "check available actions"
UNKNOWN = "The action is not recognized. Please check valid actions."
UNCHANGED = "No change in state."
COMPLETED = "\n The task is completed."
SOLID = ("wall", "box", "ball", "key")
"""Kinds that block a path and a drop; doors do not, whatever their state."""


def goal_text(mission: str) -> str:
    """A mission in AgentGym's words."""
    return mission.replace("then", "and").replace("after you", "and")


def image_of(world: Any) -> frozenset[tuple[Any, ...]]:
    """The visible cells as minigrid's image observations encode them."""
    cells = {(c.forward, c.side, c.content and c.content.encode()) for c in look(world)}
    return frozenset(cells | {(0, 0, world.carrying and world.carrying.encode())})


@dataclass
class View:
    """The agent's view: its description, the possible actions, and why others are impossible.

    `image` is equal to another view's exactly if minigrid's image observations are. `actions` maps
    each action to minigrid's actions, `targets` maps `go to X` to X's cell.
    """

    description: str
    image: frozenset[tuple[Any, ...]]
    actions: dict[str, list[int]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    targets: dict[str, Cell] = field(default_factory=dict)

    @property
    def available(self) -> str:
        names = ", ".join(f'"{name}"' for name in self.actions)
        return f"\nAvailable actions: [{names}]"

    def plan(self, text: str) -> list[int] | str:
        """Minigrid's actions of an action, or the reply to one that takes no step."""
        if "check" in text:
            return f"You can take the following actions: {', '.join(self.actions)}"
        if not text:
            return UNCHANGED
        if text not in self.actions:
            return self.errors.get(text, UNKNOWN)
        return self.actions[text] or UNCHANGED

    def advised(self, expert: Expert, advice: int) -> str | None:
        """The action that begins with the bot's next action: `go to X` if the bot walks to X,
        `toggle and go through X` if it passes a door; else the action that is only this step."""
        target = expert.target()
        for name, steps in self.actions.items():
            if steps[:1] == [advice] and target is not None and self.targets.get(name) == target:
                return name
        if advice == TOGGLE and expert.passes_door():
            for name, steps in self.actions.items():
                if steps == [TOGGLE, FORWARD]:
                    return name
        return next((name for name, steps in self.actions.items() if steps == [advice]), None)


def view_of(world: Any) -> View:
    """The view of a minigrid level."""
    seen = sorted(look(world), key=lambda c: (c.forward + abs(c.side), -c.forward, c.side))
    seen = [cell for cell in seen if cell.kind]
    things = [(cell, _name(cell.content)) for cell in seen if cell.kind != "wall"]
    barriers = [c.forward for c in seen if c.side == 0 and c.kind in ("box", "wall")]
    view = View(_description(world, seen, things), image_of(world))
    view.actions |= {"turn left": [LEFT], "turn right": [RIGHT]}
    if not barriers or min(barriers) > 1:
        view.actions["move forward"] = [FORWARD]
    else:
        view.errors["move forward"] = "There is a barrier in front of you, you can't move forward."
    paths = _Paths(world, {cell.position for cell in seen if cell.kind in SOLID})
    ways = [paths.find(cell.position, arrive=False) for cell, _ in things]
    if world.carrying is None:
        for (cell, name), way in zip(things, ways, strict=True):
            if cell.kind != "door":
                _add(view, "pickup", name, None if way is None else [*way, PICK_UP])
    _add_drop(view, world, paths)
    _add_doors(view, world, things, ways, paths)
    for (cell, name), way in zip(things, ways, strict=True):
        if added := _add(view, "go to", name, way):
            view.targets[added] = cell.position
    view.actions[CHECK] = []
    return view


def opening_of(world: Any) -> View:
    """The first view. An object that the agent carries from the start is also still in its place:
    minigrid observes before it removes it."""
    if world.carrying is None:
        return view_of(world)
    world.grid.set(*world.carrying.init_pos, world.carrying)
    view = view_of(world)
    world.grid.set(*world.carrying.init_pos, None)
    return view


def _name(content: Any) -> str:
    if content.type != "door":
        return f"{content.color} {content.type}"
    state = "open" if content.is_open else "locked" if content.is_locked else "closed"
    return f"{content.color} {state} door"


def _description(world: Any, seen: list[Seen], things: list[tuple[Seen, str]]) -> str:
    text = "You cannot see any objects within sight."
    if seen:
        text, counts = "In front of you in this room, you can see several objects: ", Counter[str]()
        for cell, name in things:
            counts[name] += 1
            place = f"right in front of you {cell.forward} steps away. "
            if cell.side:
                side = f"{abs(cell.side)} steps to your {'right' if cell.side > 0 else 'left'}"
                place = f"{cell.forward} steps in front of you and {side}. "
            text += f"There is a {name} {counts[name]} {place} "
    text += "The room has walls around you. "
    barriers = [cell for cell in seen if cell.side == 0 and cell.kind in ("box", "wall")]
    if barriers:
        nearest = min(barriers, key=lambda cell: cell.forward)
        text += f"You are facing a {nearest.kind} {nearest.forward} steps away. "
    if world.carrying is None:
        return f"{text}You are not carrying anything."
    return f"{text}You are carrying a {world.carrying.color} {world.carrying.type}."


def _add(view: View, verb: str, name: str, steps: list[int] | None) -> str | None:
    """Add a numbered action, or the reason against it; only possible ones are counted. Returns the
    added action."""
    number = 1
    while f"{verb} {name} {number}" in view.actions:
        number += 1
    action = f"{verb} {name} {number}"
    if steps is None:
        view.errors[action] = f"You cannot {action}, as there is no path leading to it."
        return None
    view.actions[action] = steps
    return action


def _add_drop(view: View, world: Any, paths: _Paths) -> None:
    reason = "as you are not carrying anything."
    if world.carrying is not None:
        if _next(paths.start[0], paths.start[1]) not in paths.blocked:
            view.actions["drop"] = [DROP]
            return
        reason = "as there is already an object in front of you."
    view.errors["drop"] = f"You cannot drop the object, {reason}"


def _add_doors(
    view: View,
    world: Any,
    things: list[tuple[Seen, str]],
    ways: list[list[int] | None],
    paths: _Paths,
) -> None:
    counts: Counter[str] = Counter()
    for (cell, name), way in zip(things, ways, strict=True):
        if cell.kind != "door":
            continue
        counts[name] += 1
        door, through = cell.content, f"go through {name} {counts[name]}"
        if door.is_open:
            into = paths.find(cell.position, arrive=True)
            if into is not None:
                view.actions[through] = into
            else:
                view.errors[through] = f"You cannot {through}, as there is no path leading to it."
            continue
        action, key = f"toggle and {through}", world.carrying
        if door.is_locked and (key is None or key.type != "key"):
            view.errors[action] = f"You cannot {action}, as you are not carrying a key."
            continue
        if door.is_locked and key.color != door.color:
            view.errors[action] = (
                f"You cannot {action}, as the color of the key you are carrying does not match "
                "the color of door."
            )
            continue
        if way is not None:
            view.actions[action] = [*way, TOGGLE, FORWARD]
        else:  # AgentGym prints its dictionary of counts here
            told = f"toggle and go through {name} {dict(counts)}"
            view.errors[action] = f"You cannot {told}, as there is no path leading to it."
        if way == []:
            view.actions["toggle"] = [TOGGLE]
        if not door.is_locked:
            view.errors[through] = (
                f"You cannot {through}, as it is closed. You should toggle it first."
            )


def _next(cell: Cell, direction: int) -> Cell:
    return cell[0] + STEPS[direction][0], cell[1] + STEPS[direction][1]


class _Paths:
    """AgentGym's search for paths in the square of the view."""

    def __init__(self, world: Any, blocked: set[Cell]) -> None:
        self.start = (int(world.agent_pos[0]), int(world.agent_pos[1])), int(world.agent_dir)
        self.blocked = blocked
        (x, y), direction = self.start
        (fx, fy), (rx, ry), half = STEPS[direction], STEPS[(direction + 1) % 4], VIEW // 2
        left, top = x + fx * (VIEW - 1) - rx * half, y + fy * (VIEW - 1) - ry * half
        self._xs = _span(left, left + VIEW * (rx - fx))
        self._ys = _span(top, top + VIEW * (ry - fy))

    def find(self, goal: Cell, arrive: bool) -> list[int] | None:
        """Minigrid's actions until the agent faces `goal`, or with `arrive` stands in it.

        Breadth-first, forward before left before right. A state counts as known only once it is
        taken from the queue, so it may be queued repeatedly, and its last predecessor counts.
        """
        came_from: dict[tuple[Cell, int], tuple[tuple[Cell, int], int]] = {}
        queue, known = deque([self.start]), set()
        while queue:
            state = queue.popleft()
            known.add(state)
            cell, direction = state
            if (cell if arrive else _next(cell, direction)) == goal:
                way = []
                while state != self.start:
                    state, action = came_from[state]
                    way.append(action)
                return way[::-1]
            for following, action in (
                ((_next(cell, direction), direction), FORWARD),
                ((cell, (direction - 1) % 4), LEFT),
                ((cell, (direction + 1) % 4), RIGHT),
            ):
                x, y = following[0]
                inside = x in self._xs and y in self._ys
                if inside and following not in known and (x, y) not in self.blocked:
                    queue.append(following)
                    came_from[following] = state, action
        return None


def _span(first: int, last: int) -> range:
    """AgentGym's range of columns or rows; in the negative direction it has one more."""
    return range(last, first + 1) if last < first else range(first, last)


def render(world: Any) -> str:
    """The level with the visible part highlighted, as a data URL of a PNG."""
    pixels = world.get_frame(highlight=world.highlight, tile_size=world.tile_size)
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels.astype("uint8"))
    parts: Mapping[bytes, bytes] = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0),
        b"IDAT": zlib.compress(rows),
        b"IEND": b"",
    }
    png = b"\x89PNG\r\n\x1a\n"
    for name, body in parts.items():
        check = struct.pack(">I", zlib.crc32(name + body))
        png += struct.pack(">I", len(body)) + name + body + check
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
