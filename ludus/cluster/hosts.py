"""The schema of HOSTS.yaml, the description of a cluster.

name: lab
head: 10.0.0.1                       # or {address: 10.0.0.1, ssh: login, gpus: 8, ...}
workers: [10.0.0.2, 10.0.0.3]
ssh: {user: ludus, key: ~/.ssh/lab}
python: /opt/ludus/.venv/bin/python
setup: [module load cuda]
env: {HF_HOME: /data/hf}
logs: /data/ray
runs: /data/runs
dashboard: {port: 8265}
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from ludus.config.load import load_as
from ludus.config.messages import show
from ludus.config.sections import Section
from ludus.core.errors import ConfigError

HOST = r"^[A-Za-z0-9:][A-Za-z0-9.:_-]*$"
"""An address or a name; no option of ssh begins like it."""

WORKER_PORTS = range(10001, 20000)
"""Ray's own choice for its client server and its workers."""

LONGEST_LOGS = 40
"""Characters of `logs`: a socket's path below it may have 107."""

OPTION = r"^[A-Za-z][A-Za-z0-9]*[= ][^\n\x00]*[^\s\x00][^\n\x00]*$"
"""An option of ssh_config(5): a name and a value."""

RAYS_OWN = ("CPU", "GPU", "memory", "object_store_memory")
"""Resources with keys of their own."""

RESERVED = {
    "LUDUS_CLUSTER": "is set by `name`",
    "LUDUS_RUNS_DIR": "is set by `runs`",
    "LUDUS_RAY_NAMESPACE": "is set for each job",
    "RAY_ADDRESS": "is set by `head` and `port`",
    **dict.fromkeys(("BASHOPTS", "EUID", "PPID", "SHELLOPTS", "UID"), "is bash's own"),
}
"""Environment variables that a file of hosts cannot set."""

Port = Annotated[int, Field(ge=1024, le=65535)]


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"must be text on one line, got {text!r}")
    return text


def _program(path: str) -> str:
    if path.startswith("-") or path != path.strip():
        raise ValueError(f"must be the path of Python, without options or spaces, got {path!r}")
    return _one_line(path)


def _complete(text: str) -> str:
    if "\0" in text:
        raise ValueError("must be text without NUL characters")
    return text


Line = Annotated[str, AfterValidator(_one_line)]
Program = Annotated[str, Field(min_length=1), AfterValidator(_program)]
Text = Annotated[str, AfterValidator(_complete)]
Command = Annotated[str, Field(pattern=r"\S"), AfterValidator(_complete)]


class SshConfig(Section):
    """The connection to the hosts. What is not given comes from the user's ssh configuration."""

    user: str | None = Field(None, pattern=r"^[A-Za-z0-9_][\w.-]*$", description="Login name.")
    port: int | None = Field(None, ge=1, le=65535, description="Port of the ssh server.")
    key: Line | None = Field(None, min_length=1, description="File of the private key.")
    options: list[Annotated[str, Field(pattern=OPTION)]] = Field(
        default_factory=list, description="Options of ssh_config(5): [ProxyJump=bastion]."
    )
    connect_s: int = Field(10, ge=1, le=600, description="Seconds to connect.")


class HostConfig(Section):
    """A host of the cluster. A plain text is its address."""

    address: str = Field(description="IPv4 address under which the other nodes reach the host.")
    ssh: str | None = Field(
        None, pattern=HOST, description="Name of the host for ssh; null: its address."
    )
    port: int | None = Field(None, ge=1, le=65535, description="Port of its ssh server.")
    python: Program | None = Field(None, description="Python, if not that of all hosts.")
    cpus: int | None = Field(None, ge=0, le=100_000, description="CPUs for Ray; null: all.")
    gpus: int | None = Field(None, ge=0, le=1000, description="GPUs for Ray; null: all.")
    memory_gb: float | None = Field(
        None, ge=0.08, le=1_000_000, description="Memory for tasks; null: Ray's choice."
    )
    store_gb: float | None = Field(
        None,
        ge=0.08,
        le=1_000_000,
        description="Object store in shared memory; null: 30 % of the memory.",
    )
    resources: dict[str, Annotated[float, Field(gt=0, le=1e9)]] = Field(
        default_factory=dict, description="Resources of your own: {fast_disk: 1}."
    )

    @field_validator("address")
    @classmethod
    def _numeric(cls, address: str) -> str:
        try:
            number = ipaddress.IPv4Address(address)
        except ValueError:
            raise ValueError(
                f"must be an IPv4 address, got {show(address)}: Ray's nodes know each other by it; "
                "a name for ssh is the host's `ssh`"
            ) from None
        if number.is_unspecified or number.is_multicast or number.is_reserved:
            raise ValueError(f"{address} is no address of a host: give that of its network card")
        return address

    @field_validator("resources")
    @classmethod
    def _own(cls, resources: dict[str, float]) -> dict[str, float]:
        for name in resources:
            if name in RAYS_OWN:
                raise ValueError(
                    f"{name} is Ray's own: set `cpus`, `gpus`, `memory_gb`, `store_gb`"
                )
            if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
                raise ValueError(f"{show(name)} is no name of a resource, such as fast_disk")
        return resources


