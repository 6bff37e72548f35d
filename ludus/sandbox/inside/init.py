"""Process 1 of a call: sets up its namespaces, runs its programs, watches their time."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import stat
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from ludus.sandbox.inside import kernel
from ludus.sandbox.inside.frames import receive_frame, send_frame
from ludus.sandbox.inside.program import start_program

INODES_PER_MB = 256
BAD_FILES = {
    errno.EACCES, errno.EEXIST, errno.EFBIG, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG,
    errno.ENOSPC, errno.ENOTDIR,
}  # fmt: skip
"""Errors of writing a call's files for which its caller is to blame."""
POLL_S = 0.005
"""Seconds between looks at a program where the kernel has no pidfd: gVisor's in older versions."""


class _BadFileError(Exception):
    """A file of the call cannot be written."""


class Init:
    """Process 1 of a call. The program can neither signal it nor read its memory.

    Args:
        sock: the slot's connection to the host.
        outputs: the pipes for stdout and stderr.
        folder: the working folder without isolation.
    """

    def __init__(
        self,
        sock: socket.socket,
        outputs: Sequence[int],
        settings: Mapping[str, Any],
        folder: str | None,
    ) -> None:
        self.sock, self.settings, self.isolated = sock, settings, settings["isolated"]
        self.stdout, self.stderr = outputs
        self.work = folder or "/work"
        self._children: list[int] = []

    def run(self, job: Mapping[str, Any], blobs: Sequence[bytes]) -> NoReturn:
        """Serve one call, or those of a session; then end, and all processes here with it."""
        try:
            kernel.libc.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # the kernel keeps it from process 1
            if self.isolated:
                self.enter(job["disk_mb"])
            if forward := self.settings.get("forward"):
                self._start_forwarder(forward["port"], forward["socket"])
            os.chdir(self.work)
            if job["session"]:
                self._session(job, blobs)
            else:
                self._call(job, blobs)
        except _BadFileError as error:
            self._send({"event": "result", "refused": str(error)})
        except BaseException as error:
            self._send({"event": "result", "error": f"{type(error).__name__}: {error}"})
        finally:
            self._kill_all()
            os._exit(0)

    def enter(self, disk_mb: int) -> None:
        """Set up the namespaces, then give up the capabilities that this needs."""
        uid, gid = self.settings["uid"], self.settings["gid"]
        maps = {"uid_map": f"{uid} {uid} 1", "setgroups": "deny", "gid_map": f"{gid} {gid} 1"}
        for name, text in maps.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        quiet = kernel.MS_NOSUID | kernel.MS_NODEV
        kernel.mount("", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
        self._mount_work(f"size={disk_mb}m,nr_inodes={1000 + INODES_PER_MB * disk_mb},mode=755")
        quiet |= kernel.MS_NOEXEC
        kernel.mount("proc", "/proc", "proc", quiet)
        kernel.mount("/proc/sys", "/proc/sys", "", kernel.MS_BIND | kernel.MS_REC)
        read_only = kernel.MS_BIND | kernel.MS_REMOUNT | kernel.MS_RDONLY
        kernel.mount("", "/proc/sys", "", read_only | quiet)
        no_new_privs = kernel.libc.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        kernel.check(no_new_privs, "no_new_privs")
        if self.settings.get("forward"):
            kernel.loopback_up()
        kernel.drop_capabilities()
        kernel.libc.prctl(kernel.PR_SET_DUMPABLE, 0, 0, 0, 0)

    def _start_forwarder(self, port: int, target: str) -> None:
        from ludus.sandbox.inside.forward import listen, serve  # the zygote has loaded it

        listening = listen(port)
        if os.fork() == 0:
            for fd in (self.sock.fileno(), self.stdout, self.stderr):
                os.close(fd)
            serve(listening, target)
        listening.close()

    def _mount_work(self, options: str) -> None:
        """Mount one small file system in memory as /work, /tmp and /dev/shm."""
        kernel.mount("tmpfs", "/work", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
        for name, target in (("tmp", "/tmp"), ("shm", "/dev/shm"), ("work", "/work")):
            os.mkdir(os.path.join("/work", name))
            kernel.mount(os.path.join("/work", name), target, "", kernel.MS_BIND)

    def _send(self, header: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> None:
        try:
            send_frame(self.sock, header, blobs)
        except OSError:
            os._exit(1)  # the host is gone: the kernel ends all processes of this namespace

    def _kill_all(self) -> None:
        """End all processes but this one."""
        if self.isolated:
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        for pid in [] if self.isolated else self._children:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, 0) != (0, 0):
                continue

    # One call

    def _call(self, job: Mapping[str, Any], blobs: Sequence[bytes]) -> None:
        self._write_files(job, blobs)
        compile_seconds = None
        if job["compile"]:
            log, began = os.memfd_create("compiler"), time.monotonic()
            limits = {**job, "memory_mb": max(job["memory_mb"], job["compile_memory_mb"])}
            status = self._run(limits, job["compile"], job["compile_s"], (0, log, log))
            compile_seconds = time.monotonic() - began
            if status != {"how": "exit", "exit": 0}:
                failed = {"compile_failed": True, "compile_seconds": compile_seconds, **status}
                text = os.pread(log, job["output_bytes"], 0)
                return self._send({"event": "result", "seconds": 0.0, **failed}, [text])
            os.close(log)
        stdin = os.memfd_create("stdin")
        with open(os.dup(stdin), "wb") as file:
            file.write(blobs[0])
        os.lseek(stdin, 0, os.SEEK_SET)
        began = time.monotonic()
        status = self._run(job, job["run"], job["run_s"], (stdin, self.stdout, self.stderr))
        self._report(job, {**status, "compile_seconds": compile_seconds}, began)
        return None

    def _report(self, job: Mapping[str, Any], status: Mapping[str, Any], began: float) -> None:
        seconds = time.monotonic() - began
        found: dict[str, bytes] = {}
        left, too_much = job["disk_mb"] << 20, False  # links and holes can name more than that
        for name in job["fetch"]:
            data = self._read_file(name, left + 1)
            if data is not None and len(data) <= left:
                found[name] = data
                left -= len(data)
            too_much |= data is not None and name not in found
        header = {"event": "result", "seconds": seconds, "names": list(found), **status}
        self._send({**header, "too_much": too_much}, list(found.values()))

    def _write_files(self, job: Mapping[str, Any], blobs: Sequence[bytes]) -> None:
        for name, data in zip(job["files"], blobs[1:], strict=True):
            path = os.path.join(self.work, name)
            try:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "wb") as file:
                    file.write(data)
            except OSError as error:
                if error.errno not in BAD_FILES:
                    raise
                raise _BadFileError(
                    f"files.{name:.100}: {error.strerror}: the files of a call need paths that do "
                    f"not lie in each other, names of at most 255 bytes, and {job['disk_mb']} MB "
                    "at most for all"
                ) from None

    def _read_file(self, name: str, max_bytes: int) -> bytes | None:
        """Returns a regular file's content, cut off; None for anything else."""
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
        try:
            with open(os.open(os.path.join(self.work, name), flags), "rb") as file:
                regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
                return file.read(max_bytes) if regular else None
        except OSError:
            return None

    def _run(
        self,
        job: Mapping[str, Any],
        command: Sequence[str],
        seconds: float,
        streams: tuple[int, int, int],
    ) -> dict[str, Any]:
        """Run a command, or without one the Python code; returns how it ended."""
        pid = os.fork()
        if pid == 0:
            start_program(self.settings, self.work, job, command, streams)
        self._children.append(pid)
        return self._wait(pid, seconds)

    def _wait(
        self, pid: int, seconds: float, channel: socket.socket | None = None
    ) -> dict[str, Any]:
        """Wait for a program's end, for its answer on `channel`, or for the limit."""
        handle, deadline = kernel.open_process(pid), time.monotonic() + seconds
        status: dict[str, Any] = {"how": "time", "exit": None}
        handles = [] if handle is None else [handle]
        watched: list[Any] = [*handles, self.sock, *([channel] if channel else [])]
        try:
            while (left := deadline - time.monotonic()) > 0:
                ready = select.select(watched, [], [], left if handles else min(left, POLL_S))[0]
                if channel in ready and channel is not None and (answer := channel.recv(1)):
                    return {"how": "answer", "exit": int(answer != b"0")}
                if handle in ready or not handles:
                    found, code = os.waitpid(pid, os.WNOHANG)
                    if found:
                        status = {"how": "exit", "exit": os.waitstatus_to_exitcode(code)}
                        break
                if self.sock in ready:  # the host asks for the end, or is gone
                    if receive_frame(self.sock) is None:
                        os._exit(1)
                    status = {"how": "output", "exit": None}
                    break
        finally:
            for number in handles:
                os.close(number)
        self._kill_all()
        return status

    # A session

    def _session(self, job: Mapping[str, Any], blobs: Sequence[bytes]) -> None:
        channel, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            streams = (os.open(os.devnull, os.O_RDONLY), self.stdout, self.stderr)
            start_program(self.settings, self.work, job, (), streams, theirs.detach())
        self._children.append(pid)
        theirs.close()
        while True:
            self._write_files(job, blobs)
            began = time.monotonic()
            with suppress(OSError):  # a program that ended: seen below
                channel.sendall(struct.pack("=I", len(blobs[0])) + blobs[0])
            status = self._wait(pid, job["run_s"], channel)
            self._report(job, status, began)
            frame = receive_frame(self.sock) if status["how"] == "answer" else None
            if frame is None:
                return
            job, blobs = frame
