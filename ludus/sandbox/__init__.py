"""Untrusted code runs here, and nowhere else."""

from ludus.config.registry import Registry, Row
from ludus.sandbox.base import Sandbox

ROWS = {
    "remote": Row(
        "ludus.sandbox.remote:RemoteSandbox",
        "tools",
        "a server: ludus serve sandbox, SandboxFusion",
    ),
    "jail": Row("ludus.sandbox.jail:Jail", summary="on this machine, in namespaces of its own"),
}
SANDBOXES: Registry[Sandbox] = Registry("sandbox", ROWS, needs=("run", "close_session"))
