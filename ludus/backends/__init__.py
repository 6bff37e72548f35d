"""Back ends: engines that sample, train and publish, behind one protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ludus.config.registry import Registry, Row

if TYPE_CHECKING:
    from ludus.backends.base import Backend

BACKENDS: Registry[Backend] = Registry(
    "backend",
    {
        "local": Row("ludus.backends.local:LocalBackend", "train", "trains in this process"),
        "ray": Row(
            "ludus.backends.ray.backend:RayBackend", "ray", "trains on a Ray cluster, in actors"
        ),
        "debug": Row("ludus.backends.local:LocalBackend", "train", "shows N tasks and stops"),
        "verl": Row("ludus.backends.verl.host:VerlHost", "train", "a host: trains in verl"),
        "trinity": Row(
            "ludus.backends.trinity.host:TrinityHost", "train", "a host: trains in Trinity-RFT"
        ),
    },
    context=frozenset({"make_model", "renderer", "config", "run_dir"}),
    needs=("begin_stage", "train", "save", "load", "close"),
)
"""Back ends by name: each is a `backends.base.Backend`."""
