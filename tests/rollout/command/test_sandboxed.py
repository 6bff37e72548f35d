"""The agent `command` in the jail: it reaches the gateway, and nothing else."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest
from command_world import CALL, eventually, made, play, python
from rollout_world import World

from ludus.core.errors import ConfigError
from ludus.core.types import Status
from ludus.sandbox.attacks import ATTACKS, attack_all, descendants
from ludus.sandbox.cgroups import PREFIX, _parents
from ludus.sandbox.jail import Jail
from ludus.services.gateway.gateway import unix_socket

pytestmark = pytest.mark.usefixtures("layers")


async def test_a_program_plays_an_episode(world: World) -> None:
    code = """
said = call(sys.stdin.read())
told = [os.getcwd().split("/"), os.environ["OPENAI_BASE_URL"][:22], os.environ["HOME"]]
told.append(sorted(os.listdir()))
told.append(json.load(open(os.environ["LUDUS_TASK"]))["data"])
outcome(reward=0.5, success=said == "blue", explanation=json.dumps(told))
"""
    played = await play(world, python(code, sandbox=True))
    assert (played.status, played.reward, played.error) == (Status.COMPLETED, 0.5, None)
    assert played.explanation == (
        '[["", "work", "work"], "http://127.0.0.1:8000/", "/work", [], {"seed": 0}]'
    )


CLIENT = """
import json, os, openai
with openai.OpenAI() as client:
    messages = [{"role": "user", "content": "red ?"}]
    for stream in (False, True):
        reply = client.chat.completions.create(
            model=os.environ["OPENAI_MODEL"], messages=messages, stream=stream)
        said = [e.choices[0].delta.content or "" for e in reply if e.choices] if stream else []
json.dump({"reward": "".join(said) == "blue"}, open("outcome.json", "w"))
"""


async def test_openais_client(world: World) -> None:
    args = {"command": ["{python}", "agent.py"], "packages": ["openai"], "sandbox": True}
    try:
        made({**args, "command": ["sh"]})
    except ConfigError as error:
        pytest.skip(str(error))
    code = CLIENT.replace('"blue"}', '"blue" and 1}')
    played = await play(world, {**args, "command": ["{python}", "-c", code]})
    assert (played.reward, played.num_turns, played.error) == (1.0, 2, None)


async def test_a_folder_with_programs(world: World, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/agent.sh").write_text("#!/bin/sh\ncat deep/data > copy && python3 main.py\n")
    (tmp_path / "deep/agent.sh").chmod(0o755)
    (tmp_path / "deep/data").write_text("d")
    (tmp_path / "main.py").write_text(f"{CALL}\ncall('red')\noutcome(reward=1)")
    played = await play(world, {"command": ["deep/agent.sh"], "folder": tmp_path, "sandbox": True})
    assert (played.reward, played.error) == (1.0, None)
    assert not (tmp_path / "copy").exists()


REACH = """
import socket, subprocess
call("red")
reached = []
def reach(name, family, address, kind=socket.SOCK_STREAM):
    try:
        with socket.socket(family, kind) as sock:
            sock.settimeout(1)
            sock.connect(address)
            if kind != socket.SOCK_STREAM: sock.send(b"x")
            reached.append(name)
    except OSError: pass
IP = socket.AF_INET
for host in ("127.0.0.1", "0.0.0.0", "10.0.2.2", "169.254.169.254", "192.0.2.1", OWN):
    reach(f"tcp {host}", IP, (host, PORT))
for host in ("10.0.2.2", "169.254.169.254", "192.0.2.1"):
    reach(f"udp {host}", IP, (host, PORT), socket.SOCK_DGRAM)
reach("ipv6", socket.AF_INET6, ("::1", PORT))
reach("abstract", socket.AF_UNIX, "\\0" + ABSTRACT)
reach("path", socket.AF_UNIX, PATH)
for family, kind, protocol in ((IP, socket.SOCK_RAW, 1), (16, socket.SOCK_RAW, 0), (17, 3, 0),
                               (IP, socket.SOCK_STREAM, 132), (IP, socket.SOCK_STREAM, 262),
                               (40, socket.SOCK_STREAM, 0)):
    try:
        socket.socket(family, kind, protocol)
        reached.append(f"family {family} {protocol}")
    except OSError: pass
interfaces = [line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line]
outcome(reward=1, explanation=json.dumps([reached, interfaces, sorted(os.listdir("/forward"))]))
"""


async def test_nothing_else_of_the_network_is_reachable(world: World, tmp_path: Path) -> None:
    with (
        socket.create_server(("", 0)) as listening,
        socket.socket(socket.AF_UNIX) as abstract,
        unix_socket(tmp_path / "s"),
    ):
        abstract.bind(f"\0ludus-{os.getpid()}")
        abstract.listen()
        own = socket.gethostbyname("localhost")
        port = listening.getsockname()[1]
        bait = f"PORT, OWN, PATH = {port}, {own!r}, {str(tmp_path / 's')!r}\n"
        bait += f"ABSTRACT = 'ludus-{os.getpid()}'\n"
        played = await play(world, python(bait + REACH, sandbox=True))
        assert played.explanation == '[[], ["lo"], ["socket"]]'
        free = python(bait + REACH.replace('os.listdir("/forward")', "[]"))
        assert "tcp 127.0.0.1" in (await play(world, free)).explanation  # the bait is there


async def test_another_episodes_key_is_needed(world: World) -> None:
    code = """
