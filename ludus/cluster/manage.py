"""Start, show and stop a cluster: all hosts of HOSTS.yaml together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ludus.cluster.hosts import ClusterConfig, HostConfig, is_loopback
from ludus.cluster.shell import HostError, ask, ask_all, check_ssh
from ludus.core.errors import ConfigError

Note = Callable[[str], object]
Answers = list[dict[str, Any] | HostError]

GB = 10**9
STOP_ROUNDS_S = 60
"""Seconds above the grace period that ending the processes of a host may take."""

UNFINISHED = ("PENDING", "RUNNING")


@dataclass(frozen=True, slots=True)
class HostState:
    """A host in `ludus cluster status`."""

    host: HostConfig
    versions: dict[str, str | None] = field(default_factory=dict)
    runs: bool = False
    node: dict[str, Any] | None = None
    has_rest: bool = False
    fault: str = ""

    @property
    def state(self) -> str:
        """alive; dead (a part of its Ray has ended, or the head has lost it); starting (the head
        does not know it yet, or has ended); stopped; unreachable."""
        if self.fault:
            return "unreachable"
        if self.node is not None:
            return "alive" if self.node["alive"] and self.runs else "dead"
        if self.runs:
            return "starting"
        return "dead" if self.has_rest else "stopped"


@dataclass(frozen=True, slots=True)
class ClusterState:
    """A cluster in `ludus cluster status`."""

    hosts: list[HostState]
    jobs: list[dict[str, Any]]
    fault: str = ""

    @property
    def healthy(self) -> bool:
        return not self.fault and all(host.state == "alive" for host in self.hosts)


def up(config: ClusterConfig, note: Note) -> None:
    """Start Ray where it does not run yet, after a check of all hosts.

    Errors: ConfigError for hosts that cannot be used, before anything starts; HostError.
    """
    looks = check(config)
    started = [_running(config, host, look) for host, look in zip(config.hosts, looks, strict=True)]
    if started[0]:
        note(f"{config.head.address}: the head runs already")
    else:
        if any(started[1:]):  # they belong to a head that is gone
            for answer in ask_all(config, config.workers, "stop", _stops(config, 5), 90):
                _raise(answer)
            started = [False] * len(started)
        _start(config, [config.head], note)
    workers = zip(config.workers, started[1:], strict=True)
    waiting = [host for host, runs in workers if not runs]
    for host in config.workers:
        if host not in waiting:
            note(f"{host.address}: runs already")
    _start(config, waiting, note)
    _await_nodes(config)


def check(config: ClusterConfig) -> list[dict[str, Any]]:
    """Check reachability, versions, folders and ports of all hosts; returns what each host has.

    Errors: ConfigError, one line a fault.
    """
    check_ssh(config)
    probes = ask_all(config, config.hosts, "probe", {})
    if faults := [str(probe) for probe in probes if isinstance(probe, HostError)]:
        raise ConfigError("\n".join(faults))
    versions = [probe for probe in probes if not isinstance(probe, HostError)]
    if faults := version_faults(config, versions):
        raise ConfigError("\n".join(faults))
    requests = [_look(config, host) for host in config.hosts]
    looks = ask_all(config, config.hosts, "look", requests)
    for host, answer in zip(config.hosts, looks, strict=True):
        if isinstance(answer, HostError):
            faults.append(str(answer))
            continue
        faults += [f"{host.address}: {fault}" for fault in answer["folders"]]
        if not answer["processes"] and host is config.head:
            faults += [_busy(config, port) for port in answer["busy"]]
    if faults:
        raise ConfigError("\n".join(faults))
    return [answer for answer in looks if not isinstance(answer, HostError)]


def version_faults(config: ClusterConfig, probes: Sequence[dict[str, Any]]) -> list[str]:
    """Returns a line for each absent package and each version that differs from the head's."""
    faults, reference = [], probes[0]
    for host, probe in zip(config.hosts, probes, strict=True):
        for package, name in (("ray", "ray"), ("ludus", "ludus")):
            own, wanted = probe[package], reference[package]
            if own is None:
                extra = f"=={reference['ludus']}" if reference["ludus"] else ""
                faults.append(
                    f"{host.address}: {probe['executable']} has no package {name}: "
                    f"pip install 'ludus-rl[ray]{extra}' there, or set `python`"
                )
            elif wanted is not None and own != wanted:
                faults.append(
                    f"{host.address}: {name} {own}, but the head has {wanted}: install the same"
                )
        if probe["python"] != reference["python"]:
            faults.append(
                f"{host.address}: Python {probe['python']} ({probe['executable']}), but the head "
                f"has {reference['python']}: Ray needs the same; set `python`"
            )
    return faults


def down(config: ClusterConfig, note: Note, *, force: bool = False, grace_s: float = 10) -> None:
    """End all processes of the cluster on all hosts.

    Errors: ConfigError for a job that has not ended, without `force`; HostError.
    """
    check_ssh(config)
    if not force and (jobs := unfinished_jobs(config)):
        raise ConfigError(
            f"a job has not ended: {', '.join(jobs)}: stop it (`ludus stop JOB`), or use --force"
        )
    faults = []
    requests = [_stop(config, host, grace_s) for host in config.hosts]
    answers = ask_all(config, config.hosts, "stop", requests, grace_s + STOP_ROUNDS_S)
    for host, answer in zip(config.hosts, answers, strict=True):
        if isinstance(answer, HostError):
            faults.append(f"{answer}; its Ray may still run")
        elif answer["left"]:
            faults.append(f"{host.address}: cannot end {', '.join(answer['left'])}")
        else:
            ended = answer["ended"]
            note(f"{host.address}: " + (f"ended {ended} processes" if ended else "nothing ran"))
    if faults:
        raise HostError("\n".join(faults))


