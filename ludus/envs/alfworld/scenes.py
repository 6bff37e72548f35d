"""Generates ALFWorld games from the floor plans of its wheel, for users without its data.

A game has the same parts as in ALFWorld's data: a PDDL problem, the task's sentence, and the
engine's domain and grammar. A floor plan lists the furniture of a room, most of its locations, and
the kinds of objects. The seed draws the floor plan, the task's object and destination, the number
of objects of each kind, and their places.

The rules are ALFRED's (Shridhar et al., CVPR 2020, arXiv:1912.01734), as given in the wheel: which
objects fit where and can be heated, cooled or cleaned, which tasks belong to which rooms, and which
floor plans are for training. Every game can be won: all objects it needs exist and are in reach.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ludus.envs.alfworld.engine import without_data_folder

with without_data_folder():
    import alfworld
    from alfworld.gen import constants, goal_library

Split = Literal["train", "unseen"]
FITS: Mapping[str, set[str]] = constants.VAL_RECEPTACLE_OBJECTS
FURNITURE = sorted(set(FITS) - set(constants.MOVABLE_RECEPTACLES) - {"Box"})
LAMPS = ("DeskLamp", "FloorLamp")
LAMPS_STAND_ON = ("Desk", "SideTable", "Dresser", "CoffeeTable", "DiningTable", "Shelf")
MOST_OF_A_KIND: int = constants.MAX_NUM_OF_OBJ_INSTANCES

TREATMENTS = {
    "pick_clean_then_place_in_recep": ("Cleanable", "SinkBasin"),
    "pick_heat_then_place_in_recep": ("Heatable", "Microwave"),
    "pick_cool_then_place_in_recep": ("Coolable", "Fridge"),
}
"""Task type to the required ability of its object, and the furniture used."""

TASK_TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
ROOMS = {"kitchen": "Kitchen", "livingroom": "LivingRoom", "bedroom": "Bedroom"} | {
    "bathroom": "Bathroom"
}


@dataclass(frozen=True)
class Goal:
    """The object to bring to a destination, or to look at under a lamp."""

    task_type: str
    target: str
    destination: str = ""
    lamp: str = ""


@dataclass
class Scene:
    """A furnished room. `furniture` and `things` map names (with coordinates) to kinds, `poses`
    maps furniture to locations, `places` maps things to furniture."""

    floor_plan: int
    furniture: dict[str, str]
    poses: dict[str, str]
    things: dict[str, str] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def kinds(self) -> set[str]:
        return set(self.furniture.values())

    def places_for(self, kind: str, avoid: str = "") -> list[str]:
        """The furniture that can hold a thing, except furniture of kind `avoid`."""
        allowed = LAMPS_STAND_ON if kind in LAMPS else [k for k in FITS if kind in FITS[k]]
        return [name for name, k in self.furniture.items() if k in allowed and k != avoid]

    def add(self, kind: str, rng: random.Random, avoid: str = "") -> None:
        """Add a thing at a random place."""
        number = len(self.things)  # part of the coordinates, so that the name is unique
        name = f"{kind}|+{number // 100:02d}.{number % 100:02d}|+00.90|-0{rng.randint(0, 3)}.50"
        self.things[name] = kind
        self.places[name] = rng.choice(self.places_for(kind, avoid))


def generate(task_type: str, split: Split, seed: int, room: str | None = None) -> dict[str, Any]:
    """Returns a game in the format of `game.tw-pddl`, with its `traj_data` as in ALFWorld's data.

    Errors: ValueError if no room of that kind fits the task.
    """
    rng = random.Random(f"alfworld/{task_type}/{split}/{room}/{seed}")
    plans = floor_plans(task_type, split, room)
    for plan in rng.sample(plans, len(plans)):
        scene = _furnish(plan, rng)
        goals = _goals(scene, task_type)
        if goals:
            # Draw the target first; otherwise objects that fit everywhere would dominate.
            target = rng.choice(sorted({goal.target for goal in goals}))
            goal = rng.choice([goal for goal in goals if goal.target == target])
            _lay_out(scene, goal, rng)
            return _game(scene, goal, rng)
    raise ValueError(f"no {room or 'room'} of split {split} fits {task_type}")


def floor_plans(task_type: str, split: Split, room: str | None = None) -> list[int]:
    """The floor plans of a task type; the two splits are disjoint."""
    kinds = constants.GOALS_VALID[task_type] if room is None else {ROOMS[room]}
    numbers = constants.TRAIN_SCENE_NUMBERS if split == "train" else constants.TEST_SCENE_NUMBERS
    rooms = kinds & constants.GOALS_VALID[task_type]
    return [n for n in numbers if any(n in constants.SCENE_TYPE[kind] for kind in rooms)]


@cache
def _layout(floor_plan: int) -> tuple[list[str], dict[str, list[float]]]:
    """The kinds of things in a room, and the furniture with known locations, each with the agent's
    pose in front of it: x, z, rotation, camera horizon."""
    folder = Path(alfworld.__file__).parent / "gen" / "layouts"
    kinds = json.loads((folder / f"FloorPlan{floor_plan}-objects.json").read_text("utf-8"))
    poses = json.loads((folder / f"FloorPlan{floor_plan}-openable.json").read_text("utf-8"))
    return sorted(kinds), dict(sorted(poses.items()))


def _furnish(floor_plan: int, rng: random.Random) -> Scene:
    kinds, poses = _layout(floor_plan)
    scene = Scene(floor_plan, {}, {})
    for name, (x, z, rotation, horizon) in poses.items():
        first = name.partition("|")[0]
        basin = {"Sink": "SinkBasin", "Bathtub": "BathtubBasin"}.get(first)
        name, kind = (f"{'|'.join(name.split('|')[:4])}|{basin}", basin) if basin else (name, first)
        if kind in FURNITURE:
            scene.furniture[name] = kind
            # Unit: 0.25 m, as in ALFRED's locations.
            scene.poses[name] = f"loc|{x * 4:.0f}|{z * 4:.0f}|{rotation // 90:.0f}|{horizon:.0f}"
    for kind in FURNITURE:
        if kind in kinds and kind not in scene.kinds():
            for _ in range(4 if kind == "StoveBurner" else 1):
                number = len(scene.furniture)
                basin = f"|{kind}" if kind.endswith("Basin") else ""
                name = f"{kind.removesuffix('Basin')}|+00.{number:02d}|+01.00|+00.00{basin}"
                scene.furniture[name] = kind
                scene.poses[name] = f"loc|{40 + number}|{rng.randint(0, 40)}|0|30"
    return scene


def _goals(scene: Scene, task_type: str) -> list[Goal]:
    kinds = _things_of(scene)
    if task_type == "look_at_obj_in_light":
        lamps = [lamp for lamp in LAMPS if lamp in _layout(scene.floor_plan)[0]]
        lamps = [lamp for lamp in lamps if scene.places_for(lamp)]
        return [Goal(task_type, kind, lamp=lamp) for lamp in lamps for kind in kinds]
    ability, appliance = TREATMENTS.get(task_type, ("", ""))
    if ability:
        kinds = [kind for kind in kinds if kind in constants.VAL_ACTION_OBJECTS[ability]]
        if appliance not in scene.kinds():
            return []
    return [
        Goal(task_type, kind, destination)
        for kind in kinds
        for destination in sorted(scene.kinds() - {appliance})
        if kind in FITS[destination] and scene.places_for(kind, avoid=destination)
    ]


def _things_of(scene: Scene) -> list[str]:
    kinds, _ = _layout(scene.floor_plan)
    return [kind for kind in kinds if kind not in LAMPS and scene.places_for(kind)]


def _lay_out(scene: Scene, goal: Goal, rng: random.Random) -> None:
    least = 2 if goal.task_type == "pick_two_obj_and_place" else 1
    for _ in range(rng.randint(least, MOST_OF_A_KIND)):
        scene.add(goal.target, rng, avoid=goal.destination)
    for lamp in [goal.lamp] if goal.lamp else []:
        scene.add(lamp, rng)
    for kind in _things_of(scene):
        if kind != goal.target:
            for _ in range(rng.randint(1, MOST_OF_A_KIND)):
                scene.add(kind, rng)


def _game(scene: Scene, goal: Goal, rng: random.Random) -> dict[str, Any]:
    words = {"obj": goal.target, "recep": goal.destination, "toggle": goal.lamp, "mrecep": ""}
    library = goal_library.gdict[goal.task_type]
    lower = {key: word.lower() for key, word in words.items()}
    sentence = rng.choice(library["templates"]).format(**lower)
    problem = _problem(scene, library["pddl"].format(**words))
    data = Path(alfworld.__file__).parent / "data"
    return {
        "pddl_domain": (data / "alfred.pddl").read_text("utf-8"),
        "grammar": (data / "alfred.twl2").read_text("utf-8").replace("UNKNOWN GOAL", sentence),
        "pddl_problem": problem,
        "solvable": True,
        "traj_data": {
            "task_type": goal.task_type,
            "scene": {"floor_plan": f"FloorPlan{scene.floor_plan}"},
            "pddl_params": {
                "object_target": goal.target,
                "parent_target": goal.destination,
                "toggle_target": goal.lamp,
                "mrecep_target": "",
                "object_sliced": False,
            },
        },
    }


def _problem(scene: Scene, goal: str) -> str:
    """The PDDL problem. ` # ` is a placeholder for the dash before types during name mangling."""
    start = "loc|0|0|0|30" if "loc|0|0|0|30" not in scene.poses.values() else "loc|99|99|0|30"
    kinds, thing_kinds = sorted(scene.kinds()), sorted(set(scene.things.values()))
    objects = [
        "agent1 # agent",
        *(f"{kind}Type # otype" for kind in thing_kinds),
        *(f"{kind}Type # rtype" for kind in kinds),
        *(f"{pose} # location" for pose in sorted({start, *scene.poses.values()})),
        *(f"{name} # receptacle" for name in scene.furniture),
        *(f"{name} # object" for name in scene.things),
    ]
    facts = [f"atLocation agent1 {start}", *_furniture_facts(scene), *_thing_facts(scene)]
    facts += [f"canContain {k}Type {t}Type" for k in kinds for t in thing_kinds if t in FITS[k]]
    text = (
        f"(define (problem plan_{scene.floor_plan})\n(:domain alfred)\n"
        f"(:objects\n{_mangled(chr(10).join(objects))}\n)\n"
        f"(:init\n(= (total-cost) 0)\n{_mangled(chr(10).join(f'({f})' for f in facts))}\n)\n"
        f"{goal}"
    )
    return text.replace(" # ", " - ")


def _furniture_facts(scene: Scene) -> Sequence[str]:
    facts = []
    for name, kind in scene.furniture.items():
        facts += [f"receptacleType {name} {kind}Type"]
        facts += [f"receptacleAtLocation {name} {scene.poses[name]}"]
        if kind in constants.OPENABLE_CLASS_SET:
            facts.append(f"openable {name}")
    return facts


def _thing_facts(scene: Scene) -> Sequence[str]:
    facts = []
    for name, kind in scene.things.items():
        place = scene.places[name]
        facts += [f"objectType {name} {kind}Type", f"inReceptacle {name} {place}"]
        facts.append(f"objectAtLocation {name} {scene.poses[place]}")
        facts.append(f"{'toggleable' if kind in LAMPS else 'pickupable'} {name}")
        for ability in ("Heatable", "Coolable", "Cleanable", "Sliceable"):
            if kind in constants.VAL_ACTION_OBJECTS[ability]:
                facts.append(f"{ability.lower()} {name}")
    return facts


def _mangled(text: str) -> str:
    """Mangle names as ALFWorld does, since PDDL names cannot contain bars, signs and dots."""
    for sign, word in (("|", "bar"), ("-", "minus"), ("+", "plus"), (".", "dot"), (",", "comma")):
        text = text.replace(sign, f"_{word}_")
    return text
