from __future__ import annotations

import pytest
from harness import BABYAI, Ludus, Zygote


@pytest.fixture(scope="session")
def reference(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Ludus:
    """A whole run that nothing disturbed; to be read, not changed."""
    ludus = Ludus(zygote, tmp_path_factory.mktemp("reference"))
    ludus("train", BABYAI).ok()
    return ludus
