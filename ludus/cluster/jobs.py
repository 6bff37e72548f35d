"""Runs as jobs of a Ray cluster, by Ray's job API (`http://HEAD:8265`)."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludus import __version__
from ludus.backends.ray.cluster import NAMESPACE_VARIABLE
from ludus.cluster.client import ClusterError, client_error, job_client, ray_version, short, told
from ludus.cluster.entry import STARTS, SUBMITTED_WITH
from ludus.cluster.token import own_token
from ludus.core.errors import ConfigError, did_you_mean, printable
from ludus.core.modules import require

STOPPED_CODE = 130
"""Exit code of a job that was stopped: as after Ctrl-C."""

QUIET = ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk")
"""Ray's loggers that tell of each upload; the last two set themselves to INFO."""

POLL_S = 0.5

QUIET_S = 120.0
"""Seconds without a line of a job's log, after which the head is asked whether it still answers."""

RECONNECTS = 5
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
Echo = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Jobs:
    """The jobs of the cluster at an address."""

    address: str
    client: Any
    ray_version: str

    @classmethod
    def at(cls, address: str) -> Jobs:
        """Connect. Errors: ClusterError; ConfigError; MissingDependency."""
        require("ray", "ray", "a command for the jobs of a cluster")
        address, token = url_of(address), own_token()
        version = ray_version(address, token)
        client = job_client(address, token)
        for name in QUIET:
            logging.getLogger(name).setLevel(logging.WARNING)
        return cls(address, client, version)

    def info(self, job: str) -> Any:
        """Returns a job's details. Errors: ConfigError for an unknown job."""
        with told(self.address):
            try:
                return self.client.get_job_info(job)
            except RuntimeError as error:
                if "does not exist" not in str(error):
                    raise
            known = [one.submission_id or one.job_id for one in self.client.list_jobs()]
        near = did_you_mean(job, known) or " (it has no jobs)"
        raise ConfigError(f"{job}: the cluster at {self.address} has no such job{near}")

    def submit(self, name: str, words: Sequence[str], folder: Path, options: SubmitOptions) -> str:
        """Start `ludus train` with these words in a copy of `folder`; returns the job's id."""
        import ray

        if self.ray_version != ray.__version__:
            raise ConfigError(
                f"the cluster at {self.address} has Ray {self.ray_version}, and this machine "
                f"{ray.__version__}: install the same here (pip install ray=={self.ray_version})"
            )
        name = os.path.basename(name.rstrip("/"))  # Ray fails on an id with slashes
        job = f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"
        entry = f"exec {options.python} -m ludus.cluster.entry {shlex.join(words)}"
        variables = {
            NAMESPACE_VARIABLE: job,
            SUBMITTED_WITH: __version__,
            "RAY_JOB_STOP_SIGNAL": "SIGINT",  # the run finishes its step and saves
            "RAY_JOB_STOP_WAIT_TIME_S": str(options.grace_s),
            "PYTHONUNBUFFERED": "1",
        }
        with told(self.address, f"; the job may run nevertheless (ludus logs {job})"):
            self.client.submit_job(
                entrypoint=entry,
                submission_id=job,
                runtime_env={"working_dir": str(folder), "env_vars": variables},
                metadata={"ludus": __version__, "recipe": words[0]},
            )
        return job

    def await_start(self, job: str, wait_s: float) -> None:
        """Wait until the job's checks have passed, it has ended, or `wait_s` seconds are over.

        Errors: ConfigError where the head refuses the configuration; ClusterError where the job
        failed otherwise before it began to train.
        """
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            info = self.info(job)
            with told(self.address):
                logs = self.client.get_job_logs(job)
            if any(line.startswith(STARTS) for line in logs.splitlines()):
                return
            if info.status.value in ENDED:
                refused = info.driver_exit_code == ConfigError.exit_code
                kind = ConfigError if refused else ClusterError
                raise kind(f"job {job}: {start_fault(info, logs)}")
            time.sleep(POLL_S)

    def logs(self, job: str) -> str:
        """Returns all that a job has printed."""
        self.info(job)
        with told(self.address):
            return str(self.client.get_job_logs(job))

    def follow(self, job: str, echo: Echo, skip: int = 0) -> int:
        """Print what a job prints, until it ends; returns its exit code.

        `skip` characters were printed before. Errors: ClusterError where the connection is lost.
        """
        printed, lost = skip, 0
        while True:
            before = printed
            try:
                printed = asyncio.run(self._tail(job, echo, printed))
            except (OSError, RuntimeError, client_error()) as error:
                lost = 0 if printed > before else lost + 1
                if lost >= RECONNECTS:
                    raise ClusterError(
                        f"the connection to {self.address} is lost ({short(error)}); the job may "
                        f"go on: ludus attach {job} --address {self.address}"
                    ) from None
                time.sleep(min(2.0**lost, 10) * POLL_S)
                continue
            info = self.info(job)
            if info.status.value in ENDED:
                return exit_code(info)
            time.sleep(POLL_S)

    async def _tail(self, job: str, echo: Echo, skip: int) -> int:
        """Print the log from the character `skip` on, until it ends or nothing comes for QUIET_S;
        returns its length."""
        length = 0
        texts = self.client.tail_job_logs(job)
        with suppress(TimeoutError):
            while (text := await asyncio.wait_for(anext(texts, None), QUIET_S)) is not None:
                length += len(text)
                if length > skip:
                    echo(text[-(length - skip) :])
                    skip = length
        return max(length, skip)

    def stop(self, job: str, wait_s: float) -> Any:
        """Stop a job and wait for its end; returns its details.

        Errors: ConfigError for a job that has ended; ClusterError where it does not end.
        """
        info = self.info(job)
        if info.status.value in ENDED:
            raise ConfigError(f"{job} has ended already: {info.status.value.lower()}")
        with told(self.address):
            self.client.stop_job(job)
        deadline = time.monotonic() + wait_s
        while (info := self.info(job)).status.value not in ENDED:
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"{job} was told to stop and still runs after {wait_s:.0f} s: it may finish a "
                    f"long step; see ludus logs {job} --address {self.address}"
                )
            time.sleep(POLL_S)
        return info


