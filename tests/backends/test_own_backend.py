"""A back end of a user's own: the example of the guide passes the conformance suite."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import ludus
from ludus.backends import BACKENDS
from ludus.backends.base import Backend
from ludus.backends.conformance import CHECKS, Check, check_refusal, tiny_context
from ludus.core.errors import ConfigError
from ludus.core.types import Spec

GUIDE = Path(ludus.__file__).parents[1] / "docs" / "your-own-backend.md"
EXAMPLE = re.search(r"```python\n(# my_backend\.py\n.*?)```", GUIDE.read_text(), re.S)


@pytest.fixture
def own(tmp_path: Path) -> str:
    assert EXAMPLE is not None
    path = tmp_path / "my_backend.py"
    path.write_text(EXAMPLE[1])
    return f"{path}:MyBackend"


def make(name: str, folder: Path, args: dict[str, Any] | None = None, **changes: Any) -> Backend:
    spec = Spec(name=name, args=args or {})
    return BACKENDS.build(spec, "backend", **tiny_context(folder, **changes))


@pytest.mark.parametrize("check", CHECKS)
async def test_conformance(check: Check, own: str, tmp_path: Path) -> None:
    await check(lambda folder: make(own, folder), tmp_path)


def test_its_arguments_are_checked(own: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"backend\.args\.speed"):
        make(own, tmp_path, {"speed": 0})


async def test_a_back_end_that_accepts_what_it_cannot_do_fails(own: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="verify was accepted"):
        await check_refusal(lambda: make(own, tmp_path, verify=True), "verify")


async def test_a_broken_back_end_fails(own: str, tmp_path: Path) -> None:
    """A back end whose versions stand still, and one that loses its optimizer."""

    class Still:
        def __init__(self, folder: Path) -> None:
            self._backend = make(own, folder)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._backend, name)

        async def publish_weights(self) -> int:
            return self._backend.policy_version

    failed = []
    for check in CHECKS:
        try:
            await check(Still, tmp_path / check.__name__)  # type: ignore[arg-type]
        except (AssertionError, Exception):
            failed.append(check.__name__)
    assert "versions_count_up" in failed
    assert "stale_turns_are_refused" in failed
