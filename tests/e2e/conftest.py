from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import BABYAI, Ludus, Zygote


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
def reference(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Ludus:
    """A whole run that nothing disturbed; to be read, not changed."""
    ludus = Ludus(zygote, tmp_path_factory.mktemp("reference"))
    ludus("train", BABYAI).ok()
    return ludus
