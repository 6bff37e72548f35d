"""Deaths of actors are counted, their replacements repeated; the journal of the ranks."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs the extra ray")

from ray.exceptions import ObjectStoreFullError, OutOfDiskError

from ludus.backends.ray.backend import RayBackend
from ludus.backends.ray.deaths import Deaths, Replacements
from ludus.backends.ray.learner_group import Entry, LearnerGroup, _telling
from ludus.core.errors import ConfigError, LudusError


async def test_an_actor_is_replaced_once_for_all_that_miss_it() -> None:
    started: list[int] = []

    async def replace(index: int) -> None:
        started.append(index)
        await asyncio.sleep(0)

    replacements = Replacements(replace, deaths := Deaths("samplers", 2))
    for _ in range(3):
        replacements.begin(1, "sampler 1 has died")
    assert 1 in replacements
    await replacements.wait()
    assert (started, deaths.num, 1 in replacements) == ([1], 1, False)


async def test_a_replacement_that_dies_too_is_one_more_death() -> None:
    tries: list[int] = []

    async def replace(index: int) -> None:
        tries.append(index)
        raise LudusError("an actor died while it started")

    replacements = Replacements(replace, deaths := Deaths("samplers", 3))
    replacements.begin(0, "sampler 0 has died")
    with pytest.raises(LudusError, match=r"started; deaths of samplers so far: 4.*max_deaths = 3"):
        await replacements.wait()
    assert (len(tries), deaths.num) == (3, 4)


async def test_a_node_without_the_package_is_not_tried_again() -> None:
    tries: list[int] = []

    async def replace(index: int) -> None:
        tries.append(index)
        raise ConfigError("a node of the cluster lacks ludus")

    replacements = Replacements(replace, Deaths("samplers", 3))
    replacements.begin(0, "sampler 0 has died")
    with pytest.raises(ConfigError, match="lacks ludus"):
        await replacements.wait()
    assert len(tries) == 1


async def test_replacements_end_with_the_run() -> None:
    forever = asyncio.Event()

    async def replace(index: int) -> None:
        await forever.wait()

    replacements = Replacements(replace, Deaths("samplers", 1))
    replacements.begin(0, "sampler 0 has died")
    await asyncio.sleep(0)
    replacements.close()
    await asyncio.wait_for(replacements.wait(), 10)
    assert 0 not in replacements


def test_the_journal_begins_with_the_newest_checkpoint(tmp_path: Path) -> None:
    """Also where only one checkpoint is kept, so the one before is gone."""
    group = LearnerGroup(list, lambda address: [], 1, 1.0)
    group._keep(Entry("begin_stage", ()))
    for number in range(4):
        group._keep(Entry("train", (number,)))
        path = tmp_path / f"rl-{number}"
        path.mkdir()
        if number:  # `save` has deleted the checkpoint before
            (tmp_path / f"rl-{number - 1}").rmdir()
        group.checkpointed(path)
    assert group._journal == [Entry("begin_stage", ()), Entry("load", (path,))]
    group._keep(Entry("shorten_stage", (9,)))
    later = tmp_path / "rl-9"
    later.mkdir()
    group.checkpointed(later)
    shortened = [Entry("begin_stage", ()), Entry("shorten_stage", (9,))]
    assert group._journal == [*shortened, Entry("load", (later,))], "its schedule stays"


@pytest.mark.parametrize("kind", [OutOfDiskError, ObjectStoreFullError])
def test_a_full_object_store_is_told(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """On a rank, for its weights, and in the driver, for the samples."""
    said = "object store is full.*free space in Ray's temporary folder"
    full = kind("Local disk is full")
    assert re.search(said, str(_telling({0: full}, "weights", 2, False)))

    def put(value: object) -> None:
        raise full

    monkeypatch.setattr("ray.put", put)
    with pytest.raises(LudusError, match=said):
        RayBackend._shared(object.__new__(RayBackend), "train", [])
