"""The game of an ALFWorld task: downloaded, or generated.

A task's data names its game, independent of the machine:

    {"game": "train/pick_and_place_simple-Mug-None-Desk-308/trial_T2019..."}     downloaded
    {"type": "pick_and_place_simple", "split": "train", "seed": 3}               generated
    {"index": 2419}                            AgentGym's number: 0 to 2419 train, 2420 to 2619 test

Downloaded games are in the folder of `alfworld-download`: $ALFWORLD_DATA, or ~/.cache/alfworld.
Generated games are cached, with the generator's version, in the user's cache folder.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, get_args

from ludus.core.errors import ConfigError, EnvError, did_you_mean
from ludus.core.types import Task
from ludus.envs.alfworld import cache as cache_files
from ludus.envs.alfworld.scenes import ROOMS, TASK_TYPES, Split, floor_plans, generate

VERSION = 1
"""Version of the generator. Any change of generated games needs a new version, thus a new cache."""

NUM_TRAIN, NUM_TEST = 2420, 200
"""Sizes of AgentGym's splits; the indices of training games come first."""

DOWNLOADED_SPLITS = {"train": "train", "unseen": "valid_unseen"}
"""Split to folder of the downloaded data."""


def data_folder() -> Path | None:
    """The folder of the downloaded games, `json_2.1.1` of ALFWorld's data; None if absent."""
    root = Path(os.environ.get("ALFWORLD_DATA") or "~/.cache/alfworld").expanduser()
    folder = root / "json_2.1.1"
    return folder if folder.is_dir() else None


def tiers() -> list[str]:
    """The six task types on the training floor plans, then on the unseen ones."""
    return [*TASK_TYPES, *(f"unseen/{task_type}" for task_type in TASK_TYPES)]


def task_of(tier: str | None, seed: int) -> Task:
    """The task of a tier `[unseen/]TYPE[:ROOM]` and a seed; with a room, the game is generated.

    Errors: ConfigError for an unknown tier.
    """
    name = tier or TASK_TYPES[seed % len(TASK_TYPES)]
    rest, _, room = name.partition(":")
    split: Split = "unseen" if rest.startswith("unseen/") else "train"
    task_type = rest.removeprefix("unseen/")
    if task_type not in TASK_TYPES:
        raise ConfigError(f"alfworld has no tier {name!r}{did_you_mean(rest, tiers())}")
    if room and (room not in ROOMS or not floor_plans(task_type, split, room)):
        rooms = ", ".join(room for room in ROOMS if floor_plans(task_type, split, room))
        raise ConfigError(f"alfworld: tier {name!r}: {task_type} is for {rooms}, not {room!r}")
    folder = data_folder()
    if folder is not None and not room:
        games = downloaded(folder, split, task_type)
        game = games[seed % len(games)]
        return Task(id=f"alfworld/{game}/{seed}", data={"game": game}, tier=name, source="alfworld")
    data = {"type": task_type, "split": split, "seed": seed} | ({"room": room} if room else {})
    return Task(id=f"alfworld/{name}/{seed}", data=data, tier=name, source="alfworld")


@cache
def downloaded(folder: Path, split: Split, task_type: str) -> list[str]:
    """The playable downloaded games of a type, selected as in ALFWorld."""
    names = []
    for path in sorted((folder / DOWNLOADED_SPLITS[split]).glob(f"{task_type}-*/*/game.tw-pddl")):
        sliced = "movable" in str(path) or "Sliced" in str(path)
        if not sliced and _read(path).get("solvable"):
            names.append(path.parent.relative_to(folder).as_posix())
    if not names:
        raise EnvError(f"{folder}: no playable game of {task_type}; run alfworld-download")
    return names


def game_of(task: Task) -> dict[str, Any]:
    """The game of a task, with its `traj_data`. Errors: EnvError if the data names no game."""
    data = task.data
    if "index" in data:
        return _game_of_index(task)
    if "game" in data:
        return _read_game(task, str(data["game"]))
    task_type, split, seed = data.get("type"), data.get("split", "train"), data.get("seed")
    room = data.get("room")
    if (
        task_type not in TASK_TYPES
        or split not in get_args(Split)
        or type(seed) is not int
        or not 0 <= seed < 2**63
    ):
        raise EnvError(f"alfworld: task {task.id!r} names no game: data needs type, split and seed")
    if room is not None and not (isinstance(room, str) and room in ROOMS):  # part of a path
        known = ", ".join(ROOMS)
        raise EnvError(f"alfworld: task {task.id!r}: data.room {room!r:.40} is not a room: {known}")
    try:
        return _generated(str(task_type), split, seed, room)
    except (KeyError, ValueError) as error:
        raise EnvError(f"alfworld: task {task.id!r}: {error}") from error


def _game_of_index(task: Task) -> dict[str, Any]:
    """AgentGym's game of an index; without downloaded data, a generated game of the same split."""
    index, total = task.data["index"], NUM_TRAIN + NUM_TEST
    if type(index) is not int or not 0 <= index < total:
        raise EnvError(f"alfworld: task {task.id!r}: index {index!r} is not 0 to {total - 1}")
    folder = data_folder()
    if folder is None:
        split: Split = "train" if index < NUM_TRAIN else "unseen"
        return _generated(TASK_TYPES[index % len(TASK_TYPES)], split, index, None)
    files = [folder.parent / f"mappings_{part}.json" for part in ("train", "test")]
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise EnvError(
            f"alfworld: task {task.id!r}: copy AgentGym's {missing[0].name} (from its folder "
            f"agentenv-alfworld/configs) beside json_2.1.1, to {missing[0].parent}"
        )
    row = _mapping(*files)[index]
    part = "train" if index < NUM_TRAIN else "valid_train"
    return _read_game(task, f"{part}/{row['task_type']}/{row['task_id']}")


@cache
def _mapping(*files: Path) -> list[dict[str, str]]:
    rows = [row for file in files for row in json.loads(file.read_text("utf-8"))]
    if [row["item_id"] for row in rows] != list(range(NUM_TRAIN + NUM_TEST)):
        raise EnvError(f"{files[0].parent}: the mappings must have the item_ids 0 to 2619")
    return rows


def _read_game(task: Task, name: str) -> dict[str, Any]:
    folder = data_folder()
    if folder is None:
        raise EnvError(
            f"alfworld: task {task.id!r} needs a downloaded game, but ALFWORLD_DATA has no "
            "json_2.1.1; run alfworld-download"
        )
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise EnvError(f"alfworld: task {task.id!r}: {name!r} is not within the data's folder")
    return _read(path / "game.tw-pddl") | {"traj_data": _read(path / "traj_data.json")}


def _read(path: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(path.read_text("utf-8"))
        return data
    except (OSError, ValueError) as error:
        raise EnvError(f"alfworld: cannot read the game {path}: {error}") from error


def _generated(task_type: str, split: Split, seed: int, room: str | None) -> dict[str, Any]:
    """The generated game, from the cache if it holds an undamaged file."""
    folder = cache_files.cache_root() / f"games-v{VERSION}" / split / task_type
    path = folder / f"{f'{room}-' if room else ''}{seed}.json.gz"
    cached = cache_files.read(path)
    if isinstance(cached, dict):
        return cached
    game = generate(task_type, split, seed, room)
    with suppress(OSError):  # the cache is optional
        cache_files.write(path, game)
    return game
