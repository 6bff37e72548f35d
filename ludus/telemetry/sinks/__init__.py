"""Metrics sinks: one file and one row each."""

from __future__ import annotations

from pathlib import Path

from ludus.config.registry import Registry, Row
from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError, MissingDependency
from ludus.telemetry.sinks.base import Guarded, Sink

SINKS: Registry[Sink] = Registry(
    "metrics",
    {
        "prometheus": Row(
            "ludus.telemetry.sinks.prometheus:Prometheus", "metrics", "gauges to scrape over HTTP"
        ),
        "tensorboard": Row(
            "ludus.telemetry.sinks.tensorboard:TensorBoard",
            "metrics",
            "event files for TensorBoard",
        ),
        "wandb": Row(
            "ludus.telemetry.sinks.wandb:Wandb", "metrics", "Weights & Biases, or offline"
        ),
    },
    context=frozenset({"run_dir", "run_name", "config"}),
    needs=("log", "rewind", "close"),
)


def build_sinks(config: RunConfig, run_dir: Path) -> list[Guarded]:
    """Build the sinks of `config.metrics`, guarded; a sink that cannot start is disabled.

    Raises:
        ConfigError, MissingDependency: a sink is unknown, misconfigured, or not installed.
    """
    context = {
        "run_dir": run_dir,
        "run_name": run_dir.resolve().name,
        "config": config.model_dump(mode="json"),
    }
    places = [(f"metrics.{index}", spec) for index, spec in enumerate(config.metrics)]
    for where, spec in places:  # check all before any sink opens a port or a file
        SINKS.check(spec, where)
    sinks: list[Guarded] = []
    for where, spec in places:
        sink = Guarded(f"{spec.name} ({where})")
        try:
            sink.sink = SINKS.build(spec, where, **context)
        except (ConfigError, MissingDependency):
            for started in sinks:
                started.close()
            raise
        except Exception as error:
            sink.disable(error)
        sinks.append(sink)
    return sinks
