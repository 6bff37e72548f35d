"""Weights & Biases: offline unless asked, so that nothing leaves the machine by surprise."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import wandb
from pydantic import Field


class Wandb:
    """Logs to a run of Weights & Biases, kept in `run_dir/wandb`.

    Metrics are named `<stage>/<name>` and drawn over `<stage>/step`. A resumed run goes on under
    the same id; what was logged before the rewind stays there, under the same steps. The file of
    an offline run is whole when the process has ended, not before.
    """

    def __init__(
        self,
        run_dir: Path,
        run_name: str,
        config: Mapping[str, Any],
        project: Annotated[str, Field(description="The project's name.")] = "ludus",
        entity: Annotated[str | None, Field(description="A team; null: your own.")] = None,
        mode: Annotated[
            Literal["offline", "online"],
            Field(description="offline keeps the run here; `wandb sync` uploads it later."),
        ] = "offline",
        group: Annotated[str | None, Field(description="Runs shown together.")] = None,
        tags: Annotated[list[str] | None, Field(description="Words to find the run by.")] = None,
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
        """Log one step of a stage."""
        axis = f"{stage}/step"
        named = {f"{stage}/{name}": value for name, value in metrics.items()}
        for name in named.keys() - self._defined:
            self._run.define_metric(name, step_metric=axis)
            self._defined.add(name)
        self._run.log({axis: step, **named})

    def rewind(self, keep: Mapping[str, int]) -> None:
        """Nothing: what Weights & Biases was given cannot be taken back."""

    def close(self) -> None:
        """Finish the run: write, or upload, what is left."""
        self._run.finish()


def _run_id(run_dir: Path) -> str:
    """The run's id, drawn once: a folder's name may be used again in another place."""
    file = run_dir / "wandb" / "run-id"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(secrets.token_hex(4))
    return file.read_text()
