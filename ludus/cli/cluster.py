"""`ludus cluster`: start, show and stop a Ray cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ludus.cluster.hosts import ClusterConfig
    from ludus.cluster.manage import ClusterState, HostState

app = typer.Typer(no_args_is_help=True, help="Start, show and stop a Ray cluster.")

COLUMNS = ("node", "state", "CPU", "GPU", "memory", "store", "Python", "Ray", "ludus")

Hosts = Annotated[
    str, typer.Argument(metavar="HOSTS.yaml", help="The file that names the cluster's hosts.")
]
Force = Annotated[bool, typer.Option("--force", help="End jobs that run, too.")]
Grace = Annotated[
    float, typer.Option(min=0, max=3600, help="Seconds for processes to end, before SIGKILL.")
]


@app.command()
def up(hosts: Hosts) -> None:
    """Start a cluster: checks all hosts, then starts Ray where it does not run yet."""
    from ludus.cluster.hosts import load_hosts
    from ludus.cluster.manage import up as start

    config = load_hosts(hosts)
    start(config, typer.echo)
    _next_steps(config)


@app.command()
def status(hosts: Hosts) -> None:
    """Show nodes, resources, versions and jobs. Exit code 1 where a host is not alive."""
    from ludus.cluster.hosts import load_hosts
    from ludus.cluster.manage import status as state_of

    config = load_hosts(hosts)
    state = state_of(config)
    _show(config, state)
    if not state.healthy:
        raise typer.Exit(1)


@app.command()
def down(hosts: Hosts, force: Force = False, grace: Grace = 10.0) -> None:
    """Stop a cluster: ends all its processes on all hosts, and no others."""
    from ludus.cluster.hosts import load_hosts
    from ludus.cluster.manage import down as end

    end(load_hosts(hosts), typer.echo, force=force, grace_s=grace)


@app.command()
def restart(hosts: Hosts, force: Force = False, grace: Grace = 10.0) -> None:
    """Stop a cluster and start it again, after a check of all hosts."""
    from ludus.cluster.hosts import load_hosts
    from ludus.cluster.manage import check
    from ludus.cluster.manage import down as end
    from ludus.cluster.manage import up as start

    config = load_hosts(hosts)
    check(config)  # before anything ends
    end(config, typer.echo, force=force, grace_s=grace)
    start(config, typer.echo)
    _next_steps(config)


def _next_steps(config: ClusterConfig) -> None:
    from ludus.cluster.hosts import is_here, is_loopback

    port, head, count = config.dashboard.port, config.head, len(config.hosts)
    nodes = "1 node" if count == 1 else f"{count} nodes"
    typer.echo(f"cluster {config.name}: {nodes}, dashboard {config.url}")
    if is_loopback(config.dashboard.host) and not is_here(head):
        target = f"{config.ssh.user}@{head.address}" if config.ssh.user else head.address
        typer.echo(f"from here: ssh -N -L {port}:127.0.0.1:{port} {head.ssh or target}")
    typer.echo(f"start a run: ludus submit RECIPE --address {config.url}")


def _show(config: ClusterConfig, state: ClusterState) -> None:
    alive = sum(host.state == "alive" for host in state.hosts)
    typer.echo(f"{config.name}: {alive} of {len(state.hosts)} nodes alive, dashboard {config.url}")
    if state.fault:
        typer.echo(f"ludus: {state.fault}", err=True)
    rows = [list(COLUMNS), *(_row(config, host) for host in state.hosts)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())
    for host in state.hosts:
        if host.fault:
            typer.echo(f"{host.host.address}: {host.fault}")
    for job in state.jobs:
        name = job["submission_id"] or job["job_id"]
        command = job["entrypoint"].partition(" ludus.cluster.entry ")[2]
        shown = f"ludus train {command}" if command else job["entrypoint"]
        typer.echo(f"job {name}: {job['status'].lower()}, {shown}")
    if not state.jobs and not state.fault and state.hosts[0].state == "alive":
        typer.echo("no jobs")


def _row(config: ClusterConfig, state: HostState) -> list[str]:
    head = " head" if state.host is config.head else ""
    node: dict[str, Any] = state.node or {}
    used, total, versions = node.get("used", {}), node.get("total", {}), state.versions
    memory = node.get("memory")
    cells = [
        _share(used, total, "CPU"),
        _share(used, total, "GPU"),
        f"{_gb(memory[3])}/{_gb(memory[0])} GB" if memory else "-",
        _share(used, total, "object_store_memory"),
    ]
    packages = [versions.get(name) or "-" for name in ("python", "ray", "ludus")]
    return [f"{state.host.address}{head}", state.state, *cells, *packages]


def _share(used: dict[str, float], total: dict[str, float], name: str) -> str:
    if name not in total:
        return "-"
    # The dashboard writes the names of its report in camel case.
    now = used.get(name, used.get("objectStoreMemory" if "_" in name else name, 0.0))
    if "memory" in name:
        return f"{_gb(now)}/{_gb(total[name])} GB"
    return f"{now:g}/{total[name]:g}"


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f}"
