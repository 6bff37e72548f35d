"""One local Ray for the tests of a process, and back ends on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ludus.backends import BACKENDS
from ludus.backends.base import Backend
from ludus.backends.conformance import tiny_context
from ludus.core.types import Spec


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """A Ray of this machine, with more logical CPUs than cores."""
    ray = pytest.importorskip("ray", reason="needs the extra ray")
    ray.init(
        address="local",
        num_cpus=16,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
    )
    yield
    ray.shutdown()


@pytest.fixture
def make() -> Iterator[Callable[..., Backend]]:
    """Makes a back end `ray` in a folder, with arguments; `changes` are of the configuration."""
    made: list[Backend] = []

    def make(folder: Path, changes: dict[str, Any] | None = None, **args: Any) -> Backend:
        context = tiny_context(folder, **(changes or {}))
        spec = Spec(name="ray", args={"cpus": 0.5, **args})
        backend: Backend = BACKENDS.build(spec, "backend", **context)
        made.append(backend)
        return backend

    yield make
    for backend in made:
        backend.close()
