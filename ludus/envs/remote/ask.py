"""Questions to a host over HTTP. They block, so an episode asks them in a thread, or not at all."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import httpx

from ludus.core.errors import ConfigError, EnvError
from ludus.envs.remote import wire
from ludus.envs.remote.wire import Health, Refusal, Schema, T
from ludus.telemetry.logs import get_logger

log = get_logger(__name__)

CONNECT_S = 1.5
EXPERT_SLACK_S = 5.0
"""Seconds that the service's own deadline is given to be reported."""

COMPARED = ("args", "max_turns", "success_at", "score_range", "tiers", "tools")
"""Of an environment's description; all hosts of a fleet have the same."""


class NoAnswer(EnvError):
    """Nothing answers at the address."""


class Denied(EnvError):
    """The service refuses the token."""


class NotFound(EnvError):
    """The service answers 404."""


def ask(
    kind: type[T],
    url: str,
    method: str,
    path: str,
    body: dict[str, Any] | None = None,
    answer_s: float = CONNECT_S,
) -> T:
    """Returns a route's answer, of type `kind`. Blocks, for about 1 ms but for the expert's.

    Errors: EnvError where there is no such answer, of MAX_BYTES at most, within `answer_s` and
    CONNECT_S.
    """
    with ThreadPoolExecutor(1) as thread:  # the caller's may run an event loop
        fetched = thread.submit(asyncio.run, _fetch(url, method, path, body, answer_s))
        status, content = fetched.result()
    if status in (401, 403):
        raise Denied(f"{url} refuses the token: set LUDUS_TOKEN")
    answer = wire.parse(url, content)
    if status == 200:
        return wire.read(url, kind, answer)
    told = wire.read(url, Refusal, answer).error.message
    raise (NotFound if status == 404 else EnvError)(f"{url}: {told}")


async def _fetch(
    url: str, method: str, path: str, body: dict[str, Any] | None, answer_s: float
) -> tuple[int, bytes]:
    """Returns the status and the body of an answer.

    The time limit is that of asyncio: httpx has one for each read only, which a header that comes
    letter by letter never exceeds. Errors: EnvError.
    """
    address, content = url + path, bytearray()
    headers = {"accept-encoding": "identity", **wire.headers()}
    timeout = httpx.Timeout(CONNECT_S, read=answer_s)
    try:
        async with (
            asyncio.timeout(answer_s + CONNECT_S),
            httpx.AsyncClient(verify=_certificates(), headers=headers, timeout=timeout) as client,
            client.stream(method, address, json=body) as response,
        ):
            if response.has_redirect_location:
                where = response.headers["location"]
                raise EnvError(f"{url} redirects to {where!r:.200}: give that address")
            if response.headers.get("content-encoding", "identity") != "identity":
                raise EnvError(f"{address}: the answer is compressed, which was not asked for")
            async for part in response.aiter_raw():
                content += part
                if len(content) > wire.MAX_BYTES:
                    raise EnvError(f"{address}: the answer has over {wire.MAX_BYTES:,} bytes")
    except httpx.TimeoutException as error:  # its text is empty
        raise NoAnswer(wire.no_answer(url, TimeoutError("timed out"))) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NoAnswer(wire.no_answer(url, error)) from error
    except TimeoutError:
        raise NoAnswer(f"{address}: the answer is too slow") from None
    return response.status_code, bytes(content)


@cache
def _certificates() -> ssl.SSLContext:
    """Made once: loading the certificates takes 20 ms."""
    return httpx.create_ssl_context()


def only_env(url: str) -> str:
    """Name of a host's environment. Errors: EnvError where it has several."""
    names = ask(list[str], url, "GET", "/envs")
    if len(names) != 1:
        raise EnvError(f"{url} serves {', '.join(names)}: name one as args.env")
    return names[0]


