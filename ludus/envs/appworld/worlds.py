"""The generated world, written by the engine's process into the user's cache folder."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from ludus.core.errors import EnvError
from ludus.envs.appworld.engines import Engine, engine_of, settings_of
from ludus.envs.appworld.tasks import WORLD_SEED, cache_root

GENERATE_LIMIT_S = 600.0
_lock = threading.Lock()


def ensure_world(engine: Engine) -> Path:
    """The folder of the generated world, which is written if need be: in about 15 s.

    Errors: EnvError where it cannot be written.
    """
    root = cache_root()
    if not (root / "data" / "base_dbs").is_dir():
        with _locked(root):
            if not (root / "data" / "base_dbs").is_dir():
                _generate(engine, op="world", root=str(root), seed=WORLD_SEED)
    return root


def ensure_task(engine: Engine, root: Path, name: str, data: dict[str, Any]) -> None:
    """Write a generated task, if it is not there. Errors: EnvError."""
    if (root / "data" / "tasks" / name).is_dir():
        return
    _generate(
        engine,
        op="task",
        root=str(root),
        task=name,
        kind=data["kind"],
        unseen=data.get("split") == "unseen",
        seed=data["seed"],
    )


def expert_of(root: Path, name: str) -> Sequence[str] | None:
    """The expert's code of a generated task, step by step; None for a downloaded one."""
    try:
        text = (root / "data" / "tasks" / name / "ground_truth" / "expert.json").read_text("utf-8")
        steps: list[str] = json.loads(text)
        return steps
    except (OSError, ValueError):
        return None


def _generate(engine: Engine, **request: Any) -> None:
    root = Path(request["root"])
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvError(f"appworld: cannot write {root.parent}: {error.strerror}") from None
    with closing(engine.helper(b"g", "generator")) as generator:
        generator.call(GENERATE_LIMIT_S, **request)


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Only one process and thread writes the world; the others wait for it."""
    import fcntl

    root.parent.mkdir(parents=True, exist_ok=True)
    with _lock, open(root.parent / f"{root.name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def prepare() -> None:
    """Write the generated world ahead of its first use: `make appworld` calls it."""
    engine = engine_of(cache_root(), settings_of(None))
    print(f"AppWorld: the generated world is in {ensure_world(engine)}")
    engine.close()


if __name__ == "__main__":
    prepare()
