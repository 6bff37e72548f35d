"""The tables of hosts: each recipe key has one row, which says what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from host_configs import config

from ludus.backends.hosts import Table, value_at
from ludus.backends.trinity import keys as trinity
from ludus.backends.verl import keys as verl
from ludus.config.reference import keys
from ludus.config.schema import RunConfig

SECTIONS = {"model", "learner", "rollout", "rl", "rl.optimizer", "evaluate", "checkpoint"}
"""Each of their keys has a row."""

HOSTS = {"verl": verl, "trinity": trinity}


@pytest.fixture(params=HOSTS)
def host(request: pytest.FixtureRequest) -> Any:
    return HOSTS[request.param]


def test_every_key_of_the_schema_is_in_the_table(host: Any) -> None:
    table: Table = host.TABLE
    named = {entry.key.replace(".NAME", "") for entry in keys(RunConfig)}
    assert {key for key in named if table.row(key) is None} == SECTIONS
    assert {row.key for row in table.rows} <= named


def test_no_key_is_twice_in_the_table(host: Any) -> None:
    names = [row.key for row in host.TABLE.rows]
    assert len(names) == len(set(names))
    settings: Mapping[str, Any] = host.TABLE.settings(config())
    assert not host.OWN & set(settings)
    assert not set(host.DEFAULTS) & set(settings)


def test_a_row_names_the_keys_that_it_sets(host: Any) -> None:
    for row in host.TABLE.rows:
        if row.value is not None:
            assert not row.value(config()) or row.to


def test_adapted_and_refused_keys_have_a_note(host: Any) -> None:
    assert all(row.note for row in host.TABLE.rows if row.handling != "mapped")


def test_each_refused_key_is_refused_at_its_value_only(host: Any) -> None:
    plain = config()
    assert list(host.TABLE.faults(plain)) == []
    for row in host.TABLE.rows:
        if row.handling == "refused":
            assert value_at(plain, row.key) in row.allowed
