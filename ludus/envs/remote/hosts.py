"""The list of a fleet's hosts: given, or read again and again from a file or from DNS."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from urllib.parse import urlsplit

from ludus.core.errors import ConfigError

FILE, DNS = "file:", "dns+"

FORMS = (
    "http://HOST:PORT, a list of such URLs, file:PATH (one URL a line), or dns+http://NAME:PORT "
    "(each address of NAME is a host)"
)


def check_url(url: str, place: str = "url") -> str:
    """Returns a host's URL in its normal form. Errors: ConfigError, which begins with `place`."""
    where = f"{place}: {url!r:.200}"
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{where} does not start with http:// or https://; give {FORMS}")
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname
    except ValueError as error:
        raise ConfigError(f"{where} is not a URL: {error}") from None
    if not host or any(letter.isspace() for letter in url) or port == 0:
        raise ConfigError(f"{where} has no host, or a wrong one: give http://HOST:PORT")
    if parts.username or parts.query or parts.fragment:
        raise ConfigError(f"{where} must not have a user, query or fragment")
    netloc = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{netloc}{f':{port}' if port else ''}{parts.path.rstrip('/')}"


@dataclass(frozen=True)
class HostList:
    """The list of hosts: `given` URLs, else the `file`, else the addresses of `dns`."""

    given: tuple[str, ...] = ()
    file: Path | None = None
    dns: str = ""

    @classmethod
    def of(cls, url: str | Sequence[str]) -> HostList:
        """Errors: ConfigError for a wrong or a double entry."""
        if not isinstance(url, str):
            return cls(given=_checked(tuple(url)))
        if url.startswith(FILE):
            return cls(file=Path(url.removeprefix(FILE)))
        if url.startswith(DNS):
            return cls(dns=_checked_dns(url))
        return cls(given=(check_url(url),))

    @property
    def changes(self) -> bool:
        """True if the list may change while it is in use."""
        return not self.given

    @property
    def is_fleet(self) -> bool:
        return self.changes or len(self.given) > 1

    @property
    def stamp(self) -> object:
        """Changes with the file; None: unknown without reading."""
        try:
            return self.file and (self.file.stat().st_mtime_ns, self.file.stat().st_size)
        except OSError:
            return "absent"

    def read(self) -> tuple[str, ...]:
        """The hosts' URLs; blocks. Errors: ConfigError."""
        if self.file is not None:
            return _from_file(self.file)
        return _from_dns(self.dns) if self.dns else self.given


@lru_cache(maxsize=64)
def _checked(urls: tuple[str, ...]) -> tuple[str, ...]:
    """The URLs of a list. Remembered: each episode makes an environment with the same list."""
    if not urls:
        raise ConfigError(f"url: the list is empty; give {FORMS}")
    return _unique([check_url(url, f"url[{number}]") for number, url in enumerate(urls)], "url")


def _unique(urls: Sequence[str], place: str) -> tuple[str, ...]:
    for number, url in enumerate(urls):
        if url in urls[:number]:
            raise ConfigError(f"{place}: {url} is listed twice; list every host once")
    return tuple(urls)


def _from_file(path: Path) -> tuple[str, ...]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        told = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"url: the list of hosts {path} cannot be read: {told}") from None
    entries = [(n, text) for n, line in enumerate(lines, 1) if (text := line.split("#")[0].strip())]
    if not entries:
        raise ConfigError(f"url: the list of hosts {path} is empty; write one URL a line")
    return _unique([check_url(text, f"{path}:{n}") for n, text in entries], str(path))


def _checked_dns(url: str) -> str:
    inner = check_url(url.removeprefix(DNS))
    if inner.startswith("https:"):
        raise ConfigError(
            f"url: {url!r:.200}: a certificate names no address; list the hosts of https in a file"
        )
    return inner


def _from_dns(url: str) -> tuple[str, ...]:
    parts = urlsplit(url)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"url: DNS has no address for {parts.hostname}: {error}") from None
    addresses = {str(entry[4][0]) for entry in found}
    hosts = [f"[{address}]" if ":" in address else address for address in sorted(addresses)]
    return tuple(f"http://{host}:{parts.port or 80}{parts.path}" for host in hosts)


def weight(url: str, key: str) -> bytes:
    """A host's weight for a key. The host with the largest takes it (rendezvous hashing, Thaler and
    Ravishankar 1998): another host moves the keys that it takes, and no other."""
    return blake2b(f"{url}\0{key}".encode(), digest_size=8).digest()
