"""Connection to a Ray cluster, and the placement of a run's actors on it."""

from __future__ import annotations

import os
import socket
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ludus.backends.ray.errors import explained
from ludus.core.errors import ConfigError
from ludus.core.modules import require

if TYPE_CHECKING:
    pass

ADDRESS = "backend.args.address"

CONNECT_S = 5.0
"""Time limit of the first connection to a cluster's address, in seconds."""

NODES_S = 60.0
"""Time limit of a first process on each node, in seconds."""

NAMESPACE_VARIABLE = "LUDUS_RAY_NAMESPACE"
"""Environment variable with the Ray namespace of a run; unset: the run's name."""

EPSILON = 1e-6
"""Amounts of resources closer than this are equal."""

Bundle = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Place:
    """The place of one actor: the bundle of a placement group.

    Args:
        group: the placement group.
        bundle: index of its bundle.
        num_cpus, num_gpus: the part of the bundle that the actor takes.
    """

    group: Any
    bundle: int
    num_cpus: float
    num_gpus: float

    def options(self) -> dict[str, Any]:
        """Options of the actor's class."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {
            "num_cpus": self.num_cpus,
            "num_gpus": self.num_gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self.group, placement_group_bundle_index=self.bundle
            ),
        }


@dataclass(slots=True)
class Demand:
    """The actors of a run and what they need.

    `actors` has the name of each kind, the number of its actors, and what one needs. With
    `colocated`, the n-th learner rank and the n-th sampler share a bundle and its GPU. `beside` has
    the actors of the run's other policies, each with its `name`: they have placement groups of
    their own.
    """

    actors: dict[str, tuple[int, Bundle]] = field(default_factory=dict)
    colocated: bool = False
    name: str = ""
    beside: tuple[Demand, ...] = ()

    def bundles(self) -> tuple[list[dict[str, float]], dict[str, list[tuple[int, Bundle]]]]:
        """Returns the bundles, and for each kind the bundle of each actor and its part of it."""
        bundles: list[dict[str, float]] = []
        places: dict[str, list[tuple[int, Bundle]]] = {kind: [] for kind in self.actors}
        shared = ("learner_ranks", "samplers") if self.colocated else ()
        for number in range(max((self.actors[kind][0] for kind in shared), default=0)):
            present = [kind for kind in shared if number < self.actors[kind][0]]
            bundle = {"CPU": sum(self.actors[kind][1]["CPU"] for kind in present)}
            gpus = max(self.actors[kind][1].get("GPU", 0.0) for kind in present)
            if gpus:
                bundle["GPU"] = gpus
            for kind in present:
                part = {"CPU": self.actors[kind][1]["CPU"], "GPU": gpus / len(present)}
                places[kind].append((len(bundles), part))
            bundles.append(bundle)
        for kind, (count, needs) in self.actors.items():
            for _ in range(0 if kind in shared else count):
                places[kind].append((len(bundles), needs))
                bundles.append({name: amount for name, amount in needs.items() if amount})
        return bundles, places

    def total(self) -> Counter[str]:
        """Resources of all actors, those beside included."""
        return _sum([*self.bundles()[0], *(other.total() for other in self.beside)])

    def keys(self) -> str:
        """For messages: the recipe's keys with their values."""
        own = ", ".join(f"{kind} = {count}" for kind, (count, _) in self.actors.items())
        named = f"{own} of {self.name}" if self.name else own
        counts = Counter(other.keys() for other in self.beside)
        others = (f"{n} times {keys}" if n > 1 else keys for keys, n in counts.items())
        return "; ".join([named, *others])


def _sum(bundles: Iterable[Bundle]) -> Counter[str]:
    total: Counter[str] = Counter()
    for bundle in bundles:
        total.update(bundle)
    return total


