"""Versions of the nodes are compared before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from ludus.cluster.hosts import ClusterConfig
from ludus.cluster.manage import version_faults

HEAD = {"python": "3.11.7", "executable": "/opt/bin/python", "ray": "2.60.0", "ludus": "0.1.0"}
NODE, INSTALL = "10.0.0.2", "pip install 'ludus-rl[ray]==0.1.0' there, or set `python`"


@pytest.mark.parametrize(
    ("worker", "said"),
    [
        ({}, []),
        ({"ray": "2.59.0"}, ["10.0.0.2: ray 2.59.0, but the head has 2.60.0: install the same"]),
        ({"ludus": "0.2.0"}, ["10.0.0.2: ludus 0.2.0, but the head has 0.1.0: install the same"]),
        (
            {"ludus": None},
            [
                f"{NODE}: /opt/bin/python has no package ludus: {INSTALL}",
            ],
        ),
        (
            {"python": "3.12.1", "ray": None},
            [
                f"{NODE}: /opt/bin/python has no package ray: {INSTALL}",
                f"{NODE}: Python 3.12.1 (/opt/bin/python), but the head has 3.11.7: Ray needs the "
                "same; set `python`",
            ],
        ),
    ],
)
def test_each_difference_is_a_line(worker: dict[str, Any], said: list[str]) -> None:
    config = ClusterConfig.model_validate({"head": "10.0.0.1", "workers": ["10.0.0.2"]})
    assert version_faults(config, [HEAD, {**HEAD, **worker}]) == said


def test_a_head_without_the_packages_is_named() -> None:
    config = ClusterConfig.model_validate({"head": "10.0.0.1", "workers": ["10.0.0.2"]})
    faults = version_faults(config, [{**HEAD, "ludus": None, "ray": None}, HEAD])
    assert [fault.partition(":")[0] for fault in faults] == ["10.0.0.1", "10.0.0.1"]
