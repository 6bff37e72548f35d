"""Weights & Biases; offline by default, so no data leaves the machine unasked."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import wandb
from pydantic import Field


class Wandb:
    """Logs to a Weights & Biases run in `run_dir/wandb`.

    Metrics are named `<stage>/<name>`, with `<stage>/step` as x axis. A resumed run keeps its id;
    steps logged before the rewind stay beside the repeated steps. The file of an offline run is
    complete only after the process has ended.
    """

    def __init__(
        self,
        run_dir: Path,
        run_name: str,
        config: Mapping[str, Any],
        project: Annotated[str, Field(description="Name of the project.")] = "ludus",
        entity: Annotated[str | None, Field(description="Team; null: your user.")] = None,
        mode: Annotated[
            Literal["offline", "online"],
            Field(
                description="offline: keep the run on this machine; `wandb sync` uploads it later."
            ),
        ] = "offline",
        group: Annotated[str | None, Field(description="Group of runs.")] = None,
        tags: Annotated[list[str] | None, Field(description="Tags of the run.")] = None,
    ) -> None:
        quiet = wandb.Settings(console="off", silent=True, disable_git=True)
        self._run = wandb.init(
            project=project,
            entity=entity,
            mode=mode,
            group=group,
            tags=tags,
            dir=run_dir,
            id=_run_id(run_dir),
            name=run_name,
            config=dict(config),
            resume="allow",
            reinit="create_new",
            settings=quiet,
        )
        self._defined: set[str] = set()

    def log(self, stage: str, step: int, metrics: Mapping[str, float], time: float) -> None:
        axis = f"{stage}/step"
        named = {f"{stage}/{name}": value for name, value in metrics.items()}
        for name in named.keys() - self._defined:
            self._run.define_metric(name, step_metric=axis)
            self._defined.add(name)
        self._run.log({axis: step, **named})

    def rewind(self, keep: Mapping[str, int]) -> None:
        """Does nothing: Weights & Biases cannot delete logged steps."""

    def close(self) -> None:
        """Finish the run: write or upload the remaining data."""
        self._run.finish()


def _run_id(run_dir: Path) -> str:
    """Returns the run's id, drawn once: another folder may have the same name."""
    file = run_dir / "wandb" / "run-id"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(secrets.token_hex(4))
    return file.read_text()
