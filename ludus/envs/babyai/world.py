"""minigrid's BabyAI levels: names, bounded generation, and the agent's view.

Three patches of minigrid leave the game itself unchanged: messages on standard output are silenced,
the unused image observations are not computed, and the random draws of level generation are
counted, so that endless generation stops.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import gymnasium
import minigrid  # noqa: F401 - importing it registers the levels
from gymnasium.envs.registration import load_env_creator
from minigrid.envs.babyai.core import roomgrid_level

from ludus.core.errors import ConfigError, EnvError, did_you_mean
from ludus.envs.babyai.copies import Copies

VIEW = 7
"""Side length of the agent's square view, in cells; its own row is included."""

MAX_DRAWS = 100_000
"""Limit of random draws in a level's generation; no finite generation takes more than 3,000."""

MAX_ATTEMPTS = 20
"""Derived seeds to try before a level's generation fails."""

COPIES = Copies()
"""The levels generated last."""

Cell = tuple[int, int]

# minigrid prints "Sampling rejected" in this module; the name shadows the builtin only there.
vars(roomgrid_level)["print"] = lambda *_: None


def _newest_versions() -> dict[str, str]:
    newest: dict[str, tuple[int, str]] = {}
    for env_id in gymnasium.registry:
        if match := re.fullmatch(r"BabyAI-(\w+)-v(\d+)", env_id):
            level, version = match[1], int(match[2])
            newest[level] = max(newest.get(level, (-1, "")), (version, env_id))
    return {level: env_id for level, (_, env_id) in newest.items()}


LEVELS = _newest_versions()
"""Short names of all BabyAI levels, and their Gymnasium ids: GoToLocal -> BabyAI-GoToLocal-v0."""


def short_name(level: str) -> str:
    """Returns the short name of a short name or a Gymnasium id. Errors: ConfigError: unknown."""
    match = re.fullmatch(r"BabyAI-(\w+)-v\d+", level)
    name = match[1] if match else level
    if name not in LEVELS:
        raise ConfigError(f"{level!r} is not a BabyAI level{did_you_mean(name, LEVELS)}")
    return name


class _EndlessGeneration(Exception):
    """A level's generation exceeded MAX_DRAWS."""


def make_level(level: str, seed: int) -> Any:
    """Generate a minigrid level, determined by level and seed.

    If the generation does not end, the seeds `seed + 2**32`, `seed + 2 * 2**32`, ... are tried in
    turn. Levels are kept, since a group of episodes plays one task: a further call returns a copy.
    Errors: EnvError for a seed that is not a natural number, or if all seeds fail.
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise EnvError(f"babyai: seed must be a natural number, got {seed!r}")
    key = level, seed, MAX_DRAWS
    if (world := COPIES.get(key)) is None:
        world = _generate(level, seed)
        COPIES.keep(key, world)
    return world


def _generate(level: str, seed: int) -> Any:
    spec = gymnasium.spec(LEVELS[level])
    for attempt in range(MAX_ATTEMPTS):
        # Instantiate the class: gymnasium.make adds checks that double the cost of a step.
        world = load_env_creator(spec.entry_point)(**spec.kwargs)
        world.gen_obs = dict
        _limit_draws(world)
        try:
            world.reset(seed=seed + attempt * 2**32)
        except _EndlessGeneration:
            continue
        del world._rand_int
        return world
    raise EnvError(f"babyai: {level} cannot be generated from seed {seed}")


def _limit_draws(world: Any) -> None:
    draw, left = world._rand_int, MAX_DRAWS

    def counted(low: int, high: int) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise _EndlessGeneration
        return draw(low, high)  # type: ignore[no-any-return]

    world._rand_int = counted


class Seen(NamedTuple):
    """A cell in view: `forward` steps ahead, `side` steps to the right (negative: left)."""

    forward: int
    side: int
    position: Cell
    content: Any

    @property
    def kind(self) -> str:
        """wall, door, key, ball or box; empty for an empty cell."""
        return self.content.type if self.content is not None else ""

    @property
    def place(self) -> str:
        """The cell's relative position: `2 forward 1 left`."""
        parts = [f"{self.forward} forward"] if self.forward else []
        if self.side:
            parts.append(f"{abs(self.side)} {'right' if self.side > 0 else 'left'}")
        return " ".join(parts) or "here"


def cell_at(world: Any, position: Cell) -> Any:
    """The minigrid object in a cell of the grid, or None."""
    return world.grid.grid[position[1] * world.grid.width + position[0]]


