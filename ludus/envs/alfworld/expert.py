"""The expert of ALFWorld: takes the next missing action, given the state.

The expert keeps no plan, so it can join an episode at any turn. With `search` it knows only the
places that it has seen, so it demonstrates search: it visits the furniture that may hold the
object, in the order of the room's list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ludus.envs.alfworld.engine import Facts
from ludus.envs.base import NoExpert

TREATMENTS = {
    "pick_clean_then_place_in_recep": ("isclean", "clean", "sinkbasintype"),
    "pick_heat_then_place_in_recep": ("ishot", "heat", "microwavetype"),
    "pick_cool_then_place_in_recep": ("iscool", "cool", "fridgetype"),
}
"""Task type to the predicate that the object must reach, the verb, and the furniture for it."""

SIGHT = ("atlocation", "receptacleatlocation", "openable", "opened")
"""The predicates that determine what the agent can see at its location."""


class State:
    """The facts, indexed for the expert."""

    def __init__(self, facts: Facts) -> None:
        self.kind = _pairs(facts, "objecttype")
        self.furniture = _pairs(facts, "receptacletype")
        self.place = _pairs(facts, "inreceptacle")
        self.pose = _pairs(facts, "receptacleatlocation")
        self.fits = set(facts.get("cancontain", ()))
        self.closed = _closed(facts)
        self.here = facts["atlocation"][0][1]
        self.held = next((thing for _, thing in facts.get("holds", ())), None)
        self.marks = {
            name: {n for (n,) in facts.get(name, ())} for name in ("isclean", "ishot", "iscool")
        }

    def can_hold(self, furniture: str, kind: str) -> bool:
        return (self.furniture[furniture], kind) in self.fits


class Expert:
    """Gives the next action of an episode. `traj_data` holds the task's parameters."""

    def __init__(self, traj_data: dict[str, Any], search: bool) -> None:
        parameters = traj_data["pddl_params"]
        self._type: str = traj_data["task_type"]
        self._target, self._destination, self._lamp = (
            f"{parameters[key]}Type".lower()
            for key in ("object_target", "parent_target", "toggle_target")
        )
        self._search = search
        self._seen: set[str] = set()

    def see(self, facts: Facts) -> None:
        """Record the visible places, from the facts of SIGHT; call after reset and every step."""
        closed = _closed(facts)
        here = facts["atlocation"][0][1]
        self._seen |= {
            name
            for name, pose in facts["receptacleatlocation"]
            if pose == here and name not in closed
        }

    def action(self, facts: Facts) -> str:
        """Returns the next action. Errors: NoExpert if no action helps."""
        state = State(facts)
        if self._type == "look_at_obj_in_light":
            return self._look_at(state)
        if state.held is not None and state.kind[state.held] != self._target:
            return self._put_down(state)
        destination = self._best_destination(state)
        ready = self._ready(state)
        if state.held is not None:
            if ready(state.held):
                return self._at(state, destination) or f"move {state.held} to {destination}"
            return self._treat(state, state.held)
        things = [t for t in self._targets(state) if state.place[t] != destination]
        things += [t for t in self._targets(state) if not ready(t) and t not in things]
        return self._fetch(state, sorted(things, key=lambda t: not ready(t)))

    def _look_at(self, state: State) -> str:
        if state.held is None:
            return self._fetch(state, self._targets(state))
        if state.kind[state.held] != self._target:
            return self._put_down(state)
        lamps = [t for t, kind in state.kind.items() if kind == self._lamp]
        known = [lamp for lamp in lamps if self._knows(state.place[lamp])]
        if not known:
            return self._explore(state, lambda _: True)
        place = state.place[known[0]]
        return self._go(state, place) or f"use {known[0]}"

    def _targets(self, state: State) -> list[str]:
        return [t for t in state.place if state.kind[t] == self._target]

    def _ready(self, state: State) -> Callable[[str], bool]:
        if self._type not in TREATMENTS:
            return lambda _: True
        marked = state.marks[TREATMENTS[self._type][0]]
        return lambda thing: thing in marked

    def _best_destination(self, state: State) -> str:
        """The destination with the most finished objects; of equals, the first in the list."""
        ready = self._ready(state)
        there = [state.place[t] for t in self._targets(state) if ready(t)]
        names = [n for n, kind in state.furniture.items() if kind == self._destination]
        if not names:
            raise NoExpert(f"alfworld: the room has no {self._destination.removesuffix('type')}")
        known = [n for n in names if self._knows(n)]
        return max(names, key=lambda n: (there.count(n) if n in known else 0, -order(n)[1]))

    def _treat(self, state: State, thing: str) -> str:
        _, verb, kind = TREATMENTS[self._type]
        place = next((n for n, k in state.furniture.items() if k == kind), None)
        if place is None:
            raise NoExpert(f"alfworld: the room has no {kind.removesuffix('type')} to {verb} with")
        return self._go(state, place) or f"{verb} {thing} with {place}"

    def _fetch(self, state: State, things: Iterable[str]) -> str:
        known = [thing for thing in things if self._knows(state.place[thing])]
        if not known:
            return self._explore(state, lambda name: state.can_hold(name, self._target))
        thing = known[0]
        place = state.place[thing]
        return self._at(state, place) or f"take {thing} from {place}"

    def _put_down(self, state: State) -> str:
        """Put down an object that the task does not ask for, as near as possible."""
        assert state.held is not None
        kind = state.kind[state.held]
        places = [name for name in state.furniture if state.can_hold(name, kind)]
        places.sort(key=lambda name: (state.pose[name] != state.here, order(name)))
        if not places:
            raise NoExpert(f"alfworld: there is no place to put down {state.held}")
        return self._at(state, places[0]) or f"move {state.held} to {places[0]}"

    def _explore(self, state: State, may_hold: Callable[[str], bool]) -> str:
        """Visit an unseen place; places that may hold the object come first."""
        unseen = sorted(
            set(state.furniture) - self._seen, key=lambda n: (not may_hold(n), order(n))
        )
        if not unseen:
            raise NoExpert("alfworld: the room does not contain the task's object")
        action = self._at(state, unseen[0])
        assert action is not None, "an open place at the agent's location has been seen"
        return action

    def _knows(self, place: str) -> bool:
        return not self._search or place in self._seen

    @staticmethod
    def _go(state: State, place: str) -> str | None:
        return None if state.pose[place] == state.here else f"go to {place}"

    def _at(self, state: State, place: str) -> str | None:
        """The action missing before the agent can reach into a place: go there, or open it."""
        if step := self._go(state, place):
            return step
        return f"open {place}" if place in state.closed else None


def _pairs(facts: Facts, predicate: str) -> dict[str, str]:
    return {fact[0]: fact[1] for fact in facts.get(predicate, ())}


def _closed(facts: Facts) -> set[str]:
    return {n for (n,) in facts.get("openable", ())} - {n for (n,) in facts.get("opened", ())}


def order(name: str) -> tuple[str, int]:
    """Sort key that puts `shelf 10` after `shelf 9`."""
    kind, _, number = name.rpartition(" ")
    return (kind, int(number)) if number.isdigit() else (name, 0)
