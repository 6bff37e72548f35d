"""The part of `ludus cluster` that runs on a host: `python -m ludus.cluster.node ACTION`.

The request is JSON on stdin, the answer a line of JSON on stdout. All that a cluster starts on a
host carries the cluster's name in its environment (`LUDUS_CLUSTER`), so `stop` ends these processes
and no other Ray of the machine.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from ludus.core.system.processes import Process, descendants, end, marked

CLUSTER = "LUDUS_CLUSTER"
"""Environment variable with the name of the cluster that started a process."""

ANSWER = "ludus-answer: "
ROUNDS = 5
"""Times that `stop` looks again for processes, which others may have started meanwhile."""


class Fault(Exception):
    """A failure that the user can correct."""


def look(request: dict[str, Any]) -> dict[str, Any]:
    """The cluster's processes on this host, ports in use, and whether its folders are writable."""
    own = processes(request["name"])
    names = [process.what for process in own]
    folders = [_folder_fault(path) for path in request.get("folders", [])]
    return {
        "processes": len(own),
        "raylet": "raylet" in names,
        "head": "gcs_server" in names,
        "busy": [port for port in request.get("ports", []) if not _is_free(port)],
        "folders": [fault for fault in folders if fault],
        "machine": f"{socket.gethostname()} {_boot()}",
    }


IMPATIENT = "timed out during startup"
"""Ray gives a node 30 s, which a busy machine may exceed; our limit is the key `start_s`."""


def start(request: dict[str, Any]) -> dict[str, Any]:
    """Start Ray on this host by `ray start`, after what an earlier one has left."""
    import importlib.util

    if importlib.util.find_spec("ray") is None:
        raise Fault(f"{sys.executable} has no package ray: pip install 'ludus-rl[ray]'")
    if not request["head"]:
        _reach(request["gcs"])
    stop({"name": request["name"], "grace_s": 5})
    folder = str(Path(sys.executable).parent)
    env = {
        **os.environ,
        CLUSTER: request["name"],
        "PATH": f"{folder}:{os.environ.get('PATH', os.defpath)}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
    }
    env.pop("RAY_ADDRESS", None)
    ends = time.monotonic() + request["start_s"]
    while True:
        code, text = _ray_start(request, env, ends - time.monotonic())
        if code == 0:
            return {"processes": len(processes(request["name"]))}
        stop({"name": request["name"], "grace_s": 5})
        if code is None or (IMPATIENT in text and time.monotonic() > ends):
            raise Fault(f"`ray start` did not end within {request['start_s']} s")
        if IMPATIENT not in text:
            raise Fault(f"`ray start` failed: {_last_line(text)}")


def _ray_start(
    request: dict[str, Any], env: dict[str, str], wait_s: float
) -> tuple[int | None, str]:
    """The exit code, None where it does not end in time, and what it said."""
    with tempfile.TemporaryFile("w+") as said:
        try:
            done = subprocess.run(
                ray_start(request),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env=env,
                timeout=max(wait_s, 1.0),
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            return None, ""
        said.seek(0)
        return done.returncode, said.read()


def ray_start(request: dict[str, Any]) -> list[str]:
    """The command that starts Ray on a host."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats"]
    command += ["--log-style=record", "--log-color=false", "--dashboard-agent-listen-port=0"]
    command += [f"--node-ip-address={request['address']}"]
    if request["head"]:
        host, port = request["dashboard"]
        command += ["--head", f"--port={request['gcs'][1]}", "--include-dashboard=true"]
        command += [f"--dashboard-host={host}", f"--dashboard-port={port}"]
        command += [f"--temp-dir={request['logs']}"]
    else:
        command += [f"--address={request['gcs'][0]}:{request['gcs'][1]}"]
    for option in ("num-cpus", "num-gpus", "memory", "object-store-memory"):
        if (value := request["resources"].get(option)) is not None:
            command.append(f"--{option}={value}")
    if own := request["resources"].get("own"):
        command.append(f"--resources={json.dumps(own)}")
    return command


def stop(request: dict[str, Any]) -> dict[str, Any]:
    """End the cluster's processes on this host: SIGTERM, and SIGKILL after the grace period."""
    ended = set()
    for attempt in range(ROUNDS):
        own = processes(request["name"])
        if not own:
            break
        ended |= {process.pid for process in own}
        number = signal.SIGTERM if attempt == 0 else signal.SIGKILL
        left = end(own, number, request["grace_s"] if attempt == 0 else 5)
        end(left, signal.SIGKILL, 5)
    return {"ended": len(ended), "left": [str(one) for one in processes(request["name"])]}


def nodes(request: dict[str, Any]) -> dict[str, Any]:
    """The head's view: nodes with their resources, and jobs. Errors: Fault for no dashboard."""
    url = request["url"]
    listed = _get(url, "/api/v0/nodes?detail=1&limit=10000")["data"]["result"]["result"]
    used = _get(url, "/api/cluster_status")["data"]["clusterStatus"] or {}
    by_node = (used.get("loadMetricsReport") or {}).get("usageByNode") or {}
    load = {one["ip"]: one for one in _get(url, "/nodes?view=summary")["data"]["summary"]}
    found = []
    for node in listed:
        now = load.get(node["node_ip"], {})
        found.append(
            {
                "address": node["node_ip"],
                "head": node["is_head_node"],
                "alive": node["state"] == "ALIVE",
                "since": node["start_time_ms"],
                "message": node.get("state_message") or "",
                "total": node.get("resources_total") or {},
                "used": {
                    key: both[0] for key, both in (by_node.get(node["node_id"]) or {}).items()
                },
                "memory": now.get("mem"),
                "gpus": len(now.get("gpus") or []),
            }
        )
    return {"nodes": found, "jobs": _get(url, "/api/jobs/")}


def processes(name: str) -> list[Process]:
    """The living processes of a cluster on this host, this one left out."""
    own = marked(name, CLUSTER)
    found = {process.pid: process for process in [*descendants(own), *own]}
    found.pop(os.getpid(), None)
    return list(found.values())


def _get(url: str, path: str) -> Any:
    token = os.environ.get("RAY_AUTH_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    opener = build_opener(ProxyHandler({}))
    try:
        with opener.open(Request(url + path, headers=headers), timeout=20) as answer:
            return json.load(answer)
    except HTTPError as error:
        if error.code in (401, 403):
            raise Fault(f"Ray's dashboard at {url} was started with another token") from None
        raise Fault(f"Ray's dashboard at {url} answers {error.code} to {path}") from None
    except (OSError, ValueError) as error:
        raise Fault(f"Ray's dashboard at {url} does not answer: {error}") from None


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _folder_fault(path: str) -> str:
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return "" if os.access(folder, os.W_OK) else f"{path}: not writable"


def _reach(place: list[Any]) -> None:
    host, port = place
    deadline = time.monotonic() + 10
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise Fault(
                    f"cannot reach the head at {host}:{port} ({error.strerror or error}): open "
                    "the ports between the hosts"
                ) from None
        time.sleep(0.5)


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "Exception:" in line]
    return (errors or lines or ["it said nothing"])[-1]


ACTIONS = {"look": look, "start": start, "stop": stop, "nodes": nodes}


def main(action: str) -> None:
    """Answer one request."""
    try:
        answer = ACTIONS[action](json.load(sys.stdin))
    except Fault as fault:
        answer = {"error": str(fault)}
    print(ANSWER + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
