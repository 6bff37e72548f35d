"""Runs assertions against a program, apart from it. Its text runs in the sandbox.

    assertions      read from stdin after the fork; call the program's functions over a pipe
     └─ program     a process of its own

The program finds neither the assertions nor the key of the result in a file, in its memory or in a
frame. Values cross the pipe as plain data, so a value's own `__eq__` stays behind. Other objects of
the program stay there; the assertions hold a `Remote`, which is equal to itself only.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
import json
import numbers
import os
import signal
import struct
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, NoReturn

PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
MAX_ITEMS = 1_000_000
MODULES = ("cmath", "collections", "datetime", "itertools", "math", "random", "re", "string", "sys")
"""Modules that assertions may use without an import."""

PLAIN: Mapping[str, Callable[[Any], Any]] = {
    "tuple": tuple, "set": set, "frozenset": frozenset, "iterator": iter,
    "complex": lambda parts: complex(*parts),
}  # fmt: skip


class UnsendableError(Exception):
    """An argument of an assertion that cannot leave its process, such as a function."""


class Remote:
    """An object of the program: called, read and written there."""

    def __init__(self, pipe: Pipe, number: int) -> None:
        self.__dict__.update(_pipe=pipe, _number=number)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._pipe.ask("call", self, args, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._pipe.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._pipe.ask("set", self, name, value)


class Pipe:
    """Frames of JSON between the two processes."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader: BinaryIO = os.fdopen(reader, "rb")
        self._writer: BinaryIO = os.fdopen(writer, "wb")

    def send(self, value: Any) -> None:
        text = json.dumps(value).encode()
        self._writer.write(struct.pack("=Q", len(text)) + text)
        self._writer.flush()

    def receive(self) -> Any:
        """Errors: EOFError if the other process has ended."""
        head = self._reader.read(8)
        if len(head) < 8:
            raise EOFError("the program has ended")
        return json.loads(self._reader.read(struct.unpack("=Q", head)[0]))

    def ask(self, *request: Any) -> Any:
        """The value of a request to the program. Errors: what the program raised, if built in."""
        self.send([self._packed(part) for part in request])
        kind, value = self.receive()
        if kind == "value":
            return self._unpacked(value)
        known = getattr(builtins, str(value[0]), None)
        is_error = isinstance(known, type) and issubclass(known, Exception)
        raise known(value[1]) if is_error and known else RuntimeError(": ".join(value))

    def _packed(self, value: Any) -> Any:
        if isinstance(value, Remote):
            return {"known": value._number}
        return pack(value, self._packed, refuse)

    def _unpacked(self, value: Any) -> Any:
        return unpack(value, self._unpacked, lambda number: Remote(self, number))


def refuse(value: Any) -> NoReturn:
    """Errors: UnsendableError."""
    raise UnsendableError(f"an argument is a {type(value).__name__}, not plain data")


def pack(value: Any, inner: Callable[[Any], Any], other: Callable[[Any], Any]) -> Any:
    """A value as JSON: subclasses as what they derive from, and `other` for the rest."""
    if hasattr(value, "tolist") and not isinstance(value, type):  # numpy's
        value = value.tolist()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, numbers.Complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, dict):
        return {"dict": [[inner(key), inner(item)] for key, item in value.items()]}
    if isinstance(value, list):
        return [inner(item) for item in value]
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    for name, kind in (("tuple", tuple), ("set", set), ("frozenset", frozenset)):
        if isinstance(value, kind):
            return {name: [inner(item) for item in value]}
    if isinstance(value, Iterator):
        return {"iterator": [inner(item) for item, _ in zip(value, range(MAX_ITEMS), strict=False)]}
    return other(value)


def unpack(value: Any, inner: Callable[[Any], Any], known: Callable[[int], Any]) -> Any:
    """The value of JSON that `pack` made."""
    if isinstance(value, list):
        return [inner(item) for item in value]
    if not isinstance(value, dict):
        return value
    [(name, items)] = value.items()
    if name == "known":
        return known(items)
    if name == "bytes":
        return bytes.fromhex(items)
    if name == "dict":
        return {inner(key): inner(item) for key, item in items}
    return PLAIN[name]([inner(item) for item in items])


def serve(pipe: Pipe, code: str) -> None:
    """Run the program, tell the names of its functions and classes, answer requests."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    kept: list[Any] = []

    def to_there(value: Any) -> Any:
        return pack(value, to_there, keep)

    def keep(value: Any) -> Any:
        kept.append(value)
        return {"known": len(kept) - 1}

    def from_there(value: Any) -> Any:
        return unpack(value, from_there, kept.__getitem__)

    def told(error: BaseException) -> Any:
        return ["error", [type(error).__name__, str(error)[:300]]]

    try:
        exec(compile(code, "main.py", "exec"), main.__dict__)
    except BaseException as error:
        return pipe.send(told(error))
    found = {name: value for name, value in main.__dict__.items() if callable(value)}
    pipe.send(["names", [[name, keep(value)["known"]] for name, value in found.items()]])
    while True:
        operation, *request = map(from_there, pipe.receive())
        try:
            if operation == "call":
                value = request[0](*request[1], **request[2])
            else:
                value = getattr(*request) if operation == "get" else None
                if operation == "set":
                    setattr(*request)
            answer = ["value", to_there(value)]
        except BaseException as error:
            answer = told(error)
        pipe.send(answer)


def start_program(code: str) -> tuple[Pipe, int]:
    """Start the program's process; returns its pipe and its process id."""
    # No process of the same user can open this one's files or memory.
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    reader, there_writer = os.pipe()
    there_reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)
            nothing = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1):
                os.dup2(nothing, fd)
            os.close(reader)
            os.close(writer)
            serve(Pipe(there_reader, there_writer), code)
        finally:
            os._exit(1)
    os.close(there_reader)
    os.close(there_writer)
    folder = os.getcwd()  # the program may write modules there
    sys.path[:] = [path for path in sys.path if path and os.path.abspath(path) != folder]
    return Pipe(reader, writer), pid


def run(code: str) -> None:
    """Run a program, and the assertions from stdin.

    stdin: JSON of `prompt` (code that the assertions may use), `name` (of the function under test),
    `text` (the assertions) and `key`, which begins the line that says that all hold.

    Errors: what an assertion raises.
    """
    sys.set_int_max_str_digits(0)
    pipe, pid = start_program(code)
    try:
        job = json.loads(sys.stdin.buffer.read())
        kind, names = pipe.receive()
        if kind == "error":
            raise SystemExit(": ".join(names))
        used = [name for name in MODULES if name in job["text"]]
        space: dict[str, Any] = {name: importlib.import_module(name) for name in used}
        exec(job["prompt"], space)
        space.pop(job["name"], None)
        for name, number in names:
            if name not in space and not hasattr(builtins, name):
                space[name] = Remote(pipe, number)
        exec(compile(job["text"], "tests", "exec"), space)
        print(f"\n{job['key']}null", flush=True)
    except UnsendableError as error:
        print(f"\n{job['key']}{json.dumps(str(error))}", flush=True)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
