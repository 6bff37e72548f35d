"""The client of Ray's job API, with limits: Ray's own waits for an answer for ever."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ludus.cluster.token import token_path
from ludus.core.errors import LudusError, printable

VERSION_S = 10.0
"""Time limit of the answer to the first question, in seconds."""

VERSION_BYTES = 65_536

CONNECT_S, SILENCE_S = 10.0, 60.0
"""Seconds in which the head accepts a connection, and in which it begins to answer."""


class ClusterError(LudusError):
    """A cluster cannot be reached, or refuses."""


def job_client(address: str, token: str) -> Any:
    """Returns Ray's client of the jobs of a cluster. Errors: see `told`."""
    from ray.job_submission import JobSubmissionClient

    class Client(JobSubmissionClient):
        def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
            limits: dict[str, Any] = {"timeout": (CONNECT_S, SILENCE_S), "allow_redirects": False}
            return super()._do_request(method, endpoint, **limits, **options)

    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with told(address):
        return Client(address, headers=headers)


def ray_version(address: str, token: str) -> str:
    """The version of Ray at an address. Errors: ClusterError for none, or another server."""
    from aiohttp import ClientConnectorError, ClientError

    try:
        status, place, content = asyncio.run(_ask_version(address, token))
    except (ClientConnectorError, TimeoutError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        reason = reason or f"no complete answer within {VERSION_S:g} s"
        raise ClusterError(
            f"there is no Ray at {address} ({reason}): start a cluster (`ludus cluster up "
            "HOSTS.yaml`), or give its dashboard by --address"
        ) from None
    except (ClientError, OSError, ValueError):
        raise _no_job_api(address) from None
    if place:
        raise ClusterError(f"{address} redirects to {printable(place)[:200]!r}: give that address")
    if status in (401, 403):
        has = "does not accept yours" if token else "needs its token"
        raise ClusterError(
            f"the cluster at {address} {has}: copy ~/.ray/auth_token of the user who started "
            f"it to {token_path()}, or set RAY_AUTH_TOKEN_PATH"
        )
    if status != 200:
        raise _no_job_api(address, f" ({status})")
    try:
        version = json.loads(content)["ray_version"]
    except (KeyError, RecursionError, TypeError, ValueError):
        raise _no_job_api(address) from None
    if not (isinstance(version, str) and version[:1].isdecimal()):
        raise _no_job_api(address)
    return version


async def _ask_version(address: str, token: str) -> tuple[int, str, bytes]:
    """Returns the status of an answer, where it redirects to, and its first bytes."""
    from aiohttp import ClientSession, ClientTimeout

    headers = {"Accept-Encoding": "identity"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    limit = ClientTimeout(total=VERSION_S)
    async with (
        ClientSession(timeout=limit, trust_env=True, auto_decompress=False) as session,
        session.get(f"{address}/api/version", headers=headers, allow_redirects=False) as answer,
    ):
        place = answer.headers.get("Location", "") if 300 <= answer.status < 400 else ""
        content = bytearray()
        async for part in answer.content.iter_any():
            content += part
            if len(content) > VERSION_BYTES:
                break
        return answer.status, place, bytes(content)


def _no_job_api(address: str, more: str = "") -> ClusterError:
    return ClusterError(
        f"{address} answers, but not as Ray's job API{more}: give the dashboard of a head that has "
        "'ray[default]'"
    )


@contextmanager
def told(address: str, after: str = "") -> Iterator[None]:
    """Turn the errors of Ray's client into a ClusterError of one line.

    `after`: what may have happened nevertheless, where no answer came.
    """
    from requests import Timeout

    try:
        yield
    except Timeout:
        raise ClusterError(
            f"the cluster at {address} has not answered within {SILENCE_S:g} s{after}: look at its "
            "head (`ludus cluster status HOSTS.yaml`)"
        ) from None
    except (AttributeError, KeyError, TypeError):  # Ray's client reads an answer of another form
        raise _no_job_api(address) from None
    except (OSError, RuntimeError, ValueError, client_error()) as error:
        # Ray raises ValueError itself; its subclasses are those of JSON and of other libraries
        if isinstance(error, ValueError) and type(error) is not ValueError:
            raise _no_job_api(address, f" ({short(error)})") from None
        raise ClusterError(f"the cluster at {address}: {short(error)}") from None


def client_error() -> type[Exception]:
    """The errors of WebSockets of Ray's client."""
    from aiohttp import ClientError

    kind: type[Exception] = ClientError
    return kind


def short(error: BaseException) -> str:
    """The first line of an error."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return printable(lines[0][:300] if lines else type(error).__name__)
