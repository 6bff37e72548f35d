"""The commands for clusters on a real cluster: a head here, and a worker over a real sshd."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import pytest
import yaml
from ssh_server import start_sshd

import ludus as package
from ludus.cluster.hosts import WORKER_PORTS
from ludus.cluster.node import processes

if TYPE_CHECKING:
    from harness import Done, Zygote

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(900)]
pytest.importorskip("ray")

LIMIT_S = 400  # a guard against a hang: two Rays start on busy cores
ROOT = Path(package.__file__).parents[1]
RECIPE = str(ROOT / "tests" / "recipes" / "babyai.yaml")
HEAD, WORKER = "pair@127.0.0.1", "pair@127.0.0.2"
SHORT = "demonstrations.num_episodes=8", "sft.steps=2", "rl=null"


def free_ports(number: int) -> list[int]:
    """Ports that are free, and none of Ray's workers."""
    found: list[int] = []
    with_sockets = []
    while len(found) < number:
        opened = socket.socket()
        opened.bind(("127.0.0.1", 0))
        with_sockets.append(opened)
        if (port := int(opened.getsockname()[1])) not in WORKER_PORTS:
            found.append(port)
    for opened in with_sockets:
        opened.close()
    return found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Iterator[Any]:
    """The file of a cluster of two nodes, which is up; its commands; its address."""
    from harness import Ludus

    folder = tmp_path_factory.mktemp("pair")
    sshd = start_sshd(folder)
    gcs, dashboard = free_ports(2)
    node = {"cpus": 1, "store_gb": 0.1}
    hosts = {
        "name": "pair",
        "head": {"address": "127.0.0.1", **node},
        "workers": [{"address": "127.0.0.2", "ssh": "127.0.0.2", **node}],
        "ssh": sshd.ssh,
        "python": sys.executable,
        "env": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        "logs": f"/tmp/ludus-pair-{os.getpid()}",
        "runs": str(folder / "runs"),
        "port": gcs,
        "dashboard": {"port": dashboard},
    }
    file = folder / "hosts.yaml"
    file.write_text(yaml.safe_dump(hosts))
    env = {
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}",
    }
    commands = Ludus(zygote, folder)

    def run(*argv: object) -> Done:
        return commands.start(*argv, env=env).wait(LIMIT_S)

    world = SimpleNamespace(run=run, commands=commands, env=env, file=file, hosts=hosts)
    world.folder, world.address = folder, env["RAY_API_SERVER_ADDRESS"]
    try:
        world.up = run("cluster", "up", file)
        yield world
    finally:
        run("cluster", "down", file, "--force", "--grace", 3)
        sshd.close()
        shutil.rmtree(hosts["logs"], ignore_errors=True)


def job_of(done: Done) -> str:
    return done.out.splitlines()[0].removeprefix("job ")


def test_up_and_status(world: Any) -> None:
    assert "127.0.0.2: started" in world.up.ok().out
    assert f"ludus submit RECIPE --address {world.address}" in world.up.out
    again = world.run("cluster", "up", world.file).ok()
    assert "127.0.0.1: the head runs already" in again.out
    assert "127.0.0.2: runs already" in again.out
    status = world.run("cluster", "status", world.file).ok()
    assert "pair: 2 of 2 nodes alive" in status.out
    lines = [line.split() for line in status.out.splitlines() if line.startswith("127.0.0.")]
    assert len(lines) == 2
    for line in lines:
        assert "alive" in line
        assert line[-3:] == [sys.version.split()[0], _ray_version(), package.__version__]
    assert processes(WORKER), "they carry the name of the cluster"


def _ray_version() -> str:
    from importlib.metadata import version

    return version("ray")


def test_the_dashboard_wants_the_token(world: Any) -> None:
    stranger = {**world.env, "RAY_AUTH_TOKEN_PATH": str(world.folder / "no-token")}
    done = world.commands("logs", "x", env=stranger)
    done.refused(1, "needs its token: copy ~/.ray/auth_token")