@dataclass(frozen=True, slots=True)
class SubmitOptions:
    """Of a job: the cluster's Python, and seconds between `stop` and SIGKILL."""

    python: str = "python"
    grace_s: int = 600


def url_of(address: str) -> str:
    """Returns the address of the job API with its scheme. Errors: ConfigError."""
    if address.startswith("ray://"):
        raise ConfigError(
            f"--address {address}: that is the port of Ray's client; give the dashboard's, "
            "http://HEAD:8265"
        )
    if "://" not in address:
        address = f"http://{address}"
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"--address {address}: give the dashboard's address, http://HEAD:8265")
    return address.rstrip("/")


def exit_code(info: Any) -> int:
    """Returns the exit code of a job that has ended."""
    status, code = info.status.value, info.driver_exit_code
    if status == "SUCCEEDED":
        return 0
    if status == "STOPPED":
        return STOPPED_CODE
    return 1 if not code else 128 - code if code < 0 else int(code)


def start_fault(info: Any, logs: str) -> str:
    """The reason of a job that ended before it began to train, in one line."""
    lines = [line.strip() for line in logs.splitlines() if line.strip()]
    if any("No module named" in line and "ludus" in line for line in lines):
        return "the head has no package ludus in its Python: pip install 'ludus-rl[ray]' there"
    said = [line.removeprefix("ludus: ") for line in lines if not line.startswith("Traceback")]
    if info.status.value == "STOPPED":
        return "it was stopped before it began to train"
    if said and any(line.startswith("ludus: ") for line in lines):
        first = next(i for i, line in enumerate(lines) if line.startswith("ludus: "))
        return printable("\n".join(said[first:]))
    last = said[-1] if said else str(info.message or "").strip().splitlines()[-1:]
    return f"it failed before it began to train: {printable(str(last))}"


def default_address() -> str:
    """The address without --address: `RAY_API_SERVER_ADDRESS`, or this machine's dashboard."""
    return os.environ.get("RAY_API_SERVER_ADDRESS") or "http://127.0.0.1:8265"
