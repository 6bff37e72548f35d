"""The client of remote tools and sandboxes: JSON over HTTP, with a deadline, retries, a breaker.

    client = RemoteClient("http://127.0.0.1:5000/retrieve", idempotent=True)
    answer = await client.post({"queries": ["tallest mountain"]})

A failure of the transport is a ToolError, never an answer: nothing that the model reads is invented
here. A status that blames the arguments (400, 413, 422) is Blamed, for the tool to tell the model.

    refused at connecting, 429, 503      sent again: the server has not run the call
    lost after sending, 408, 5xx         sent again only if the calls are `idempotent`
    401, 403, 404, other statuses        RefusedError, not sent again
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from itertools import count
from typing import Any

from ludus.core.errors import ConfigError, ToolError

MAX_BYTES = 16_000_000
CONNECT_S = 5.0
PAUSE_S, MAX_PAUSE_S = 0.2, 10.0
"""The first retry waits 0 to PAUSE_S seconds, each further one up to twice as long: full jitter, as
callers that failed together must not return together."""

BLAMES = (400, 413, 422)
NOT_RUN = (425, 429, 503)
LOST = (408, 500, 502, 504)


class Blamed(Exception):
    """The server says that the call's arguments are wrong; the message is the server's."""


class RefusedError(ToolError):
    """A status that another attempt does not change: a wrong address, or a wrong token."""


class Breaker:
    """Keeps calls away from a server that is down.

    After `threshold` failures in a row it opens: calls wait. After `pause_s` one call is let
    through. If it succeeds, all go on; if it fails, they wait again.
    """

    def __init__(self, threshold: int = 5, pause_s: float = 2.0) -> None:
        self._threshold, self._pause_s = threshold, pause_s
        self._failures = 0
        self._open_until = 0.0
        self._probe: asyncio.Event | None = None

    @property
    def is_open(self) -> bool:
        return self._failures >= self._threshold

    async def ready(self) -> None:
        """Wait until a call may be tried; each must be followed by `settle`."""
        clock = asyncio.get_running_loop().time
        while self.is_open:
            if (wait := self._open_until - clock()) > 0:
                await asyncio.sleep(wait)
            elif self._probe is not None:
                await self._probe.wait()
            else:
                self._probe = asyncio.Event()
                return

    def settle(self, answered: bool | None) -> None:
        """True: the server answered. False: it did not. None: the caller gave up."""
        if answered:
            self._failures = 0
        elif answered is False:
            self._failures += 1
            self._open_until = asyncio.get_running_loop().time() + self._pause_s
        if self._probe is not None:
            self._probe.set()
            self._probe = None


class RemoteClient:
    """Client of one URL. Use it in one event loop.

    Args:
        deadline_s: seconds of a call, retries and waiting included.
        attempts: how often a call is sent at most; None: until the deadline.
        attempt_s: seconds of an attempt, after which its answer counts as lost; None: no limit.
        max_bytes: of an answer.
        failed: tells from an answer why the call is to be sent again; None: it is not.
        max_in_flight: calls under way at the same time; further ones wait.
        token_env: name of an environment variable with a bearer token.
        idempotent: the server may run a call twice without harm.

    Errors: ConfigError for a wrong URL, or a token that is missing.
    """

    def __init__(
        self,
        url: str,
        *,
        deadline_s: float = 30.0,
        attempts: int | None = 4,
        attempt_s: float | None = None,
        max_bytes: int = MAX_BYTES,
        failed: Callable[[Any], str | None] = lambda _: None,
        max_in_flight: int = 64,
        token_env: str | None = None,
        idempotent: bool = False,
    ) -> None:
        self.url = _checked(url)
        self._deadline_s, self._attempts, self._idempotent = deadline_s, attempts, idempotent
        self._attempt_s, self._max_bytes, self._failed = attempt_s, max_bytes, failed
        self._places = asyncio.Semaphore(max_in_flight)
        self._breaker = Breaker()
        self._problem = ""  # the last
        import httpx  # of the extra `remote`: the core needs only light packages

        self._unsent = httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout
        self._lost = httpx.HTTPError
        self._client = httpx.AsyncClient(
            headers={"accept-encoding": "identity", **authorization(token_env)},
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=max_in_flight),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def get(self, path: str) -> Any:
        """The JSON at `path`. Errors: as `post`."""
        return await self._call("GET", path, None, self._attempts, self._deadline_s)

    async def post(
        self, body: Any, path: str = "", *, once: bool = False, deadline_s: float | None = None
    ) -> Any:
        """Send a body, return the JSON of the answer.

        `once`: without retries. `deadline_s`: this call's own.

        Errors: Blamed, ToolError.
        """
        attempts, seconds = 1 if once else self._attempts, deadline_s or self._deadline_s
        return await self._call("POST", path, body, attempts, seconds)

    @property
    def is_down(self) -> bool:
        """True after failures in a row: a call would wait."""
        return self._breaker.is_open

    async def _call(
        self, method: str, path: str, body: Any, attempts: int | None, seconds: float
    ) -> Any:
        url, problem, after_s = self.url + path, "", 0.0
        try:
            async with asyncio.timeout(seconds):
                for attempt in count() if attempts is None else range(attempts):
                    if attempt:
                        pause = min(MAX_PAUSE_S, PAUSE_S * 2 ** min(attempt - 1, 16))
                        await asyncio.sleep(max(random.uniform(0, pause), after_s))
                    outcome = await self._attempt(method, url, body)
                    if not isinstance(outcome, _Failure):
                        return outcome
                    problem = self._problem = outcome.problem
                    after_s = outcome.after_s
                    if not outcome.again or after_s > seconds:
                        break
        except TimeoutError:
            waiting = ", after failures in a row" if self._breaker.is_open else ""
            problem = problem or (waiting and self._problem)  # of another call, while this waited
            told = f"{waiting} ({problem})" if problem else waiting
            raise ToolError(f"{url} gave no answer within {seconds:g} s{told}") from None
        raise ToolError(f"{url}: {problem}")

    async def _attempt(self, method: str, url: str, body: Any) -> Any:
        """The answer, or a _Failure. Errors: Blamed, ToolError for an answer that is no JSON."""
        await self._breaker.ready()
        answered: bool | None = None
        try:
            async with self._places, asyncio.timeout(self._attempt_s):
                status, content, after_s = await self._send(method, url, body)
            answered = status not in (*NOT_RUN, *LOST) or status == 429
        except TimeoutError:  # of this attempt: the call's own cancels
            answered = False
            return _Failure(f"no answer within {self._attempt_s:g} s", self._idempotent)
        except self._lost as error:
            answered = False
            again = self._idempotent or isinstance(error, self._unsent)
            return _Failure(f"no answer ({str(error) or type(error).__name__})", again)
        finally:
            self._breaker.settle(answered)
        if 200 <= status < 300:
            parsed = _parsed(url, content)
            problem = self._failed(parsed)
            return parsed if problem is None else _Failure(problem, again=True)
        text = _message(content)
        if status in BLAMES:
            raise Blamed(text)
        if status not in (*NOT_RUN, *LOST):
            raise RefusedError(f"{url}: answered {status}: {text}")
        again = status in NOT_RUN or (self._idempotent and status in LOST)
        return _Failure(f"answered {status}: {text}", again, after_s)

    async def _send(self, method: str, url: str, body: Any) -> tuple[int, bytes, float]:
        """Status, body, and the seconds of `Retry-After`."""
        content = bytearray()
        async with self._client.stream(method, url, json=body) as response:
            if response.has_redirect_location:
                place = response.headers["location"]
                raise ToolError(f"{url} redirects to {place!r:.200}: give that address")
            if response.headers.get("content-encoding", "identity") != "identity":
                raise ToolError(f"{url} compresses its answer, which was not asked for")
            async for part in response.aiter_raw():
                content += part
                if len(content) > self._max_bytes:
                    raise ToolError(f"{url}: the answer has more than {self._max_bytes:,} bytes")
        return response.status_code, bytes(content), retry_after(response.headers)


class _Failure:
    """An attempt without an answer; `again`: it may be sent again, after `after_s` seconds."""

    def __init__(self, problem: str, again: bool, after_s: float = 0.0) -> None:
        self.problem, self.again, self.after_s = problem, again, after_s


def retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that a server asks to wait (RFC 9110, 10.2.3: a number or a date); else 0."""
    text = headers.get("retry-after", "").strip()
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text):
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (OverflowError, TypeError, ValueError):  # no date
        return 0.0