def test_submit_waits_and_follows(world: Any) -> None:
    """The job is the run: its lines, its exit code, its folder."""
    done = world.run("submit", RECIPE, *SHORT, "--wait").ok()
    job = job_of(done)
    variables = job_info(world, job)["runtime_env"]["env_vars"]
    assert variables["LUDUS_RAY_NAMESPACE"] == job, "runs on one cluster do not see each other"
    assert "ships babyai.yaml" in done.err
    assert "run tiny-1 is complete" in done.out
    assert (world.folder / "runs" / "tiny-1" / "report.html").exists()
    assert "run tiny-1 is complete" in world.run("logs", job).ok().out
    assert "run tiny-1 is complete" in world.run("logs", job, "-f").ok().out
    assert "run tiny-1 is complete" in world.run("attach", job).ok().out
    world.run("stop", job).refused(2, f"{job} has ended already: succeeded")
    world.run("stop", f"{job}x").refused(2, "has no such job", f"did you mean {job}?")
    assert f"job {job}: succeeded, ludus train babyai.yaml" in (
        world.run("cluster", "status", world.file).ok().out
    )


def test_a_run_that_fails_gives_its_exit_code(world: Any) -> None:
    done = world.run("submit", RECIPE, *SHORT, "budget.max_tokens=1", "--wait")
    assert done.code == 3, done.all
    assert world.run("attach", job_of(done)).code == 3


def test_what_the_cluster_refuses_is_told_by_submit(world: Any) -> None:
    done = world.run("submit", RECIPE, *SHORT, "--python", "/no/python")
    done.refused(1, "it failed before it began to train", "/no/python")


def job_info(world: Any, job: str) -> dict[str, Any]:
    token = (world.folder / "token").read_text()
    address = f"{world.address}/api/jobs/{job}"
    request = Request(address, headers={"Authorization": f"Bearer {token}"})
    with urlopen(request) as answer:
        return dict(json.load(answer))


