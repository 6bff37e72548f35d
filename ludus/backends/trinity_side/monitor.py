"""Trinity's monitor that tells `ludus train` of complete steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trinity.utils.monitor import Monitor

from ludus.backends.host_side.player import this_job


class StepsMonitor(Monitor):  # type: ignore[misc]
    """Appends a line for each step of the trainer, and for each evaluation of the explorer."""

    def __init__(self, project: str, group: str, name: str, role: str, config: Any = None) -> None:
        self._is_trainer = config is not None and role == config.trainer.name
        self._file = Path(this_job()["steps"]).open("ab", buffering=0)  # noqa: SIM115  # closed by `close`

    def log(self, data: dict[str, Any], step: int, commit: bool = False) -> None:
        """Tell of a step: the trainer's metrics, or an evaluation with the weights after it."""
        if self._is_trainer:
            values = {name: _number(value) for name, value in data.items()}
        elif any(name.startswith("eval/") for name in data):
            values = {}
        else:
            return
        numbers = {name: value for name, value in values.items() if value is not None}
        self._file.write(json.dumps({"step": step, "data": numbers}).encode() + b"\n")

    def close(self) -> None:
        """Close the file. Idempotent."""
        if hasattr(self, "_file"):
            self._file.close()


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
