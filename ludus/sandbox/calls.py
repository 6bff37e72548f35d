"""A call of the jail: its header and bytes, and its result in the caller's words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from ludus.core.errors import ConfigError, ToolError
from ludus.sandbox.base import Code, Limits, RunResult, RunStatus
from ludus.sandbox.languages import ALIASES, language_named
from ludus.sandbox.zygotes import Slot

COMPILE_MEMORY_MB = 1024

MEMORY_MESSAGE = re.compile(
    rb"(\w+\.)*_?(Array)?MemoryError|.*std::bad_alloc|.*JavaScript heap out of"
)


def job_of(
    code: Code, limits: Limits, *, in_session: bool, python: str | None
) -> tuple[dict[str, Any], list[bytes]]:
    """The header and the bytes of a call: stdin, or a session's code; then the files.

    `python` runs Python's code outside of sessions; None: a process that has loaded the packages.

    Errors: ConfigError.
    """
    language = language_named(code.language)
    name = ALIASES.get(code.language.lower(), code.language.lower())
    if in_session and name != "python":
        raise ConfigError(f"sandbox: a session runs python, not {name}")
    files = {_checked(path, "files"): data for path, data in code.files.items()}
    text = code.text.encode("utf-8", "surrogatepass")
    if not in_session:
        files[language.file] = text
    run = list(language.run)
    if name == "python" and python is not None and not in_session:
        run = [python, "-X", "utf8", language.file]
    job = {
        "session": in_session,
        "compile": list(language.compile),
        "run": run,
        "reserves": language.reserves,
        "files": list(files),
        "fetch": list(dict.fromkeys(_checked(path, "fetch_files") for path in code.fetch)),
        "run_s": limits.run_s,
        "compile_s": limits.compile_s,
        "memory_mb": limits.memory_mb,
        "compile_memory_mb": COMPILE_MEMORY_MB,
        "num_processes": limits.num_processes,
        "disk_mb": limits.disk_mb,
        "output_bytes": limits.output_bytes,
    }
    return job, [text if in_session else code.stdin, *files.values()]


def _checked(path: str, name: str) -> str:
    """A path within the working folder; `name` of the list that it stands in.

    Errors: ConfigError.
    """
    parts = PurePosixPath(path).parts
    unicode = path.encode("utf-8", "replace").decode() == path
    if not parts or parts[0] == "/" or ".." in parts or "\0" in path or not unicode:
        raise ConfigError(
            f"sandbox: {name}: {path[:200]!r} is not a path within the working folder: give a "
            "relative one without '..', like 'data/x.txt'"
        )
    return str(PurePosixPath(path))


def result_of(
    slot: Slot,
    job: Mapping[str, Any],
    result: Mapping[str, Any],
    files: Sequence[bytes],
    end: Mapping[str, Any],
    kills: int,
) -> RunResult:
    """The result in the caller's words.

    Errors: ConfigError for files that cannot be written; ToolError where the jail failed, not the
    code.
    """
    if refused := result.get("refused"):
        raise ConfigError(f"sandbox: {refused}")
    if problem := result.get("error") or end.get("error"):
        raise ToolError(f"sandbox: {problem}")
    stdout, stderr = (output.take() for output in slot.outputs)
    out_of_memory = slot.cgroup is not None and slot.cgroup.num_kills() > kills
    exceeded = any(output.exceeded for output in slot.outputs)
    if not result:
        if not (end.get("event") == "lost" or end.get("late") or out_of_memory):
            raise ToolError("sandbox: the jail ended a run that exceeded no limit")
        how = "exit" if out_of_memory else "time"
        result = {"how": how, "exit": None, "seconds": job["run_s"], "names": []}
    if result.get("compile_failed"):
        stderr = files[0]
    status = _status(result, stderr, exceeded, out_of_memory)
    return RunResult(
        status=status,
        stdout=stdout.decode("utf-8", "replace"),
        stderr=stderr.decode("utf-8", "replace"),
        exit_code=result["exit"],
        seconds=result["seconds"],
        compile_seconds=result.get("compile_seconds"),
        compile_failed=bool(result.get("compile_failed")),
        files=dict(zip(result.get("names", ()), files, strict=False)),
    )


def _status(
    result: Mapping[str, Any], stderr: bytes, exceeded: bool, out_of_memory: bool
) -> RunStatus:
    if result["how"] == "time":
        return RunStatus.TIME_LIMIT
    if result["how"] == "output" or exceeded or result.get("too_much"):
        return RunStatus.OUTPUT_LIMIT
    if result["exit"] == 0:
        return RunStatus.FINISHED
    last = stderr.rstrip().rpartition(b"\n")[2]
    if out_of_memory or MEMORY_MESSAGE.match(last):
        return RunStatus.MEMORY_LIMIT
    return RunStatus.ERROR
