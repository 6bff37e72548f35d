"""Prometheus: the newest value of every metric, as gauges at `/metrics`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from prometheus_client import CollectorRegistry, Gauge, start_http_server
from pydantic import Field


class Prometheus:
    """Serves `http://host:port/metrics`.

    `rollout/success` becomes `ludus_rollout_success{run="...",stage="rl"}`; `ludus_step` is the
    last step of each stage.
    """

    def __init__(
        self,
        run_name: str,
        port: Annotated[
            int, Field(ge=0, le=65535, description="Port to serve on; 0: any free port.")
        ] = 9464,
        host: Annotated[str, Field(description="Address to listen on.")] = "127.0.0.1",
    ) -> None:
        self._run_name = run_name
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._server, self._thread = start_http_server(port, host, self._registry)
        self.port: int = self._server.server_port

    def log(self, stage: str, step: int, metrics: Mapping[str, float], time: float) -> None:
        for name, value in {"step": step, **metrics}.items():
            self._gauge(name).labels(run=self._run_name, stage=stage).set(value)

    def rewind(self, keep: Mapping[str, int]) -> None:
        """Remove all values; the next steps set them again."""
        for gauge in self._gauges.values():
            gauge.clear()

    def close(self) -> None:
        """Stop the server and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _gauge(self, name: str) -> Gauge:
        full = "ludus_" + re.sub(r"[^A-Za-z0-9_]", "_", name)
        if full not in self._gauges:
            self._gauges[full] = Gauge(full, name, ["run", "stage"], registry=self._registry)
        return self._gauges[full]
