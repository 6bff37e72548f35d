"""The tasks of AppWorld: of the data that the user has downloaded, or generated.

A task's data names it, independent of the machine:

    {"task": "82e2fac_1"}                              downloaded, below $APPWORLD_ROOT or `data`
    {"kind": "pay", "split": "train", "seed": 3}       generated

Tiers of generated tasks are `easy`, `medium` and `hard`, and with `unseen/` the held-out part:
tasks that other people give, with further kinds. `easy:note-add` is one kind only. Tiers of
downloaded tasks are the data's own parts: `train`, `dev`, `test_normal`, `test_challenge`.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

from ludus.core.errors import ConfigError, EnvError, did_you_mean
from ludus.core.types import Task

VERSION = 1
"""Version of the generator. Any change of generated worlds or tasks needs a new version."""

WORLD_SEED = 0
DATASETS = ("train", "dev", "test_normal", "test_challenge")

KINDS = {
    "easy": ("song-count", "note-delete", "note-add"),
    "medium": ("pay", "like", "spent"),
    "hard": ("settle", "relation-pay", "playlist"),
}
"""Kinds of the training tasks, by tier."""

HELD_OUT = {"easy": ("alarm-off",), "medium": ("request",), "hard": ("relation-text",)}
"""Kinds that only the held-out part has, beside those of training."""

UNSEEN = "unseen/"
TASK_ID = re.compile(r"[\w-]{1,60}")


def cache_root() -> Path:
    """The folder of the generated world, in $XDG_CACHE_HOME or ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "ludus" / "appworld" / f"world-v{VERSION}-{WORLD_SEED}"


def data_root(data: str | None = None) -> Path | None:
    """The folder below which the user's downloaded `data` lies; None if there is none.

    Errors: ConfigError for a `data` that does not hold it.
    """
    given = data or os.environ.get("APPWORLD_ROOT")
    if not given:
        return None
    root = Path(given).expanduser().absolute()
    if root.name == "data" and (root / "tasks").is_dir():
        root = root.parent
    if (root / "data" / "tasks").is_dir():
        return root
    if data:
        raise ConfigError(
            f"env.args.data: {root} has no folder data/tasks: name the folder in which you called "
            "`appworld download data`"
        )
    return None


def tiers() -> list[str]:
    """The tiers of generated tasks, and those of downloaded ones where $APPWORLD_ROOT has them."""
    generated = [*KINDS, *(f"{UNSEEN}{tier}" for tier in KINDS)]
    root = data_root()
    if root is None:
        return generated
    return [*generated, *(name for name in DATASETS if _dataset_file(root, name).is_file())]


def task_of(tier: str | None, seed: int) -> Task:
    """The task of a tier and a seed. Errors: ConfigError for an unknown tier."""
    name = tier or "easy"
    if name in DATASETS:
        return _downloaded(name, seed)
    kinds = _kinds(name)
    split = "unseen" if name.startswith(UNSEEN) else "train"
    data = {"kind": kinds[seed % len(kinds)], "split": split, "seed": seed}
    return Task(id=f"appworld/{name}/{seed}", data=data, tier=name, source="appworld")


def _kinds(tier: str) -> tuple[str, ...]:
    rest, _, kind = tier.removeprefix(UNSEEN).partition(":")
    if rest not in KINDS:
        raise ConfigError(f"appworld has no tier {tier!r}{did_you_mean(tier, tiers())}")
    kinds = KINDS[rest] + (HELD_OUT[rest] if tier.startswith(UNSEEN) else ())
    if kind and kind not in kinds:
        raise ConfigError(f"appworld: tier {tier!r}: its kinds are {', '.join(kinds)}")
    return (kind,) if kind else kinds


def _downloaded(dataset: str, seed: int) -> Task:
    root = data_root()
    if root is None:
        raise ConfigError(
            f"appworld: the tier {dataset!r} needs downloaded data, and $APPWORLD_ROOT names none: "
            f"set it to the folder in which you called `appworld download data`, or take a "
            f"generated tier: {', '.join(KINDS)}"
        )
    names = _names(_dataset_file(root, dataset))
    name = names[seed % len(names)]
    return Task(id=f"appworld/{name}/{seed}", data={"task": name}, tier=dataset, source="appworld")


def _dataset_file(root: Path, dataset: str) -> Path:
    return root / "data" / "datasets" / f"{dataset}.txt"


@cache
def _names(path: Path) -> list[str]:
    try:
        lines = path.read_text("utf-8").split()
    except OSError as error:
        raise ConfigError(f"appworld: cannot read {path}: {error.strerror}") from None
    names = [line.partition(":")[0] for line in lines]
    if not names:
        raise ConfigError(f"appworld: {path} names no tasks")
    return names


def name_of(task: Task) -> tuple[str, bool]:
    """The engine's name of a task, and whether it is generated.

    Errors: EnvError if the data names no task.
    """
    data = task.data
    if "task" in data:
        name = data["task"]
        if not isinstance(name, str) or not TASK_ID.fullmatch(name):  # part of a path
            raise EnvError(f"appworld: task {task.id!r}: data.task {name!r:.60} is no task's name")
        return name, False
    kind, split, seed = data.get("kind"), data.get("split", "train"), data.get("seed")
    known = {name for tier in KINDS for name in KINDS[tier]}
    kind, split = (value if isinstance(value, str) else "" for value in (kind, split))
    if split == "unseen":
        known |= {name for tier in HELD_OUT for name in HELD_OUT[tier]}
    if kind not in known or split not in ("train", "unseen") or type(seed) is not int or seed < 0:
        raise EnvError(
            f"appworld: task {task.id!r} names no task: its data needs `task` (downloaded), or "
            f"kind, split and seed; kinds of {split!r:.20} are {', '.join(sorted(known))}"
        )
    return f"{'u-' if split == 'unseen' else ''}{kind}_{seed}", True
