"""ALFWorld's translated problems on disk: what is played from there is what was translated."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("textworld", reason="needs the extra alfworld")
pytest.importorskip("alfworld", reason="needs the extra alfworld")

from ludus.core.errors import EnvError
from ludus.envs.alfworld import engine as alfworld_engine
from ludus.envs.alfworld import games as alfworld_games
from ludus.envs.alfworld import translation as alfworld_translation
from ludus.envs.alfworld.env import ALFWorld
from ludus.envs.alfworld.expert import Expert

SMALL = "pick_and_place_simple:bathroom"


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "data"))
    alfworld_engine.forget()
    yield
    alfworld_translation._maker.cache_clear()


@pytest.fixture
def translated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The problems that the translator was asked for."""
    asked: list[str] = []

    def translate(domain: str, problem: str) -> Any:
        asked.append(problem)
        return real(domain, problem)

    real = alfworld_translation._translated
    monkeypatch.setattr(alfworld_translation, "_translated", translate)
    return asked


def files_of(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").glob("ludus/alfworld/translated-*/*"))


def a_game(tier: str = SMALL, seed: int = 1) -> dict[str, Any]:
    return alfworld_games.game_of(ALFWorld.task(tier, seed))


def opening(game: dict[str, Any]) -> tuple[str, list[str]]:
    """Of a game that nobody remembers."""
    alfworld_engine.forget()
    engine = alfworld_engine.Engine()
    return engine.reset(game), engine.commands


def episode(game: dict[str, Any]) -> list[Any]:
    """The expert's: the texts, the commands in the order that one is looked for, the facts."""
    alfworld_engine.forget()
    engine, expert = alfworld_engine.Engine(), Expert(game["traj_data"], search=False)

    def seen(text: str) -> Any:
        facts = list(engine.facts().items())
        return text, engine._operators, list(engine._operators), engine.commands, facts, engine.won

    said = [seen(engine.reset(game))]
    while not engine.won:
        assert len(said) < 30
        said.append(seen(engine.step(expert.action(engine.facts()))))
    return said


@pytest.mark.parametrize(
    "tier",
    [
        SMALL,
        "pick_clean_then_place_in_recep:bathroom",
        "look_at_obj_in_light:bedroom",
        "unseen/pick_cool_then_place_in_recep",
        "pick_two_obj_and_place:livingroom",
    ],
)
def test_an_episode_from_the_disk_is_the_same(
    tier: str, tmp_path: Path, translated: list[str]
) -> None:
    game = a_game(tier)
    first = episode(game)
    assert translated == [game["pddl_problem"]]
    assert len(files_of(tmp_path)) == 1
    assert episode(game) == first
    assert len(translated) == 1


def test_another_process_writes_the_same(tmp_path: Path, translated: list[str]) -> None:
    """Whatever strings hash to there."""
    game = a_game()
    code = (
        "import asyncio\nfrom ludus.envs.alfworld.env import ALFWorld\n"
        f"asyncio.run(ALFWorld().reset(ALFWorld.task({SMALL!r}, 1)))\n"
    )
    environ = {**os.environ, "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", code], env=environ, check=True)
    (file,) = files_of(tmp_path)
    theirs, said = file.read_bytes(), episode(game)
    assert not translated
    file.unlink()
    assert episode(game) == said
    assert file.read_bytes() == theirs


def test_files_that_are_damaged_or_anothers(tmp_path: Path, translated: list[str]) -> None:
    game, other = a_game(), a_game(seed=2)
    said = opening(game)
    (file,) = files_of(tmp_path)
    whole = file.read_bytes()
    opening(other)
    (others,) = set(files_of(tmp_path)) - {file}
    middle = len(whole) // 2
    row = json.loads(gzip.decompress(whole))
    damaged = [
        b"",
        b"no gzip",
        whole[:middle],
        whole[:middle] + bytes(64) + whole[middle + 64 :],
        others.read_bytes(),
        *(
            gzip.compress(json.dumps(value).encode())
            for value in ([], 3, {}, row | {"more": 1}, {"file": file.name})
        ),
        gzip.compress(b"[" * 100_000),
    ]
    for number, data in enumerate(damaged):
        file.write_bytes(data)
        assert opening(game) == said
        assert len(translated) == 3 + number
        assert file.read_bytes() == whole
    assert set(files_of(tmp_path)) == {file, others}


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, translated: list[str]
) -> None:
    game = a_game()
    said = opening(game)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert opening(game) == said

    def no_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    assert opening(game) == said
    assert len(translated) == 3


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    game = a_game()
    monkeypatch.setattr(Path, "write_bytes", full)
    assert "Your task is to: " in opening(game)[0]
    assert files_of(tmp_path) == []


def test_another_translator_reads_nothing_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, translated: list[str]
) -> None:
    game = a_game()
    said = opening(game)
    for source, release in ((alfworld_translation.__file__, "99.0"), (__file__, "99.0")):
        monkeypatch.setattr(alfworld_translation, "__file__", source)
        monkeypatch.setattr(alfworld_translation, "version", lambda _, release=release: release)
        alfworld_translation._maker.cache_clear()
        assert opening(game) == said
    assert len(translated) == 3
    files = files_of(tmp_path)
    assert len({file.parent for file in files}) == 3
    assert len({file.name for file in files}) == 1


def test_what_cannot_be_played_is_not_kept(tmp_path: Path) -> None:
    good = a_game()
    for goal in ("(isHot agent1)", "(sings agent1)"):
        problem = good["pddl_problem"].partition("(:goal")[0] + f"(:goal {goal}))"
        for _ in range(2):
            with pytest.raises(EnvError, match="alfworld: load raised"):
                opening(good | {"pddl_problem": problem})
    assert files_of(tmp_path) == []


def test_many_read_and_write_at_the_same_time(tmp_path: Path) -> None:
    games = [a_game(seed=seed) for seed in range(2)] * 8

    def tables(game: dict[str, Any]) -> str:
        found = alfworld_translation.translation(game["pddl_domain"], game["pddl_problem"])
        fields = type(found).__slots__
        return json.dumps([getattr(found, name) for name in fields])

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(tables, games))
    assert len(set(found[::2])) == len(set(found[1::2])) == 1
    assert len(files_of(tmp_path)) == 2