import urllib.error
call("red")
os.environ["OPENAI_API_KEY"] = "sk-ludus-" + "0" * 32
os.environ["OPENAI_BASE_URL"] = "http://127.0.0.1:8000/v1"
try: call("red")
except urllib.error.HTTPError as error: outcome(reward=error.code)
"""
    assert (await play(world, python(code, sandbox=True))).reward == 401.0


HELD = {"network", "abstract Unix socket", "capabilities", "signals", "user namespaces",
        "kernel interfaces", "memory of init", "daemon"}  # fmt: skip


async def test_attacks_on_a_jail_that_forwards() -> None:
    attacks = [attack for attack in ATTACKS if attack.name in HELD]
    with tempfile.TemporaryDirectory() as folder, unix_socket(Path(folder) / "s"):
        jail = Jail(packages=())
        jail.forward(8000, Path(folder) / "s")
        async with jail:
            outcomes = await attack_all(jail, attacks)
    assert len(outcomes) == len(HELD)
    assert [(o.attack.name, o.detail) for o in outcomes if not o.held] == []


async def test_the_forwarder_is_out_of_the_programs_reach(world: World) -> None:
    code = """
import glob
others = [p for p in glob.glob("/proc/[0-9]*") if p != f"/proc/{os.getpid()}"]
seen = []
for path in others:
    for name in ("mem", "environ", "fd"):
        try:
            os.listdir(f"{path}/fd") if name == "fd" else open(f"{path}/{name}", "rb").close()
            seen.append(f"{path}/{name}")
        except OSError: pass
call("red")
outcome(reward=len(others) > 1, explanation=json.dumps(seen))
"""
    code = code.replace("reward=len(others) > 1", "reward=float(len(others) > 1)")
    played = await play(world, python(code, sandbox=True))
    assert (played.reward, played.explanation) == (1.0, "[]")


@pytest.mark.parametrize(
    ("code", "args", "status", "error"),
    [
        ("call('red')\nsys.exit('no such file')", {}, Status.ERROR_ENV,
         "the command ended with exit code 1:\nno such file"),
        ("call('red')\nos.kill(os.getpid(), 11)", {}, Status.ERROR_ENV, "killed by signal 11"),
        ("call('red')\nfor _ in range(1000): sys.stderr.write('x' * 100_000)",
         {"max_output_mb": 1}, Status.ERROR_ENV, "wrote more than 1 MB to stderr"),
        ("call('red')\nimport time; time.sleep(600)", {"timeout_s": 1.0}, Status.ERROR_TIMEOUT,
         "longer than agent.timeout_s = 1 s"),
        ("call('red')\nx = bytes(1 << 30)", {"memory_mb": 128}, Status.ERROR_ENV,
         "needed more than agent.memory_mb = 128"),
        ("call('red')", {}, Status.UNSCORABLE, "no reward"),
        ("call('red')\nopen('outcome.json', 'w').write('{')", {}, Status.UNSCORABLE, "no JSON"),
        ("while True: call('red')", {}, Status.TRUNCATED_TURNS, "the limit is 5"),
    ],
)  # fmt: skip
async def test_ends(world: World, code, args, status, error) -> None:
    played = await play(world, python(code, sandbox=True, **args), max_turns=5)
    assert error in (played.error or "")
    assert played.status is status
    assert played.reward == (0.0 if status is Status.TRUNCATED_TURNS else None)


@pytest.mark.slow
async def test_the_deadline_ends_all_that_it_has_started(world: World) -> None:
    code = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
call("red")
if not os.fork(): os.setsid()
os.fork()
time.sleep(600)
"""
    before = set(descendants())
    groups = set(cgroups())
    played = await play(world, python(code, sandbox=True), episode_deadline_s=4.0)
    assert (played.status, played.num_turns) == (Status.ERROR_TIMEOUT, 1)
    eventually(lambda: set(descendants()) <= before)
    assert set(cgroups()) == groups


def cgroups() -> list[Path]:
    name = f"{PREFIX}{os.getpid()}-*"
    return [path for parent, _ in _parents() for path in parent.glob(name)]


def test_settings_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agent.py").write_text("x" * 2_000_000)
    monkeypatch.chdir(tmp_path)
    for args, error in [
        ({"command": ["python3", "agent.py"]}, "agent.py is not in the sandbox: set `folder`"),
        ({"command": ["{python}"], "folder": tmp_path, "disk_mb": 1}, "more than agent.disk_mb"),
        ({"command": ["nosuch-program"]}, "no program 'nosuch-program' on /usr/local/bin"),
        ({"command": ["sh"], "packages": ["nosuch-package"]}, "nosuch-package: not installed"),
    ]:
        with pytest.raises(ConfigError, match=error):
            made({**args, "sandbox": True})
