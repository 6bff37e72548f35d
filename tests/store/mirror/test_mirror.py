"""A run's copy in object storage: whole after a kill at any point, owned by one process."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from variants import variants

from ludus.config.schema import ModelConfig, RunConfig, TasksConfig
from ludus.core.errors import ConfigError, MirrorError
from ludus.core.types import Group, Message, Segment, Spec, Status, Task, Trajectory
from ludus.store import RunStore
from ludus.store.folders import RunFolder
from ludus.store.mirror import MirrorTaken, Remote, RunMirror, fetch_run

pytest.importorskip("fsspec", reason="needs the extra `mirror`")


def config_of(runs_dir: Path, url: str, name: str = "tiny") -> RunConfig:
    return RunConfig(
        name=name,
        runs_dir=str(runs_dir),
        mirror=url,
        model=ModelConfig(path="somewhere"),
        tasks=TasksConfig(train=Spec(name="env")),
    )


def groups_of(step: int) -> list[Group]:
    played = Trajectory(
        id=f"t{step}",
        group_id=f"g{step}",
        task_id="task",
        segments=[
            Segment(-1, [5, 6], None, Message(role="user", content="\x00 ü \ud800")),
            Segment(0, [7], [-0.1 - 2**-54], Message(role="assistant", content="a")),
        ],
        status=Status.COMPLETED,
        reward=float("nan"),
        metrics={"success": float("inf")},
    )
    lost = Trajectory(f"l{step}", f"g{step}", "task", status=Status.ERROR_ENV, dropped="broke")
    return [Group(f"g{step}", Task(id="task", data={"$float": [1.5]}), [played, lost])]


class Machine:
    """A runs folder with its store, and one run in it."""

    def __init__(self, path: Path, url: str, name: str = "tiny") -> None:
        self.config = config_of(path, url, name)
        path.mkdir(parents=True, exist_ok=True)
        self.store = RunStore.open(None, path)
        self.folder = RunFolder(path / f"{name}-1")
        self.said: list[str] = []

    def begin(self) -> Machine:
        self.folder.path.mkdir()
        self.folder.config.write_text("name: tiny\n")
        self.store.create_run(self.folder.id, self.config.name, {"a": 1}, {"ludus": "x"})
        return self

    def work(self, step: int) -> None:
        """A step, and a checkpoint of it; the one of two steps before is let go."""
        dropped = [("row", "too long")]
        self.store.record_step(
            self.folder.id, "rl", step, groups_of(step), {"m": step}, dropped=dropped
        )
        with self.folder.metrics.open("a") as file:
            file.write(f"{step}\n")
        checkpoint = self.folder.checkpoints / f"rl-{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "model.safetensors").write_bytes(bytes([step]) * 1000)
        shutil.rmtree(self.folder.checkpoints / f"rl-{step - 2:06d}", ignore_errors=True)

    def mirror(self) -> RunMirror:
        assert self.config.mirror is not None
        return RunMirror(self.config.mirror, self.folder, self.store, True, self.said.append)

    def fetch_run(self, *, skip_damaged: bool = False) -> RunFolder | None:
        return fetch_run(self.config, self.store, self.said.append, skip_damaged=skip_damaged)

    def work_and_push(self, steps: int) -> list[dict[str, object]]:
        """As a run does, step by step; the state after each."""
        states = []
        for step in range(steps):
            self.work(step)
            self.mirror().push()
            states.append(self.state())
        return states

    def state(self) -> dict[str, object]:
        run = self.folder.id
        return {
            "files": {
                str(path.relative_to(self.folder.path)): path.read_bytes()
                for path in sorted(self.folder.path.rglob("*"))
                if path.is_file() and not path.name.startswith(".")
            },
            "steps": [
                repr((row, self.store.groups(run, row.stage, row.step)))
                for row in self.store.steps(run)
            ],
            "dropped": self.store.dropped(run),
        }


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/mirror/of/run"
        return
    name = uuid4().hex
    yield f"memory://{name}/run"
    from fsspec.implementations.memory import MemoryFileSystem

    MemoryFileSystem().rm(f"/{name}", recursive=True)


@pytest.fixture
def machine(tmp_path: Path, url: str) -> Callable[[str], Machine]:
    return lambda name: Machine(tmp_path / name, url)


def objects(remote: Remote) -> set[str]:
    return set(remote.sizes())


def test_a_fresh_machine_gets_the_whole_run(machine: Callable[[str], Machine], url: str) -> None:
    first = machine("a").begin()
    mirror = first.mirror()
    for step in range(5):
        first.work(step)
        mirror.push()
    (first.folder.path / ".lock").write_text("1")
    (first.folder.checkpoints / ".tmp-rl-000009-1").mkdir()
    (first.folder.checkpoints / ".tmp-rl-000009-1" / "half").write_text("x")
    (first.folder.path / "sampler").mkdir()
    (first.folder.path / "sampler" / "weights").write_text("x")
    mirror.push()
    shutil.rmtree(first.folder.checkpoints / ".tmp-rl-000009-1")
    shutil.rmtree(first.folder.path / "sampler")

    fresh = machine("b")
    assert fresh.fetch_run() == fresh.folder
    assert fresh.state() == first.state()
    newest = Remote(url).newest()
    assert newest is not None
    assert newest.sequence == 6
    assert not any(part.startswith((".", "sampler")) for name in newest.files for part in [name])


def test_what_no_snapshot_needs_is_removed(machine: Callable[[str], Machine], url: str) -> None:
    first = machine("a").begin()
    mirror, remote = first.mirror(), Remote(url)
    for step in range(4):
        first.work(step)
        mirror.push()
    newest = remote.newest()
    assert newest is not None
    # the checkpoints of steps 1 to 3: those of the newest two snapshots
    large = [size for size in remote.sizes().values() if size == 1000]
    assert len(large) == 3
    assert objects(remote) >= set(newest.contents())


def test_only_what_is_new_is_uploaded(
    machine: Callable[[str], Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = machine("a").begin()
    for step in range(2):
        first.work(step)
    first.mirror().push()
    sent: list[int] = []
    put = Remote.put
    monkeypatch.setattr(
        Remote, "put", lambda self, what, entry: sent.append(entry.size) or put(self, what, entry)
    )
    read: list[int] = []
    pack = RunStore.pack_step
    monkeypatch.setattr(RunStore, "pack_step", lambda *args: read.append(args[-1]) or pack(*args))
    first.work(2)
    first.mirror().push()  # of a process that has just started
    assert sent.count(1000) == 1
    assert read == [2]


def test_a_step_that_was_made_again_replaces_the_old_one(
    machine: Callable[[str], Machine],
) -> None:
    first = machine("a").begin()
    mirror = first.mirror()
    first.work(0)
    mirror.push()
    first.store.record_step(first.folder.id, "rl", 0, groups_of(7), {"m": 7.0})
    mirror.push()
    fresh = machine("b")
    fresh.fetch_run()
    assert fresh.state() == first.state()


def push_until(place: str, nth: int, runs_dir: Path, url: str) -> None:
    """In a process of its own: push, and die at the n-th call that changes the storage."""
    from fsspec.implementations.local import LocalFileSystem

    machine = Machine(runs_dir, url)
    calls = 0
    original = getattr(LocalFileSystem, place)

    def strike(self: object, *args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if calls == nth:
            if place == "put_file":  # half of it is there
                Path(str(args[1])).parent.mkdir(parents=True, exist_ok=True)
                Path(str(args[1])).write_bytes(Path(str(args[0])).read_bytes()[:-1])
            if place == "pipe_file":
                Path(str(args[0])).parent.mkdir(parents=True, exist_ok=True)
                Path(str(args[0])).write_bytes(args[1][:-9])  # type: ignore[index]
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *args, **kwargs)

    setattr(LocalFileSystem, place, strike)
    machine.mirror().push()
    os._exit(0)


KILLS = [(place, nth) for place in ("put_file", "pipe_file", "rm_file") for nth in (1, 2)]


@pytest.mark.parametrize(("place", "nth"), variants(KILLS, KILLS[1::2]))
def test_killed_at_any_point_of_a_push_the_copy_can_be_taken_up(
    tmp_path: Path, place: str, nth: int
) -> None:
    url = f"file://{tmp_path}/mirror"
    first = Machine(tmp_path / "a", url).begin()
    states = first.work_and_push(3)
    first.work(3)
    states.append(first.state())
    first.store.close()
    process = multiprocessing.get_context("spawn").Process(
        target=push_until, args=(place, nth, tmp_path / "a", url)
    )
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL, "the place was not reached"

    fresh = Machine(tmp_path / "b", url)
    assert fresh.fetch_run() is not None
    assert fresh.state() == states[3 if place == "rm_file" else 2]

    # and from there it goes on, over what was cut off
    step = 4 if place == "rm_file" else 3
    fresh.work(step)
    fresh.mirror().push()
    third = Machine(tmp_path / "c", url)
    third.fetch_run()
    assert third.state() == fresh.state()
    again = Machine(tmp_path / "a", url)
    assert again.fetch_run() is not None, "the first machine is behind, and takes up the newer copy"
    assert again.state() == fresh.state()
    assert (tmp_path / "a" / ".tiny-1.stale" / "config.yaml").exists()


def test_of_two_owners_one_stops(machine: Callable[[str], Machine]) -> None:
    first = machine("a").begin()
    zombie = first.mirror()
    zombie.push()
    second = machine("b")
    second.fetch_run()
    second.mirror().push()
    with pytest.raises(MirrorTaken, match=r"another process has continued .*snapshot 2"):
        zombie.push()
    with pytest.raises(MirrorTaken):
        zombie.after_checkpoint()


def test_of_two_commits_of_one_number_one_is_refused(
    machine: Callable[[str], Machine], url: str
) -> None:
    first = machine("a").begin()
    first.mirror().push()
    remote = Remote(url)
    newest = remote.newest()
    assert newest is not None
    remote.commit(newest)  # the same once more: its answer was lost
    other = type(newest)(newest.sequence, {**newest.run, "name": "other"}, newest.files, None)
    with pytest.raises(MirrorTaken):
        remote.commit(other)


def test_a_copy_that_is_here_already_is_used(machine: Callable[[str], Machine]) -> None:
    first = machine("a").begin()
    assert first.fetch_run() is None, "the mirror holds nothing yet"
    first.mirror().push()
    first.work(0)  # ahead of the mirror: killed between checkpoint and push
    ahead = first.state()
    assert first.fetch_run() == first.folder
    assert first.state() == ahead


def test_damage_is_named_and_may_be_passed_over(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/mirror"
    first = Machine(tmp_path / "a", url).begin()
    states = first.work_and_push(2)
    newest = Remote(url).newest()
    assert newest is not None
    weights = newest.files["checkpoints/rl-000001/model.safetensors"]
    broken = tmp_path / "mirror" / "objects" / weights.sha256
    broken.write_bytes(b"x" * 1000)
    fresh = Machine(tmp_path / "b", url)
    with pytest.raises(MirrorError, match=f"the object {weights.sha256} is damaged"):
        fresh.fetch_run()
    assert not fresh.folder.path.exists()
    assert not list((tmp_path / "b").glob(".tiny*"))

    broken.unlink()
    with pytest.raises(MirrorError, match=f"cannot read the object {weights.sha256}"):
        fresh.fetch_run()
    assert fresh.fetch_run(skip_damaged=True) is not None
    assert fresh.state() == states[0]
    fresh.work(5)
    fresh.mirror().push()
    third = Machine(tmp_path / "c", url)
    third.fetch_run()
    assert third.state() == fresh.state()


def test_what_belongs_to_another_run_is_refused(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/mirror"
    first = Machine(tmp_path / "a", url).begin()
    first.mirror().push()
    with pytest.raises(ConfigError, match="holds run tiny-1, not a run of 'other'"):
        Machine(tmp_path / "b", url, "other").fetch_run()
    with pytest.raises(ConfigError, match="is another run of that name"):
        Machine(tmp_path / "c", url).begin().fetch_run()
    fourth = Machine(tmp_path / "d", url)  # its folder was removed, its rows were not
    fourth.store.create_run("tiny-1", "tiny", {"a": 2}, {})
    fourth.store.record_step("tiny-1", "rl", 0, groups_of(0), {})
    with pytest.raises(ConfigError, match="has another run of that id"):
        fourth.fetch_run()
    assert len(fourth.store.steps("tiny-1")) == 1
    assert not fourth.folder.path.exists()


def test_a_name_that_leads_out_of_the_run_is_refused(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/mirror"
    first = Machine(tmp_path / "a", url).begin()
    first.mirror().push()
    remote = Remote(url)
    newest = remote.newest()
    assert newest is not None
    files = {f"../{name}": entry for name, entry in newest.files.items()}
    remote.commit(type(newest)(2, newest.run, files, None))
    with pytest.raises(MirrorError, match="outside of the run"):
        Machine(tmp_path / "b", url).fetch_run()
    assert not list((tmp_path / "b").glob("config.yaml"))


@pytest.mark.parametrize(
    ("url", "said"),
    [("nothing://x", "nothing://x"), ("s3:bucket", "mirror"), ("/folder", "mirror")],
)
def test_wrong_urls(tmp_path: Path, url: str, said: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=said):
        Remote(str(config_of(tmp_path, url).mirror))


def test_storage_that_fails_for_a_while_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ludus.store.mirror.sync.time.sleep", lambda _: None)
    first = Machine(tmp_path / "a", f"file://{tmp_path}/mirror").begin()
    mirror = first.mirror()
    mirror.push()
    (tmp_path / "mirror").rename(tmp_path / "away")
    (tmp_path / "mirror").write_text("no folder")
    first.work(0)
    mirror.after_checkpoint()
    assert "The run continues" in first.said[-1]
    with pytest.raises(MirrorError, match="mirror file://"):
        mirror.push()
    (tmp_path / "mirror").unlink()
    (tmp_path / "away").rename(tmp_path / "mirror")
    mirror.after_checkpoint()
    fresh = Machine(tmp_path / "b", f"file://{tmp_path}/mirror")
    fresh.fetch_run()
    assert fresh.state() == first.state()
    assert json.loads((fresh.folder.path / ".mirror.json").read_text())["sequence"] == 2