def connect(address: str | None, namespace: str, demand: Demand) -> bool:
    """Connect to the cluster at `address`, or start one of this machine; returns whether it was
    started or connected here (False: the process was connected already).

    Without an address: the cluster of the Ray job that this process is part of, or one of this
    machine, with as many logical CPUs as the run asks for.

    Errors: MissingDependency; ConfigError where no cluster answers, or its versions differ.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    require("ray", "ray", "the back end `ray`")
    require("xxhash", "ray", "the back end `ray`")
    import ray
    from ray.exceptions import RayError

    if ray.is_initialized():
        return False
    options: dict[str, Any] = {
        "namespace": namespace,
        "log_to_driver": False,
        "logging_level": "error",
    }
    address = address or os.environ.get("RAY_ADDRESS")
    if address is None:
        # Logical CPUs only order the start of actors: one machine may run more of them than cores.
        cpus = max(os.cpu_count() or 1, int(demand.total()["CPU"] + 0.999))
        options |= {"address": "local", "num_cpus": cpus, "include_dashboard": False}
    else:
        require_answer(address)
        options["address"] = address
    try:
        ray.init(**options)
    except (RayError, RuntimeError, ValueError, OSError) as error:
        raise ConfigError(f"{ADDRESS}: {_told(error, address)}") from error
    return True


def _told(error: Exception, address: str | None) -> str:
    """Returns the telling part of an error of `ray.init`."""
    text = " ".join(str(error).split()).rstrip(".")
    if "ersion mismatch" in text:
        return (
            f"this Python and the cluster at {address} have other versions of Ray or Python: {text}"
        )
    text = textwrap.shorten(text, 300, placeholder=" ...")
    told = f"Ray cannot use the cluster at {address or 'this machine'}: {text}"
    if not isinstance(error, ConnectionError) or address == "auto":
        return told
    # Ray's error does not name a missing or wrong token: its log does.
    return (
        f"{told}. If it asks for a token, set RAY_AUTH_MODE=token, and take ~/.ray/auth_token of "
        "the user who started it, or set RAY_AUTH_TOKEN"
    )


def require_form(address: str, key: str = ADDRESS) -> tuple[str, int] | None:
    """Returns host and port of an address, None for `auto`. Errors: ConfigError for no address.

    Args:
        key: for messages: what has the address.
    """
    if address in ("auto", "local"):
        return None
    plain = address.removeprefix("ray://")
    host, _, port = plain.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536):
        raise ConfigError(
            f"{key}: {address!r} is no address of a Ray cluster; it has the form "
            "HOST:PORT (the port of `ray start --head`, 6379 by default), or is `auto`"
        )
    if address.startswith("ray://"):
        raise ConfigError(
            f"{key}: {address!r} is an address of the Ray client, through which a "
            "run's samples would pass twice. Start the run on a node of the cluster, with `ludus "
            "submit` or with HOST:PORT of `ray start --head`"
        )
    return host, int(port)


def require_answer(address: str, key: str = ADDRESS) -> None:
    """Errors: ConfigError where nothing answers at HOST:PORT; Ray itself waits for minutes."""
    place = require_form(address, key)
    if place is None:
        return
    try:
        socket.create_connection(place, CONNECT_S).close()
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"{key}: no Ray cluster answers at {address} ({error}); start one with "
            "`ludus cluster up HOSTS.yaml` or `ray start --head`"
        ) from error


def require_possible(address: str | None, demand: Demand) -> None:
    """Check a demand before anything of the run exists. A cluster is connected to and left again.

    Errors: ConfigError for what the cluster at `address`, or else this machine, can never run, for
    nodes that lack ludus or have other versions, and those of `connect`.
    """
    if address is None and "RAY_ADDRESS" not in os.environ:
        missing = demand.total()["GPU"] - (present := _own_gpus() if demand.total()["GPU"] else 0)
        if missing > EPSILON:
            raise ConfigError(_missing(demand, "GPU", present, "this machine"))
        return
    connected = connect(address, "ludus-check", demand)
    import ray

    try:
        _require_possible(demand)
        _require_equal_nodes()
    finally:
        if connected:
            ray.shutdown()


def _require_equal_nodes() -> None:
    """Ask a process of each node for its versions.

    A node that does not answer in time is left to the actors, whose start checks them too.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    asked = ray.remote(num_cpus=0, max_retries=0)(facts)
    calls = [
        asked.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote()
        for node in _nodes()
        if node["Alive"] and node["Resources"].get("CPU")
    ]
    done, late = ray.wait(calls, num_returns=len(calls), timeout=NODES_S)
    for call in late:
        ray.cancel(call)
    with explained("a node"):
        require_equal(facts(), ray.get(done))


