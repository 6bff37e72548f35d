from __future__ import annotations

import shutil
from itertools import count
from pathlib import Path

import pytest
from coevolve_world import Disturbed, label_after, write_recipe
from harness import Ludus, Zygote
from made_once import made_once

SNAPSHOTS = """
import shutil
from ludus.coevolve.storage import Storage
record = Storage.record
def recorded(self, label, result):
    record(self, label, result)
    shutil.copytree(".", "../" + label.replace("/", "-"))
Storage.record = recorded
"""


@pytest.fixture(scope="session")
def whole(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Ludus:
    """A co-evolution that nothing disturbed; to be read, not changed.

    Beside its folder lies a copy of it after each stage.
    """

    def run(folder: Path) -> None:
        ludus = Ludus(zygote, folder / "end")
        ludus.cwd.mkdir()
        recipe = write_recipe(ludus.cwd)
        shutil.copytree(ludus.cwd, folder / "nothing")
        ludus("coevolve", recipe, setup=SNAPSHOTS).ok()

    return Ludus(zygote, made_once(tmp_path_factory, "whole-coevolution", run) / "end")


@pytest.fixture
def after(whole: Ludus, zygote: Zygote, tmp_path: Path) -> Disturbed:
    """Copies the co-evolution as it was after a stage: `after("iteration-1/generate")`.

    "nothing" is before the first. Each copy has a folder of its own.
    """
    numbers = count()

    def copy(label: str) -> Ludus:
        folder = tmp_path / f"copy-{next(numbers)}"
        shutil.copytree(whole.cwd.parent / label_after(label), folder)
        return Ludus(zygote, folder)

    return copy