def _address(value: Any) -> Any:
    if isinstance(value, str):
        return {"address": value}
    if not isinstance(value, dict):
        raise ValueError(
            f"must be an IPv4 address, or a mapping of a host's keys, got {show(value)}"
        )
    return value


Host = Annotated[HostConfig, BeforeValidator(_address)]


class DashboardConfig(Section):
    """Ray's dashboard, which is also the job API: it runs programs of those who have the token."""

    host: str = Field(
        "127.0.0.1", pattern=HOST, description="Address of the head to listen on; 0.0.0.0: all."
    )
    port: Port = Field(8265, description="Port of the dashboard and of the job API.")


class ClusterConfig(Section):
    """A cluster: a head, workers, and the environment of Ray on them."""

    name: str = Field(
        "ludus",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=100,
        description="The cluster's name.",
    )
    head: Host = Field(description="The host of the head; runs are started there.")
    workers: list[Host] = Field(default_factory=list, description="The other hosts.")
    ssh: SshConfig = Field(default_factory=SshConfig, description="The connection to the hosts.")
    python: Program = Field("python3", description="Python with ludus and Ray, on all hosts.")
    setup: list[Command] = Field(
        default_factory=list,
        description="Shell commands before each program on a host: [module load cuda].",
    )
    env: dict[str, Text] = Field(
        default_factory=dict, description="Environment variables of Ray and of the runs."
    )
    logs: Line = Field("/tmp/ray", description="Folder of Ray's sessions and logs on each host.")
    runs: Line | None = Field(
        None, description="Folder of the runs on the head, better shared by all hosts."
    )
    port: Port = Field(6379, description="Port of the head, for the workers.")
    dashboard: DashboardConfig = Field(
        default_factory=DashboardConfig, description="Ray's dashboard."
    )
    auth: Literal["token", "disabled"] = Field(
        "token",
        description="Ray's authentication: your token (`~/.ray/auth_token`, made at need); "
        "disabled: who reaches the head's ports can run programs.",
    )
    start_s: int = Field(120, ge=5, le=3600, description="Seconds for a host to start Ray.")

    @property
    def hosts(self) -> list[HostConfig]:
        """All hosts, the head first."""
        return [self.head, *self.workers]

    @property
    def url(self) -> str:
        """The dashboard's address, as other machines use it."""
        open_to = ("0.0.0.0", "::", self.dashboard.host)
        own = self.head.address if self.dashboard.host in open_to[:2] else self.dashboard.host
        return f"http://{own}:{self.dashboard.port}"

    @model_validator(mode="after")
    def _consistent(self) -> ClusterConfig:
        _check_hosts(self)
        _check_ports(self)
        for key, folder in (("logs", self.logs), ("runs", self.runs)):
            if folder is not None and not folder.startswith("/"):
                raise ValueError(f"`{key}` must be an absolute path, got {folder!r}")
        if (length := len(os.fsencode(self.logs))) > LONGEST_LOGS:
            raise ValueError(
                f"`logs` must have at most {LONGEST_LOGS} characters (bytes), got {length}: Ray's "
                "sockets lie below it"
            )
        _check_env(self.env)
        return self


def _check_env(env: Mapping[str, str]) -> None:
    for name in env:
        if not (name.isascii() and name.isidentifier()):
            raise ValueError(f"`env`: {show(name)} is no name of an environment variable")
        reason = "is set by `auth`" if name.startswith("RAY_AUTH_") else RESERVED.get(name)
        if reason:
            raise ValueError(f"`env`: {name} {reason}: remove it")


def _check_hosts(config: ClusterConfig) -> None:
    seen = set()
    for host in config.hosts:
        if host.address in seen:
            raise ValueError(f"`workers`: the address {host.address} is named twice")
        seen.add(host.address)
    afar = [host.address for host in config.workers if not is_loopback(host.address)]
    if afar and is_loopback(config.head.address):
        raise ValueError(
            f"`head.address` must be an address that the workers reach ({afar[0]} cannot reach "
            f"{config.head.address})"
        )


def _check_ports(config: ClusterConfig) -> None:
    for key, port in (("port", config.port), ("dashboard.port", config.dashboard.port)):
        if port in WORKER_PORTS:
            raise ValueError(
                f"`{key}` must not be in {WORKER_PORTS[0]} to {WORKER_PORTS[-1]}, the ports of "
                f"Ray's workers; got {port}"
            )
    if config.port == config.dashboard.port:
        raise ValueError(f"`port` and `dashboard.port` must differ, both are {config.port}")


def is_loopback(address: str) -> bool:
    """True for an address that only its own machine reaches."""
    return address == "localhost" or address.startswith("127.") or address == "::1"


def is_here(host: HostConfig) -> bool:
    """True for a host that needs no ssh: its address is this machine's, and it names no `ssh`."""
    if host.ssh is not None:
        return False
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host.address, 0))
        except OSError:
            return False
    return True


def load_hosts(path: str) -> ClusterConfig:
    """Read HOSTS.yaml. Errors: ConfigError, one line a fault."""
    file = Path(path)
    if not file.is_file():
        kind = "is a folder, not a file" if file.is_dir() else "no such file"
        raise ConfigError(f"{path}: {kind}: give the file that names the cluster's hosts")
    if file.suffix == ".py":
        raise ConfigError(f"{path}: the hosts are named in a YAML file")
    return load_as(ClusterConfig, path)
