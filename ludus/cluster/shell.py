"""Run a program on a host of a cluster: over ssh, or here.

The host's bash reads one script from stdin, so that no value of `env` is in a list of processes:

    export HF_HOME=/data/hf
    eval 'module load cuda' </dev/null || { echo ludus-setup:0 >&2; exit 90; }
    exec /opt/ludus/bin/python -m ludus.cluster.node look <<'LUDUS_REQUEST'
    {"name": "lab", ...}
    LUDUS_REQUEST

The program answers with one line of JSON.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ludus.cluster.hosts import ClusterConfig, HostConfig, is_here
from ludus.cluster.node import ANSWER, CLUSTER
from ludus.cluster.token import own_token
from ludus.core.errors import ConfigError, LudusError, printable
from ludus.core.system.signals import abandon

SETUP_FAILED, SSH_FAILED = 90, 255
END = "LUDUS_REQUEST"

PROBE = f"""
import json, sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
found = {{"python": sys.version.split()[0], "executable": sys.executable}}
for module, package in (("ray", "ray"), ("ludus", "ludus-rl")):
    try:
        found[module] = version(package) if find_spec(module) else None
    except PackageNotFoundError:
        found[module] = None
print({ANSWER!r} + json.dumps(found))
"""
"""Runs where ludus is not installed too."""

REMEDIES = (
    ("UNPROTECTED PRIVATE KEY", "the file of `ssh.key` is readable by others: chmod 600"),
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key has changed: compare it, then ssh-keygen -R",
    ),
    (
        "Host key verification failed",
        "its host key is unknown: log in once by hand, or set "
        "`ssh.options: [StrictHostKeyChecking=accept-new]`",
    ),
    (
        "Permission denied",
        "ssh refuses the login: put your public key into its authorized_keys, or set `ssh.user` "
        "and `ssh.key`",
    ),
    (
        "Connection refused",
        "no ssh server listens at its port: start sshd there, or set `ssh.port`",
    ),
    ("Could not resolve hostname", "no machine has this name: give an address, or set `ssh`"),
    ("timed out", "it does not answer: is it on, and is the way to it open (`ssh.options`)?"),
    ("No route to host", "it does not answer: is it on, and is the way to it open?"),
    ("Bad configuration option", "`ssh.options` has an option that ssh does not know"),
)
"""Words of ssh's messages, and what to do."""


class HostError(LudusError):
    """A host of a cluster cannot be reached, or a program there fails."""


def ask(
    config: ClusterConfig,
    host: HostConfig,
    action: str,
    request: Mapping[str, Any] | None = None,
    timeout_s: float = 60,
) -> dict[str, Any]:
    """Returns the answer of `python -m ludus.cluster.node ACTION` on a host. Errors: HostError.

    The action `probe` needs no ludus there: versions of Python, Ray and ludus.
    """
    if action == "probe":
        program, stdin = "-", PROBE
    else:
        program, stdin = f"-m ludus.cluster.node {action}", json.dumps(request or {})
    python = _path(host.python or config.python)
    lines = _environment(config, strict=action != "stop")
    lines += [f"exec {python} {program} <<'{END}'", stdin, END, ""]
    done = _run(config, host, "\n".join(lines), timeout_s)
    answer = next((line for line in done.stdout.splitlines() if line.startswith(ANSWER)), None)
    if done.returncode or answer is None:
        raise HostError(f"{host.address}: {_fault(config, host, done)}")
    facts: dict[str, Any] = json.loads(answer.removeprefix(ANSWER))
    if "error" in facts:
        raise HostError(f"{host.address}: {facts['error']}")
    return facts


def ask_all(
    config: ClusterConfig,
    hosts: Sequence[HostConfig],
    action: str,
    requests: Sequence[Mapping[str, Any]] | Mapping[str, Any],
    timeout_s: float = 60,
) -> list[dict[str, Any] | HostError]:
    """As `ask`, of several hosts at once; an error takes the place of its host's answer."""

    def one(host: HostConfig, request: Mapping[str, Any]) -> dict[str, Any] | HostError:
        try:
            return ask(config, host, action, request, timeout_s)
        except HostError as error:
            return error

    each = [requests] * len(hosts) if isinstance(requests, Mapping) else requests
    pool = ThreadPoolExecutor(max_workers=32)
    jobs = [pool.submit(one, *both) for both in zip(hosts, each, strict=True)]
    try:
        return [job.result() for job in jobs]
    finally:  # Ctrl-C does not wait for a host
        for job in jobs:
            abandon(job)
        pool.shutdown(wait=False, cancel_futures=True)