def test_detach_stop_and_resume(world: Any) -> None:
    """Ctrl-C detaches. `stop` saves; the run is resumed as another job."""
    done = world.run("submit", RECIPE, "name=long", "sft.steps=100000", "rl=null").ok()
    job = job_of(done)
    attached = world.commands.start("attach", job, env=world.env)
    deadline = time.monotonic() + 120  # a guard against a hang
    while not (attached.stdout.exists() and "run long-1 in" in attached.stdout.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    attached.signal(signal.SIGINT)
    done = attached.wait()
    assert done.code == 130
    assert f"the job goes on: ludus attach {job} --address {world.address}" in done.err
    assert job_info(world, job)["status"] == "RUNNING"
    world.run("cluster", "down", world.file).refused(2, f"a job has not ended: {job}")
    world.run("cluster", "restart", world.file).refused(2, f"a job has not ended: {job}")
    stopped = world.run("stop", job).ok()
    assert f"job {job}: stopped" in stopped.out
    run = f"{world.hosts['runs']}/long-1"
    assert f"ludus submit --resume {run} --address {world.address}" in stopped.out
    assert world.run("attach", job).code == 130
    resumed = world.run("submit", "--resume", run, "sft.steps=8", "--wait")
    assert "long-1" in resumed.ok().out


def test_a_node_that_dies_is_seen_and_started_again(world: Any) -> None:
    [raylet] = [process for process in processes(WORKER) if process.what == "raylet"]
    os.kill(raylet.pid, signal.SIGKILL)
    status = world.run("cluster", "status", world.file)
    assert status.code == 1
    assert "pair: 1 of 2 nodes alive" in status.out
    again = world.run("cluster", "up", world.file).ok()
    assert "127.0.0.2: started" in again.out
    assert "pair: 2 of 2 nodes alive" in world.run("cluster", "status", world.file).ok().out


def test_a_head_that_dies_is_started_again_with_its_workers(world: Any) -> None:
    [gcs] = [process for process in processes(HEAD) if process.what == "gcs_server"]
    os.kill(gcs.pid, signal.SIGKILL)
    status = world.run("cluster", "status", world.file)
    assert status.code == 1
    assert "pair: 0 of 2 nodes alive" in status.out
    assert "127.0.0.1 head  dead" in status.out
    again = world.run("cluster", "up", world.file).ok()
    assert "127.0.0.1: started the head" in again.out
    assert "127.0.0.2: started" in again.out
    assert "pair: 2 of 2 nodes alive" in world.run("cluster", "status", world.file).ok().out


def test_hosts_that_cannot_be_used_are_refused_before_the_start(world: Any, tmp_path: Path) -> None:
    """Another Ray has the ports; a host does not answer; a folder cannot be written."""
    other = {**world.hosts, "name": "other", "workers": [], "logs": "/proc/ray"}
    file = tmp_path / "other.yaml"
    file.write_text(yaml.safe_dump(other))
    port, dashboard = other["port"], other["dashboard"]["port"]
    done = world.run("cluster", "up", file)
    done.refused(2, f"port {port} is in use", f"port {dashboard} is in use", "/proc/ray: ")
    missing = [{"address": "127.0.0.3", "ssh": "127.0.0.3"}]
    file.write_text(yaml.safe_dump({**other, "workers": missing}))
    world.run("cluster", "up", file).refused(2, "127.0.0.3: no ssh server listens at its port")
    status = world.run("cluster", "status", file)
    assert status.code == 1
    assert "unreachable" in status.out
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    bare = {"address": "127.0.0.2", "ssh": "127.0.0.2", "python": f"{tmp_path}/bare/bin/python"}
    file.write_text(yaml.safe_dump({**other, "workers": [bare]}))
    words = "127.0.0.2: ", "has no package ray: pip install 'ludus-rl[ray]==", "package ludus"
    world.run("cluster", "up", file).refused(2, *words)
    assert not processes("other@127.0.0.1")


def test_all_nodes_are_asked_for_their_version(world: Any) -> None:
    """As the program of a job does, for back ends with workers."""
    code = "from ludus.cluster.entry import check_nodes; check_nodes(); print('equal')"
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RAY_ADDRESS": f"127.0.0.1:{world.hosts['port']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": world.env["RAY_AUTH_TOKEN_PATH"],
    }
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout == "equal\n", done.stderr
    other = f"import ludus; ludus.__version__ = '9.9.9'; {code}"
    done = subprocess.run([sys.executable, "-c", other], env=env, capture_output=True, text=True)
    last = [
        line for line in done.stderr.splitlines() if "ConfigError" in line or "127.0.0.2" in line
    ]
    assert any("has ludus 0" in line and "the head 9.9.9" in line for line in last), done.stderr


def test_down_leaves_no_process(world: Any) -> None:
    """Last: the cluster is down after it. A job ends with it by force, and is resumed later."""
    long = world.run("submit", RECIPE, "name=last", "sft.steps=100000", "rl=null").ok()
    attached = world.commands.start("attach", job_of(long), env=world.env)
    deadline = time.monotonic() + 120  # a guard against a hang
    while not (attached.stdout.exists() and "run last-1 in" in attached.stdout.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert world.run("cluster", "restart", world.file, "--force", "--grace", 3).ok()
    lost = attached.wait()
    assert lost.code in (1, 2), lost.all
    assert "Traceback" not in lost.all
    assert processes(HEAD)
    resumed = world.run("submit", "--resume", "last-1", "sft.steps=8", "--wait")
    assert "run last-1 is complete" in resumed.ok().out
    done = world.run("cluster", "down", world.file).ok()
    assert "127.0.0.1: ended" in done.out
    assert "127.0.0.2: ended" in done.out
    assert not processes(HEAD)
    assert not processes(WORKER)
    status = world.run("cluster", "status", world.file)
    assert status.code == 1
    assert "pair: 0 of 2 nodes alive" in status.out
    assert "127.0.0.1: nothing ran" in world.run("cluster", "down", world.file).ok().out
