"""Processes beside a run, as options of `ludus train`: an environment service, the live page.

They are children of the run: recorded in its folder, ended with it, also where it is killed.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote, urlsplit

from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError, LudusError, did_you_mean
from ludus.core.modules import require
from ludus.core.system.processes import started, terminate
from ludus.core.types import Spec, Task
from ludus.rollout.collect import Collector
from ludus.store.folders import RunFolder

START_S = 120.0
"""Seconds that a companion has to answer."""

END_S = 10.0
"""Seconds between SIGTERM and SIGKILL."""

SERVICE, VIEW = "--with-env-service", "--view"

VIEW_PORT = 8300
"""Of the live page, as of `ludus view`; any free port where it is taken."""

_ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """Processes beside a run, and its purpose. They change no result, so they are no part of the
    configuration.

    Args:
        env_service: serve this environment of the configuration in a process of its own.
        patient: episodes, steps and calls have no time limits, as somebody debugs them.
        view: serve the live page.
        quick: a test of the parts: limits under which nothing is learned are allowed.
    """

    env_service: str | None = None
    patient: bool = False
    view: bool = False
    quick: bool = False


PLAIN = LaunchOptions()


def check_options(options: LaunchOptions, env: Spec | None) -> None:
    """Errors: ConfigError, MissingDependency where the options do not fit an environment."""
    if options.env_service is not None:
        find_service(env, options.env_service)
    if options.view:
        require("fastapi", "serve", VIEW)
        require("uvicorn", "serve", VIEW)


@dataclass(frozen=True, slots=True)
class EnvService:
    """The part of a configuration's environment that a service plays.

    Args:
        served: the environment that the service makes.
        port: 0 for any.
        part: its name in a mixture; None: it is the whole environment.
        redirects: False where the configuration names the service's address itself.
    """

    served: Spec
    port: int = 0
    part: str | None = None
    redirects: bool = True

    def command(self, step_deadline_s: float) -> list[str]:
        """The command that serves it."""
        args = [f"{key}={json.dumps(value)}" for key, value in self.served.args.items()]
        options = ["--port", str(self.port), "--step-deadline", f"{step_deadline_s:g}"]
        return [sys.executable, "-m", "ludus", "serve", "env", self.served.name, *args, *options]

    def reached(self, env: Spec | None, url: str) -> Spec | None:
        """The configuration's environment, played by the service at `url`."""
        if env is None or not self.redirects:
            return env
        remote = Spec(name="remote", args={"url": url, "env": self.served.name})
        if self.part is None:
            return remote
        envs = {**env.args["envs"], self.part: remote.model_dump()}
        return Spec(name=env.name, args={**env.args, "envs": envs})


def find_service(env: Spec | None, name: str) -> EnvService:
    """Returns what to serve for `--with-env-service NAME`. Errors: ConfigError."""
    if env is None:
        raise ConfigError(f"{SERVICE} {name}: the recipe has no `env`: remove the option")
    if "/" in name:
        raise ConfigError(f"{SERVICE} {name}: a service has no name with `/`: use module:Class")
    require("uvicorn", "serve", SERVICE)
    require("websockets", "remote", SERVICE)
    if env.name == "remote":
        return _at_its_address(env, name)
    if env.name == name:
        return EnvService(env)
    parts = _parts(env)
    named = {part: spec for part, spec in parts.items() if spec.name == name}
    if len(named) > 1:
        raise ConfigError(
            f"{SERVICE} {name}: {' and '.join(named)} are both {name}, and a service has each "
            "environment once: serve another part"
        )
    for part, spec in named.items():
        return EnvService(spec, part=part)
    near = did_you_mean(name, {spec.name for spec in parts.values()} or {env.name})
    raise ConfigError(f"{SERVICE} {name}: the recipe does not play {name!r}{near}")


def _parts(env: Spec) -> dict[str, Spec]:
    if env.name != "mixture":
        return {}
    envs = env.args.get("envs")
    return {str(key): Spec.model_validate(_spec(value)) for key, value in (envs or {}).items()}