@dataclass(frozen=True)
class Description:
    """A host, its version, and the environment that it serves."""

    url: str
    env: str
    health: Health
    schema: Schema

    def difference(self, other: Description) -> str | None:
        """In which way the two are not the same environment, both hosts named; None: they are."""
        pairs: dict[str, tuple[Any, Any]] = {
            "env": (self.env, other.env),
            "version": (self.health.version, other.health.version),
        }
        pairs |= {
            name: (getattr(self.schema, name), getattr(other.schema, name)) for name in COMPARED
        }
        for name, (mine, its) in pairs.items():
            if mine != its:
                return (
                    f"{self.url} and {other.url} do not serve the same environment: {name} is "
                    f"{_shown(mine)} at {self.url}, {_shown(its)} at {other.url}"
                )
        return None


def _shown(value: Any) -> str:
    if isinstance(value, list) and value and not isinstance(value[0], str):
        return f"{[tool.name for tool in value]}"[:200]
    return f"{value!r:.200}"


def describe(url: str, env: str | None, *, compared: bool = True) -> Description:
    """The environment of a host; its version only where it is `compared`. Errors: EnvError."""
    health = ask(Health, url, "GET", "/health") if compared else Health(status="")
    name = env or only_env(url)
    return Description(url, name, health, ask(Schema, url, "GET", f"/envs/{name}"))


def describe_all(urls: Sequence[str], env: str | None) -> Mapping[str, Description | EnvError]:
    """The environment of each host, or why it cannot be told."""

    def one(url: str) -> Description | EnvError:
        try:
            return describe(url, env)
        except EnvError as error:
            return error

    with ThreadPoolExecutor(max_workers=16) as pool:
        return dict(zip(urls, pool.map(one, urls), strict=True))


def agreed(urls: Sequence[str], env: str | None) -> Description:
    """The description that all hosts which answer agree on; `url` is that of the first.

    Errors: ConfigError where two differ, both named; EnvError where none answers.
    """
    told = describe_all(urls, env)
    answers = [entry for entry in told.values() if isinstance(entry, Description)]
    if not answers:
        raise EnvError(f"none of {len(urls)} hosts answers: {reasons(told)}")
    if len(answers) < len(urls):
        silent = {url: error for url, error in told.items() if error not in answers}
        log.warning("some environment hosts do not answer", hosts=reasons(silent))
    for other in answers[1:]:
        if difference := answers[0].difference(other):
            raise ConfigError(f"url: {difference}")
    return answers[0]


@dataclass(frozen=True)
class Survey:
    """A host, for people: what it serves; why it is of no use, or empty."""

    told: str
    problem: str = ""


def surveyed(urls: Sequence[str]) -> Mapping[str, Survey]:
    """The state of each host, for people. A host that differs from the first is a problem."""

    def one(url: str) -> tuple[Survey, Mapping[str, Description]]:
        try:
            began = time.monotonic()
            health = ask(Health, url, "GET", "/health")
            seconds = time.monotonic() - began
            names = ask(list[str], url, "GET", "/envs")
            found = {name: describe(url, name) for name in names}
        except EnvError as error:
            return Survey("", str(error)), {}
        told = f"{health.status}, {', '.join(names)} of ludus {health.version or 'unknown'}"
        told += f", {health.sessions} sessions open, answered in {1000 * seconds:.0f} ms"
        drains = "it drains: it takes no new sessions" if health.status == "draining" else ""
        return Survey(told, drains), found

    with ThreadPoolExecutor(max_workers=16) as pool:
        answers = dict(zip(urls, pool.map(one, urls), strict=True))
    first: dict[str, Description] = {}
    surveys = {}
    for url, (survey, found) in answers.items():
        for name, description in found.items():
            difference = first.setdefault(name, description).difference(description)
            survey = replace(survey, problem=difference or survey.problem)
        surveys[url] = survey
    return surveys


def reasons(told: Mapping[str, object], most: int = 5) -> str:
    """Hosts and why each is of no use, as one text."""
    lines = [text if url in (text := str(told[url])) else f"{url}: {text}" for url in told]
    more = [f"and {len(lines) - most} more"] if len(lines) > most else []
    return "; ".join([*lines[:most], *more])
