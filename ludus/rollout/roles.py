"""The roles of an agent's episode, and the policies that play them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import TYPE_CHECKING

from ludus.core.seeds import derive_seed
from ludus.core.types import Trajectory
from ludus.models.samplers.base import Sampler

if TYPE_CHECKING:
    from ludus.models.endpoint.client import Endpoint


@dataclass(frozen=True, slots=True)
class Player:
    """A policy that plays roles.

    Args:
        policy: its name in the configuration; trajectories are stored with it.
        sampler_of: the sampler of a group, by its id. None with an `endpoint`, which answers with
            text.
        trains: False for a fixed policy.
    """

    policy: str
    sampler_of: Callable[[str], Sampler] | None
    endpoint: Endpoint | None = None
    trains: bool = True


@dataclass(frozen=True, slots=True)
class Role:
    """A role and its players with their weights: one is drawn for each group."""

    name: str
    players: Mapping[str, float] | str
    of: Mapping[str, Player]

    def draw(self, random: Random) -> Player:
        """Draw a player."""
        if isinstance(self.players, str):
            return self.of[self.players]
        (name,) = random.choices([*self.players], [*self.players.values()])
        return self.of[name]


def cast(roles: Sequence[Role], group_id: str, seed: int) -> list[Player]:
    """The player of each role in a group: the episodes of a group are compared, so they have the
    same. Draws again until a player trains, where one can."""
    fixed = not any(_can_train(role) for role in roles)
    for attempt in count():
        random = Random(derive_seed(seed, "roles", group_id, attempt))
        drawn = [role.draw(random) for role in roles]
        if fixed or any(player.trains for player in drawn):
            return drawn
    raise AssertionError


def _can_train(role: Role) -> bool:
    names = [role.players] if isinstance(role.players, str) else role.players
    return any(role.of[name].trains for name in names)


def new_trajectory(
    group_id: str,
    member: int,
    task_id: str,
    roles: Sequence[Role] = (),
    players: Sequence[Player] = (),
) -> Trajectory:
    """An empty trajectory of a group's member, of the first role, with those of the other roles.

    The first role's ids are those of an episode without roles; the others' have the role behind.
    """
    id = f"{group_id}/e{member:03d}"
    if not roles:
        return Trajectory(id, group_id, task_id)
    parts = [
        Trajectory(
            f"{id}/{role.name}" if number else id,
            f"{group_id}/{role.name}" if number else group_id,
            task_id,
            role=role.name,
            policy=player.policy,
        )
        for number, (role, player) in enumerate(zip(roles, players, strict=True))
    ]
    parts[0].others = parts[1:]
    return parts[0]