def heading(world: Any) -> Cell:
    """The (x, y) step of `go forward`."""
    return ((1, 0), (0, 1), (-1, 0), (0, -1))[world.agent_dir]


HALF = VIEW // 2
_NEAREST_FIRST = sorted(
    ((k, side) for k in range(VIEW) for side in range(-HALF, HALF + 1) if k or side),
    key=lambda place: (place[0] + abs(place[1]), *place),
)
_RANKS = {place: rank for rank, place in enumerate(_NEAREST_FIRST)}


def look(world: Any) -> list[Seen]:
    """The cells in view, nearest first, without the agent's own.

    Same visibility as minigrid's `Grid.process_vis`, without its grid copies: row by row away from
    the agent, sight spreads sideways and ahead, except through walls and closed doors.
    """
    cells, width, height = world.grid.grid, world.grid.width, world.grid.height
    ax, ay = int(world.agent_pos[0]), int(world.agent_pos[1])
    fx, fy = heading(world)
    rx, ry = -fy, fx
    # The sides inside the grid, and the number of rows inside it.
    at, along, length = (ax, rx, width) if rx else (ay, ry, height)
    first, last = (-at, length - 1 - at) if along > 0 else (at - length + 1, at)
    sides = range(max(-HALF, first), min(HALF, last) + 1)
    at, along, length = (ax, fx, width) if fx else (ay, fy, height)
    num_rows = min(VIEW, length - at if along > 0 else at + 1)
    here, ranks = [False] * VIEW, []
    here[HALF] = True
    ahead = fy * width + fx
    for k in range(num_rows):
        start = ay * width + ax + k * ahead
        step = ry * width + rx
        row = {side: cells[start + side * step] for side in sides}
        here, beyond = _spread(here, row)
        ranks += [_RANKS[k, side] for side in sides if here[side + HALF] and (k or side)]
        if not any(beyond):
            break
        here = beyond
    ranks.sort()
    seen = []
    for rank in ranks:
        k, side = _NEAREST_FIRST[rank]
        x, y = ax + fx * k + rx * side, ay + fy * k + ry * side
        seen.append(Seen(k, side, (x, y), cells[y * width + x]))
    return seen


def _spread(here: list[bool], row: dict[int, Any]) -> tuple[list[bool], list[bool]]:
    """Returns the visible sides of a row, and those of the next one."""
    ahead = [False] * VIEW
    for sides, step in ((range(-HALF, HALF), 1), (range(HALF, -HALF, -1), -1)):
        for side in sides:
            i = side + HALF
            if here[i] and side in row and ((cell := row[side]) is None or cell.see_behind()):
                here[i + step] = ahead[i + step] = ahead[i] = True
    return here, ahead


def describe_object(content: Any) -> str:
    """`red ball`, `closed red door`."""
    if content.type != "door":
        return f"{content.color} {content.type}"
    state = "open" if content.is_open else "locked" if content.is_locked else "closed"
    return f"{state} {content.color} door"


def describe_world(world: Any) -> str:
    """The mission, the agent and all cells with their contents: equal for equal worlds.

    `go to the red ball|3|4|0||8|wall|wall|...||red ball|...`
    """
    cells = [_full_name(content) for content in world.grid.grid]
    agent = (*map(int, world.agent_pos), int(world.agent_dir))
    start = [world.mission, *agent, _full_name(world.carrying), world.grid.width]
    return "|".join(map(str, [*start, *cells]))


def _full_name(content: Any) -> str:
    if content is None or content.type == "wall":
        return "" if content is None else "wall"
    inside = _full_name(content.contains)
    return describe_object(content) + (f" with {inside}" if inside else "")


def can_toggle(world: Any, content: Any) -> bool:
    """True if `toggle` has an effect: on a box, and on a door, unless it is locked and the agent
    does not carry its key."""
    if content is None or content.type not in ("door", "box"):
        return False
    key = world.carrying
    fits = key is not None and (key.type, key.color) == ("key", content.color)
    return content.type == "box" or not content.is_locked or fits


def walls(cells: list[Seen]) -> list[Seen]:
    """The nearest walls straight ahead, to the left and to the right, as far as in view."""
    nearest: dict[str, Seen] = {}
    for cell in cells:
        if cell.content is not None and cell.content.type == "wall":
            if cell.side == 0:
                nearest.setdefault("ahead", cell)
            elif cell.forward == 0:
                nearest.setdefault("left" if cell.side < 0 else "right", cell)
    return [nearest[place] for place in ("ahead", "left", "right") if place in nearest]
