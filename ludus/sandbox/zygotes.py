"""The host's side of the jail: starts the zygote, and runs calls in its slots."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ludus.core.errors import ToolError
from ludus.core.system.processes import started
from ludus.sandbox.cgroups import Cgroup

START_TIMEOUT_S = 60.0
GRACE_S = 0.4
"""Seconds after a call's limit at which its slot is killed, if it has not ended the call."""
MAX_HEADER_BYTES = 1 << 20
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
READ_BYTES = 1 << 16


class EndedError(ToolError):
    """The other side of a socket is gone."""


async def send(sock: socket.socket, header: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> None:
    """Send a frame."""
    head = json.dumps({**header, "blobs": [len(blob) for blob in blobs]}).encode()
    data = b"".join((struct.pack("=I", len(head)), head, *blobs))
    await asyncio.get_running_loop().sock_sendall(sock, data)


async def receive(sock: socket.socket, max_bytes: int = 0) -> tuple[dict[str, Any], list[bytes]]:
    """Receive a frame with at most `max_bytes` of blobs.

    Errors: ToolError at the end of the stream, or for a malformed frame.
    """
    [size] = struct.unpack("=I", await _exactly(sock, 4))
    if size > MAX_HEADER_BYTES:
        raise ToolError("sandbox: a malformed answer from the jail")
    try:
        header = json.loads(await _exactly(sock, size))
        lengths = [int(length) for length in header["blobs"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ToolError("sandbox: a malformed answer from the jail") from None
    if min(lengths, default=0) < 0 or sum(lengths) > max_bytes:
        raise ToolError("sandbox: an answer of the jail exceeds its limit")
    return header, [await _exactly(sock, length) for length in lengths]


async def _exactly(sock: socket.socket, length: int) -> bytes:
    loop, data = asyncio.get_running_loop(), bytearray()
    while len(data) < length:
        try:
            piece = await loop.sock_recv(sock, min(length - len(data), 1 << 20))
        except OSError:
            piece = b""
        if not piece:
            raise EndedError("sandbox: the jail ended")
        data += piece
    return bytes(data)


class Ground(Protocol):
    """The source of slots. `overhead_mb`: memory of a slot beside the program's."""

    overhead_mb: int

    @property
    def ended(self) -> bool:
        """True if no slot can be opened any more."""

    async def open_slot(self, cgroup: Cgroup | None) -> Slot:
        """Open a slot in a cgroup. Errors: ToolError."""

    def close(self) -> None:
        """Release what the ground holds; its slots are closed, or end with it."""


@dataclass(slots=True)
class Zygote:
    """A jail: a process in bubblewrap that has loaded the packages."""

    process: subprocess.Popen[bytes]
    sock: socket.socket
    loaded: Sequence[str]
    overhead_mb: int = 64  # page tables, and pages of the zygote that change

    @property
    def ended(self) -> bool:
        """True if it was ended from outside."""
        return self.process.poll() is not None

    async def open_slot(self, cgroup: Cgroup | None) -> Slot:
        """Fork a slot, and move it into its cgroup.

        Errors: ToolError.
        """
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        with theirs:
            try:
                socket.send_fds(self.sock, [b"s"], [theirs.fileno()])
            except OSError:
                ours.close()
                raise ToolError("sandbox: the jail ended") from None
        try:
            handle = await asyncio.to_thread(greet, ours, cgroup)
        except OSError as error:
            ours.close()
            raise ToolError(f"sandbox: a slot does not start: {error}") from None
        ours.setblocking(False)
        return Slot(ours, handle, cgroup)

    def close(self) -> None:
        """End the jail, and all that runs in it."""
        self.sock.close()
        self.process.kill()
        self.process.wait()


async def start_zygote(
    command: Sequence[str], settings: Mapping[str, Any], user: Mapping[str, Any]
) -> Zygote:
    """Start a jail and wait until its packages are loaded.

    Args:
        command: ends with the number of the jail's socket, which is appended here.
        user: `user`, `group` and `extra_groups` of the process.

    Errors: ToolError with what bubblewrap said.
    """
    ours, theirs = socket.socketpair()
    with tempfile.TemporaryFile() as log, theirs:
        process = subprocess.Popen(
            [*command, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env={} if settings["isolated"] else None,
            cwd="/",
            **user,
        )
        started(process.pid, "sandbox")
        theirs.close()
        ours.setblocking(False)
        try:
            await send(ours, settings)
            header, _ = await asyncio.wait_for(receive(ours), START_TIMEOUT_S)
        except BaseException as error:
            ours.close()
            process.kill()
            process.wait()
            if not isinstance(error, ToolError | TimeoutError | OSError):
                raise
            log.seek(0)
            said = log.read(2000).decode(errors="replace").strip() or str(error)
            raise ToolError(f"sandbox: the jail does not start: {said}") from None
    return Zygote(process, ours, header["loaded"])


@dataclass(slots=True)
class Output:
    """Output of a pipe, up to a limit."""

    fd: int
    limit: int
    data: bytearray = field(default_factory=bytearray)
    exceeded: bool = False

    def read(self) -> bool:
        """Read what is there; True if there may be more."""
        try:
            piece = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return False
        room = self.limit - len(self.data)
        self.exceeded |= len(piece) > room
        self.data += piece[:room]
        return bool(piece) and not self.exceeded

    def take(self) -> bytes:
        """Returns the output, and forgets it."""
        data, self.data, self.exceeded = bytes(self.data), bytearray(), False
        return data


def open_outputs() -> tuple[list[Output], list[int]]:
    """Make pipes for stdout and stderr; returns the ends for reading, and those for writing."""
    outputs, writers = [], []
    for _ in range(2):
        reader, writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reader, False)
        outputs.append(Output(reader, 0))
        writers.append(writer)
    return outputs, writers


@dataclass(slots=True, eq=False)
class Slot:
    """A process of the jail that serves one call at a time; `handle` is its pidfd."""

    sock: socket.socket
    handle: int
    cgroup: Cgroup | None
    outputs: list[Output] = field(default_factory=list)
    spoiled: bool = False

    async def begin(
        self, job: Mapping[str, Any], blobs: Sequence[bytes], output_bytes: int
    ) -> None:
        """Send a call with new pipes."""
        self.outputs, theirs = open_outputs()
        try:
            socket.send_fds(self.sock, [b"c"], theirs)
        except OSError:
            raise ToolError("sandbox: the jail ended") from None
        finally:
            for writer in theirs:
                os.close(writer)
        await self.proceed(job, blobs, output_bytes)

    async def proceed(
        self, job: Mapping[str, Any], blobs: Sequence[bytes], output_bytes: int
    ) -> None:
        """Send a further run of a session."""
        for output in self.outputs:
            output.limit = output_bytes
            asyncio.get_running_loop().add_reader(output.fd, self._on_output, output)
        try:
            await send(self.sock, job, blobs)
        except OSError:
            raise ToolError("sandbox: the jail ended") from None

    def _on_output(self, output: Output) -> None:
        if output.read():
            return
        asyncio.get_running_loop().remove_reader(output.fd)
        if output.exceeded and not self.spoiled:
            self.spoiled = True  # the order may arrive after the call's end
            head = b'{"blobs": []}'
            self.sock.send(struct.pack("=I", len(head)) + head)

    async def next_event(
        self, seconds: float, max_bytes: int
    ) -> tuple[dict[str, Any], list[bytes]]:
        """The next frame; an event `lost` if the slot gave none in time, and was killed."""
        task = asyncio.ensure_future(receive(self.sock, max_bytes))
        try:
            for wait in (seconds + GRACE_S, 0.01):  # a busy loop sees timers before sockets
                if (await asyncio.wait({task}, timeout=wait))[0]:
                    return task.result()
        finally:
            if not task.done():
                self.kill()
                task.cancel()
        return {"event": "lost"}, []

    def drain(self) -> None:
        """Read what the pipes still hold."""
        for output in self.outputs:
            asyncio.get_running_loop().remove_reader(output.fd)
            while not output.exceeded and output.read():
                continue

    def end_call(self) -> None:
        """Close the pipes."""
        for output in self.outputs:
            asyncio.get_running_loop().remove_reader(output.fd)
            os.close(output.fd)
        self.outputs.clear()

    def kill(self) -> None:
        """End the slot, and the call in it."""
        self.spoiled = True
        if self.handle < 0:
            return
        try:
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)
        except ProcessLookupError:
            return

    def close(self) -> None:
        """End the slot and release what it holds, except its cgroup."""
        self.kill()
        self.end_call()
        self.sock.close()
        os.close(self.handle)
        self.handle = -1  # the number may soon be another process's


def greet(sock: socket.socket, cgroup: Cgroup | None) -> int:
    """Receive the slot's process id, as this process sees it; returns a pidfd."""
    sock.settimeout(START_TIMEOUT_S)
    data, ancillary, _, _ = sock.recvmsg(1, socket.CMSG_SPACE(CREDENTIALS.size))
    if not data:
        raise OSError("it ended")
    [pid] = [
        CREDENTIALS.unpack(item)[0] for _, kind, item in ancillary if kind == socket.SCM_CREDENTIALS
    ]
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
    if cgroup is not None:
        cgroup.add(pid)
    return os.pidfd_open(pid)
