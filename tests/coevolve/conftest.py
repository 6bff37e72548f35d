from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from coevolve_world import Disturbed, label_after, write_recipe
from harness import Ludus, Zygote

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
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    started = Zygote(tmp_path_factory.mktemp("printed"))
    yield started
    started.close()


@pytest.fixture
def ludus(zygote: Zygote, tmp_path: Path) -> Ludus:
    """The command line in an empty folder."""
    return Ludus(zygote, tmp_path)


@pytest.fixture(scope="session")
def whole(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Ludus:
    """A co-evolution that nothing disturbed; to be read, not changed.

    Beside its folder lies a copy of it after each stage.
    """
    ludus = Ludus(zygote, tmp_path_factory.mktemp("whole") / "end")
    ludus.cwd.mkdir()
    recipe = write_recipe(ludus.cwd)
    shutil.copytree(ludus.cwd, ludus.cwd.parent / "nothing")
    ludus("coevolve", recipe, setup=SNAPSHOTS).ok()
    return ludus


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