def unfinished_jobs(config: ClusterConfig) -> list[str]:
    """Returns the ids of jobs that wait or run; none where the head does not answer."""
    try:
        jobs = ask(config, config.head, "nodes", {"url": _local_url(config)})["jobs"]
    except HostError:
        return []
    return [job["submission_id"] or job["job_id"] for job in jobs if job["status"] in UNFINISHED]


def status(config: ClusterConfig) -> ClusterState:
    """Returns the state of all hosts and the jobs. A host that fails is a state, and no error."""
    check_ssh(config)
    requests = [_look(config, host) for host in config.hosts]
    probes = ask_all(config, config.hosts, "probe", {})
    looks = ask_all(config, config.hosts, "look", requests)
    head, known, jobs, fault = looks[0], {}, [], ""
    if not isinstance(head, HostError) and head["head"]:
        try:
            answer = ask(config, config.head, "nodes", {"url": _local_url(config)})
            known, jobs = _by_host(config, answer["nodes"]), answer["jobs"]
        except HostError as error:
            fault = str(error)
    states = []
    for host, probe, look in zip(config.hosts, probes, looks, strict=True):
        if isinstance(probe, HostError) or isinstance(look, HostError):
            broken = probe if isinstance(probe, HostError) else look
            states.append(HostState(host, fault=str(broken).removeprefix(f"{host.address}: ")))
        else:
            runs, node = _running(config, host, look), known.get(host.address)
            states.append(HostState(host, probe, runs, node, has_rest=look["processes"] > 0))
    return ClusterState(states, jobs, fault)


def _running(config: ClusterConfig, host: HostConfig, look: dict[str, Any]) -> bool:
    return bool(look["raylet"] and (look["head"] or host is not config.head))


def _start(config: ClusterConfig, hosts: Sequence[HostConfig], note: Note) -> None:
    """Start Ray on hosts, at once. Errors: HostError, with all faults."""
    requests = [_start_request(config, host) for host in hosts]
    answers = ask_all(config, hosts, "start", requests, config.start_s + 30)
    faults = [str(answer) for answer in answers if isinstance(answer, HostError)]
    for host, answer in zip(hosts, answers, strict=True):
        if not isinstance(answer, HostError):
            note(f"{host.address}: started{' the head' if host is config.head else ''}")
    if faults:
        raise HostError("\n".join([*faults, "the other hosts run: `up` again, or `down`"]))


def _await_nodes(config: ClusterConfig) -> None:
    """Wait until the head counts all hosts as alive. Errors: HostError with those that lack."""
    deadline = time.monotonic() + config.start_s
    while True:
        try:
            answer = ask(config, config.head, "nodes", {"url": _local_url(config)})
            known, fault = _by_host(config, answer["nodes"]), ""
        except HostError as error:
            known, fault = {}, str(error)
        missing = [h.address for h in config.hosts if not known.get(h.address, {}).get("alive")]
        if not missing:
            return
        if time.monotonic() > deadline:
            raise HostError(
                fault
                or f"{', '.join(missing)}: started, but the head does not count it as alive: see "
                f"{config.logs}/session_latest/logs/raylet.out there"
            )
        time.sleep(1)


def _by_host(config: ClusterConfig, nodes: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Ray's nodes by the address in HOSTS.yaml; of several with one address, the newest.

    Ray replaces a loopback address of the head by an address of the machine.
    """
    found: dict[str, dict[str, Any]] = {}
    for node in sorted(nodes, key=lambda node: node["since"]):
        alone = node["head"] and is_loopback(config.head.address)
        found[config.head.address if alone else node["address"]] = node
    return found


def _raise(answer: dict[str, Any] | HostError) -> None:
    if isinstance(answer, HostError):
        raise answer


def _local_url(config: ClusterConfig) -> str:
    """The dashboard's address on the head."""
    host = config.dashboard.host
    return f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{config.dashboard.port}"


def _mark(config: ClusterConfig, host: HostConfig) -> str:
    return f"{config.name}@{host.address}"


def _look(config: ClusterConfig, host: HostConfig) -> dict[str, Any]:
    folders = [config.logs]
    if config.runs is not None and host is config.head:
        folders.append(config.runs)
    ports = [config.port, config.dashboard.port] if host is config.head else []
    return {"name": _mark(config, host), "folders": folders, "ports": ports}


def _stop(config: ClusterConfig, host: HostConfig, grace_s: float) -> dict[str, Any]:
    return {"name": _mark(config, host), "grace_s": grace_s}


def _stops(config: ClusterConfig, grace_s: float) -> list[dict[str, Any]]:
    return [_stop(config, host, grace_s) for host in config.workers]


def _start_request(config: ClusterConfig, host: HostConfig) -> dict[str, Any]:
    resources = {
        "num-cpus": host.cpus,
        "num-gpus": host.gpus,
        "memory": None if host.memory_gb is None else int(host.memory_gb * GB),
        "object-store-memory": None if host.store_gb is None else int(host.store_gb * GB),
        "own": host.resources,
    }
    return {
        "name": _mark(config, host),
        "head": host is config.head,
        "address": host.address,
        "gcs": [config.head.address, config.port],
        "dashboard": [config.dashboard.host, config.dashboard.port],
        "logs": config.logs,
        "resources": resources,
        "start_s": config.start_s,
    }


def _busy(config: ClusterConfig, port: int) -> str:
    key = "port" if port == config.port else "dashboard.port"
    return f"{config.head.address}: port {port} is in use, by another Ray perhaps: set `{key}`"