def _own_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def place(demand: Demand, deadline_s: float) -> tuple[Any, dict[str, list[Place]]]:
    """Reserve the bundles of a run; returns the placement group, and the places of each kind.

    Errors: ConfigError where the cluster can never meet the demand, or does not within
    `deadline_s` because other runs hold its resources.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    bundles, places = demand.bundles()
    _require_possible(demand)
    group = placement_group(bundles, strategy="PACK")
    if not group.wait(deadline_s):
        free = ray.available_resources()  # type: ignore[no-untyped-call]
        remove_placement_group(group)
        raise ConfigError(
            f"backend.args: the cluster did not give {_amounts(_sum(bundles))} within "
            f"placement_deadline_s = {deadline_s:g} s; free are {_amounts(free)}. Other runs hold "
            "the rest: wait for them, or ask for less"
        )
    return group, {
        kind: [Place(group, index, part["CPU"], part.get("GPU", 0.0)) for index, part in rows]
        for kind, rows in places.items()
    }


def _require_possible(demand: Demand) -> None:
    """Errors: ConfigError for what the whole cluster lacks, or no node has."""
    nodes = [node["Resources"] for node in _nodes() if node["Alive"]]
    needed, present = demand.total(), _sum(nodes)
    for kind in ("GPU", "CPU"):
        if needed[kind] - present[kind] > EPSILON:
            raise ConfigError(_missing(demand, kind, present[kind], "the cluster"))
    for bundle in (b for part in (demand, *demand.beside) for b in part.bundles()[0]):
        if not any(all(node.get(k, 0) >= v for k, v in bundle.items()) for node in nodes):
            raise ConfigError(
                f"backend.args: no node has {_amounts(bundle)}, which one actor needs "
                f"({demand.keys()}); the largest node has "
                f"{_amounts(max(nodes, key=lambda n: (n.get('GPU', 0), n.get('CPU', 0))))}"
            )


def _missing(demand: Demand, kind: str, present: float, where: str) -> str:
    needed = demand.total()[kind]
    return (
        f"backend.args: {demand.keys()} need {needed:g} {kind}s, and {where} has "
        f"{present:g}: {needed - present:g} {kind}s are missing. Add nodes, or ask for less"
    )


def _nodes() -> list[dict[str, Any]]:
    import ray

    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes


def _amounts(resources: Mapping[str, float]) -> str:
    shown = [f"{resources.get(kind, 0):g} {kind}s" for kind in ("CPU", "GPU")]
    return " and ".join(shown if resources.get("GPU") else shown[:1])


def facts() -> dict[str, str]:
    """Versions of this process, which have to be equal on all nodes, its node and its id."""
    import platform
    from importlib.metadata import version

    import ludus

    return {
        "Python": platform.python_version(),
        "ludus": ludus.__version__,
        "torch": version("torch"),
        "node": socket.gethostname(),
        "pid": str(os.getpid()),
    }


def require_equal(own: Mapping[str, str], others: Iterable[Mapping[str, str]]) -> None:
    """Errors: ConfigError where versions differ between the driver and an actor's node."""
    for other in others:
        for name in ("Python", "ludus", "torch"):
            if own[name] != other[name]:
                raise ConfigError(
                    f"node {other['node']} has {name} {other[name]}, and node {own['node']}, where "
                    f"the run was started, has {own[name]}: install equal versions on all nodes"
                )


def release(group: Any) -> None:
    """Free the resources of a run. Idempotent; the cluster may be gone."""
    with suppress(Exception):
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(group)


def node_id() -> str:
    """Ray's name of the node of this process."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def store_bytes() -> int:
    """Size of the object store of this process's node."""
    own = node_id()
    sizes = [n["Resources"].get("object_store_memory", 0) for n in _nodes() if n["NodeID"] == own]
    return int(sum(sizes))