def check_ssh(config: ClusterConfig) -> None:
    """Check that the private key is there. Errors: ConfigError."""
    key = config.ssh.key
    if key is not None and not Path(key).expanduser().is_file():
        raise ConfigError(f"ssh.key: {key}: no such file")


def _environment(config: ClusterConfig, strict: bool) -> list[str]:
    """The lines that make the environment; a command of `setup` may fail without `strict`."""
    variables = dict(config.env)
    if config.runs is not None:
        variables["LUDUS_RUNS_DIR"] = config.runs
    variables["RAY_AUTH_MODE"] = config.auth
    if config.auth == "token":
        variables["RAY_AUTH_TOKEN"] = own_token(create=True)
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    for index, command in enumerate(config.setup):
        failed = f"{{ echo ludus-setup:{index} >&2; exit {SETUP_FAILED}; }}"
        # `eval`: a syntax error fails this command alone.
        lines.append(f"eval {shlex.quote(command)} </dev/null || {failed if strict else ':'}")
    return lines


def _path(program: str) -> str:
    """The quoted path of a program, with the home folder of its host for `~`."""
    if program.startswith("~/"):
        return f'"$HOME"/{shlex.quote(program[2:])}'
    return shlex.quote(program)


def _run(
    config: ClusterConfig, host: HostConfig, script: str, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    here = is_here(host)
    command = ["bash", "-s"] if here else [*_ssh(config, host), "bash", "-s"]
    environment = {name: value for name, value in os.environ.items() if name != CLUSTER}
    try:
        return subprocess.run(
            command,
            input=script,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=environment,
            cwd=Path.home(),  # as over ssh; `python -m` imports from it
            start_new_session=True,  # Ctrl-C ends the command, and no half-started host
        )
    except subprocess.TimeoutExpired:
        raise HostError(f"{host.address}: no answer within {timeout_s:.0f} s") from None
    except FileNotFoundError:
        raise ConfigError(f"{command[0]} is not installed on this machine") from None


def _ssh(config: ClusterConfig, host: HostConfig) -> list[str]:
    given = config.ssh
    command = ["ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={given.connect_s}"]
    command += ["-o", "ServerAliveInterval=15"]
    for option in given.options:
        command += ["-o", option]
    port = host.port or given.port
    for letter, value in (("p", port), ("l", given.user), ("i", _expanded(given.key))):
        command += [f"-{letter}", str(value)] if value is not None else []
    return [*command, "--", host.ssh or host.address]


def _expanded(path: str | None) -> str | None:
    return None if path is None else str(Path(path).expanduser())


def _fault(config: ClusterConfig, host: HostConfig, done: subprocess.CompletedProcess[str]) -> str:
    """The failure of a script in one line."""
    said, python = done.stderr.strip(), host.python or config.python
    last = printable(said.splitlines()[-1].strip()) if said else f"exit code {done.returncode}"
    if done.returncode == SSH_FAILED and not is_here(host):
        remedy = next((text for words, text in REMEDIES if words in said), "")
        return f"{remedy} ({last})" if remedy else f"ssh: {last}"
    if done.returncode == SETUP_FAILED and (hit := re.search(r"ludus-setup:(\d+)", said)):
        index = int(hit[1])
        before = printable(said[: hit.start()].strip().splitlines()[-1]) if hit.start() else ""
        reason = f": {before}" if before else ""
        return f"`setup.{index}` ({config.setup[index]}) failed{reason}"
    if "No module named ludus" in said or "No module named 'ludus" in said:
        return f"{python} has no package ludus: pip install 'ludus-rl[ray]' there"
    if done.returncode in (126, 127):
        return f"there is no {python}: set `python` to one with ludus and Ray ({last})"
    return last