def _parsed(url: str, content: bytes) -> Any:
    try:
        return json.loads(content.decode())
    except UnicodeDecodeError as error:
        raise ToolError(f"{url}: the answer is not UTF-8 ({error})") from None
    except (RecursionError, ValueError) as error:
        raise ToolError(f"{url}: the answer is not JSON ({error})") from None


def _message(content: bytes) -> str:
    """The text of an error: `{"error": {"message": ...}}`, `{"detail": ...}`, or the beginning."""
    text: Any = content[:2_000].decode("utf-8", "replace")
    try:
        body = json.loads(content)
        found = body.get("error") or body.get("detail") or body.get("message")
        text = found.get("message", found) if isinstance(found, dict) else found or text
        text = text if isinstance(text, str) else json.dumps(text)
    except (AttributeError, RecursionError, ValueError):
        pass
    return " ".join(text.encode("utf-8", "replace").decode().split())[:400]


def _checked(url: str) -> str:
    import httpx

    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError, ValueError) as error:
        raise ConfigError(f"{url!r:.200} is not a URL: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"{url!r:.200} must have the form http://host:port/path or https://...")
    if parsed.userinfo:
        raise ConfigError("a URL with a password: name a variable with a token as token_env")
    return url.rstrip("/")


def authorization(token_env: str | None) -> dict[str, str]:
    """The header with the token of an environment variable. Errors: ConfigError."""
    if token_env is None:
        return {}
    token = os.environ.get(token_env, "")
    if not token:
        raise ConfigError(f"token_env: the environment variable {token_env} is not set")
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(f"token_env: {token_env} must be printable ASCII")
    return {"authorization": f"Bearer {token}"}