def _spec(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


def _at_its_address(env: Spec, name: str) -> EnvService:
    """The service of an environment `remote`, whose address is in the configuration."""
    url = urlsplit(str(env.args.get("url")))
    if url.hostname not in ("127.0.0.1", "localhost") or not url.port:
        raise ConfigError(
            f"{SERVICE} {name}: env.args.url is {env.args.get('url')}: it has to be "
            "http://127.0.0.1:PORT for a service that the run starts"
        )
    if env.args.get("env") not in (None, name):
        raise ConfigError(
            f"{SERVICE} {name}: env.args.env is {env.args['env']}: name the same environment"
        )
    return EnvService(Spec(name=name), url.port, redirects=False)


class Companion:
    """A process beside the run. Its output goes to `log`."""

    def __init__(self, what: str, command: Sequence[str], log: Path, **env: str) -> None:
        self._what, self._log = what, log
        wrapper = [sys.executable, "-m", "ludus.core.system.with_parent", str(os.getpid())]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*wrapper, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **env},
                start_new_session=True,  # Ctrl-C is for the run, which may finish its step
            )
        started(self._process.pid, what)

    def address(self) -> str:
        """Wait until it answers at `/health`; returns its URL. Errors: LudusError."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            code = self._process.poll()
            said = self._log.read_text(errors="replace")
            if code is not None:
                last = (said.strip().splitlines() or ["no output"])[-1]
                raise LudusError(f"{self._what} ended with exit code {code}: {last} ({self._log})")
            if (found := _ADDRESS.search(said)) and _answers(found[0]):
                return found[0]
            time.sleep(0.05)
        raise LudusError(f"{self._what} did not answer within {START_S:g} s ({self._log})")

    def stop(self) -> None:
        """End it."""
        terminate(self._process, END_S)


def _answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with suppress(OSError), opener.open(f"{url}/health", timeout=2) as response:
        return bool(response.status == 200)
    return False


@dataclass(frozen=True, slots=True)
class Companions:
    """The running companions of a run."""

    service: EnvService | None = None
    url: str = ""

    def attach(self, collector: Collector, tasks: Iterable[Task]) -> Collector:
        """The collector, with the environment that a service plays.

        Errors: ConfigError for a task whose arguments a service cannot take.
        """
        if self.service is None:
            return collector
        name = self.service.served.name
        own = (task.id for task in tasks if task.env is not None and task.env.name == name)
        if (task := next(own, None)) is not None:
            raise ConfigError(
                f"{SERVICE} {name}: task {task} has its own arguments of {name}, which a service "
                "cannot take: remove the option"
            )
        return replace(collector, env=self.service.reached(collector.env, self.url))


@contextmanager
def companions(
    options: LaunchOptions, config: RunConfig, folder: RunFolder, note: Callable[[str], None]
) -> Iterator[Companions]:
    """Start the companions that the options name; end them with the block.

    Errors: ConfigError, MissingDependency; LudusError where one does not start.
    """
    with ExitStack() as opened:
        beside = Companions()
        if options.env_service is not None:
            service = find_service(config.env, options.env_service)
            beside = opened.enter_context(_serving(service, config, folder, note))
        if options.view:
            opened.enter_context(_viewing(config, folder, note))
        yield beside


@contextmanager
def _serving(
    service: EnvService, config: RunConfig, folder: RunFolder, note: Callable[[str], None]
) -> Iterator[Companions]:
    # The service accepts the token that the run sends: LUDUS_TOKEN.
    token = os.environ.get("LUDUS_TOKEN", "")
    child = Companion(
        f"ludus serve env {service.served.name}",
        service.command(config.rollout.step_deadline_s),
        folder.path / "env-service.log",
        LUDUS_TOKENS=token,
    )
    try:
        url = child.address()
        note(f"{service.served.name} is played by a service of its own at {url}")
        yield Companions(service, url)
    finally:
        child.stop()


@contextmanager
def _viewing(config: RunConfig, folder: RunFolder, note: Callable[[str], None]) -> Iterator[None]:
    """Serve the live page. A page that does not start is a line; the run goes on."""
    command = [sys.executable, "-m", "ludus", "view", "--runs-dir", str(folder.path.parent)]
    # Not as an argument: a store's URL may hold a password.
    env = {} if config.store is None else {"LUDUS_STORE": config.store}
    log = folder.path / "view.log"
    child = Companion("ludus view", [*command, "--port", str(_port(VIEW_PORT))], log, **env)
    try:
        try:
            url = child.address()
            token = os.environ.get("LUDUS_TOKENS", "") and " (token: see LUDUS_TOKENS)"
            note(f"live page: {url}/#/run?run={quote(folder.id)}{token}")
        except LudusError as error:
            note(f"no live page: {error}")
        yield
    finally:
        child.stop()


def _port(wanted: int) -> int:
    """Returns `wanted`, or 0 where another process listens there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            return 0
    return wanted
