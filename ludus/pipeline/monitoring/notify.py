"""Notifications of a run's end or death, by apprise.

A small process (`ludus.telemetry.notifier`) waits for the end of the run's process and sends the
messages, so a run that is killed is told of too. URLs that fail never change how a run ends.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from ludus.config.secrets import is_masked, masked, scheme_of, variable_of
from ludus.core.errors import ConfigError, LudusError, described, did_you_mean
from ludus.core.modules import require
from ludus.core.system.processes import started
from ludus.store import RunStore
from ludus.store.folders import RunFolder, resume_command
from ludus.store.processes import NOTIFIER
from ludus.telemetry.logs import get_logger
from ludus.telemetry.notifier import SEND_S

log = get_logger(__name__)

WAIT_S = SEND_S + 10.0
"""Seconds that the end of a run waits for the messages."""


def check_urls(urls: Sequence[str]) -> None:
    """Refuse URLs that apprise does not know. Errors: ConfigError, MissingDependency."""
    if not urls:
        return
    require("apprise", "notify", "`notify`")
    faults = [
        f"notify.{number}: {fault}"
        for number, url in enumerate(urls)
        if not variable_of(url) and not is_masked(url) and (fault := _fault(url))
    ]
    if faults:
        raise ConfigError("\n".join(faults))


def _fault(url: str) -> str:
    """The fault of a URL, in words without the URL; empty where it has none."""
    from apprise import Apprise
    from apprise.manager_plugins import NotificationManager

    scheme, known = scheme_of(url) or "", NotificationManager().schemas()
    if scheme not in known:
        return f"apprise knows no scheme {scheme!r}{did_you_mean(scheme, known)}"
    loud = logging.getLogger("apprise")  # its lines have the URL
    level = loud.level
    loud.setLevel(logging.CRITICAL + 1)
    try:
        readable = Apprise.instantiate(url)
    finally:
        loud.setLevel(level)
    if not readable:
        return f"apprise cannot read this URL of {scheme}: its documentation shows the form"
    return ""


def resolved_urls(urls: Sequence[str], note: Callable[[str], None]) -> list[str]:
    """Returns the URLs with those of `$NAME` in the environment; says which are unknown.

    Errors: ConfigError for a variable that is not set, and for a wrong URL in one.
    """
    found: list[str] = []
    for number, url in enumerate(urls):
        name = variable_of(url)
        if name is not None:
            text = os.environ.get(name, "")
            inside = [
                part for part in re.split(r"[\s,]+(?=[A-Za-z][\w+.-]*://)", text.strip()) if part
            ]
            if not inside:
                raise ConfigError(f"notify.{number}: the environment variable {name} is not set")
            for one in inside:
                if fault := _fault(one):
                    raise ConfigError(f"notify.{number}: in {name}: {fault}")
            found += inside
        elif is_masked(url):
            note(
                f"notify.{number}: {url} is masked: the run does not store its URL. Give it again, "
                "as notify=[...], or as $NAME of an environment variable"
            )
        else:
            found.append(url)
    return found


@contextmanager
def notifying(
    folder: RunFolder, store: RunStore, urls: Sequence[str], note: Callable[[str], None]
) -> Iterator[None]:
    """Tell the URLs of the run's state in the store at the end of the block, or of its death."""
    if not urls:
        yield
        return
    process = subprocess.Popen(
        [sys.executable, "-m", "ludus.telemetry.notifier", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    started(process.pid, NOTIFIER)
    watched = {
        "run": folder.id,
        "folder": str(folder.path.resolve()),
        "urls": list(urls),
        "resume": resume_command(folder),
    }
    fault: BaseException | None = None
    try:
        _tell(process, watched)
        yield
    except BaseException as error:
        fault = error
        raise
    finally:
        outcome = _outcome(folder, store, fault)
        _end(process, outcome, [masked(url) for url in urls], note)


def _outcome(
    folder: RunFolder, store: RunStore, fault: BaseException | None
) -> dict[str, str | None]:
    """The run's state and error in the store, or of its fault where the store could not be written:
    the disk may be full."""
    with suppress(LudusError):
        row = store.run(folder.id)
        if row.status.value != "running":
            return {"state": row.status.value, "error": row.error}
    return {"state": "failed", "error": None if fault is None else described(fault)}


def _tell(process: subprocess.Popen[bytes], line: object) -> None:
    assert process.stdin is not None
    with suppress(OSError):  # it has died: `_end` tells
        process.stdin.write(json.dumps(line).encode() + b"\n")
        process.stdin.flush()


def _end(
    process: subprocess.Popen[bytes],
    outcome: object,
    urls: Sequence[str],
    note: Callable[[str], None],
) -> None:
    """Hand over the outcome; report the URLs that failed. A signal leaves the process alone."""
    _tell(process, outcome)
    try:
        said = process.communicate(timeout=WAIT_S)[0].decode(errors="replace").splitlines()
        faults = said if process.returncode == 0 else list(urls)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        return
    for fault in faults:
        note(f"notify: not sent: {fault}")
