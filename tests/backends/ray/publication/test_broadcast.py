"""Broadcasts of weights without a cluster: threads and processes as members of a group."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs the extra ray")

import broadcast_member
import torch
from broadcast_member import send, weights_of
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ludus.backends.ray.publication.broadcast import (
    ENDED,
    BroadcastFailed,
    Meeting,
    Member,
    joined,
)
from ludus.backends.ray.publication.weights import word_sums

HOST = "127.0.0.1"
SCRIPT = Path(broadcast_member.__file__)


class Group:
    """The driver's part: a store, and one group of `size` members in it."""

    def __init__(self, size: int, timeout_s: float, device: str = "cpu") -> None:
        self.store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        names = ("learner rank 0", *(f"sampler {n}" for n in range(size - 1)))
        self.meeting = Meeting(1, 1, HOST, self.store.port, names, device, timeout_s)

    def end(self, reason: str) -> None:
        PrefixStore("group 1", self.store).set(ENDED, reason)

    def start(self, rank: int, rounds: int = 1) -> subprocess.Popen[str]:
        """A member in a process."""
        arguments = [str(rank), str(rounds), json.dumps(asdict(self.meeting))]
        return subprocess.Popen(
            [sys.executable, SCRIPT, *arguments], stdout=subprocess.PIPE, text=True
        )


@contextmanager
def members(size: int, timeout_s: float = 20.0) -> Iterator[tuple[Group, list[Member]]]:
    """All members of a group, made by as many threads."""
    group = Group(size, timeout_s)
    with ThreadPoolExecutor(size) as pool:
        made = list(pool.map(lambda rank: Member(group.meeting, rank), range(size)))
    yield group, made
    for member in made:
        member.close()


def at_once(*works: Callable[[], Any]) -> list[Any]:
    """Results of calls in as many threads; a BroadcastFailed is a result."""

    def caught(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except BroadcastFailed as error:
            return error

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(caught, works))


def test_every_bit_arrives_again_and_again() -> None:
    def publish(sender: Member, receivers: list[Member], serial: int, version: int) -> None:
        works = [partial(receiver.receive, serial, version) for receiver in receivers]
        sent, *received = at_once(partial(send, sender, serial, version), *works)
        assert len(sent) == 4
        for buckets, checksums in received:
            assert checksums == sent
            found = {name: tensor for bucket in buckets for name, tensor in bucket.tensors()}
            for name, tensor in weights_of(version).items():
                assert found[name].dtype == tensor.dtype
                assert torch.equal(found[name], tensor)

    with members(3) as (_, (sender, *receivers)):
        for serial, version in ((1, 7), (2, 8), (5, 3)):
            publish(sender, receivers, serial, version)


def test_a_member_serves_until_the_group_changes() -> None:
    with members(2) as (group, made):
        assert joined(made[0], group.meeting, 0) is made[0]


def test_absent_members_are_named() -> None:
    group = Group(4, timeout_s=0.5)
    found = at_once(*(partial(Member, group.meeting, rank) for rank in (0, 2)))
    assert {str(error) for error in found} == {"sampler 0, sampler 2 did not come within 0.5 s"}


def test_no_store() -> None:
    group = Group(2, timeout_s=0.5)
    with pytest.raises(BroadcastFailed, match=r"sampler 0: the driver's store does not answer"):
        Member(Meeting(1, 1, HOST, 9, group.meeting.names, "cpu", 0.5), 1)


def test_a_silent_sender_is_named() -> None:
    words = r"^learner rank 0 sent no bucket within 1 s$"
    with members(2, timeout_s=0.5) as (_, made), pytest.raises(BroadcastFailed, match=words):
        made[1].receive(1, 1)


def test_a_receiver_that_stops_is_named() -> None:
    with members(3, timeout_s=0.5) as (_, (sender, receiver, _)):
        outcomes = at_once(lambda: send(sender, 1, 1), lambda: receiver.receive(1, 1))
    reasons = {str(o) for o in outcomes if isinstance(o, BroadcastFailed)}
    assert len(reasons) == 1
    assert "sampler 1" in reasons.pop()


def test_the_driver_ends_a_group_at_once() -> None:
    with members(2, timeout_s=600) as (group, (_, receiver)):
        threading.Timer(0.3, group.end, ["sampler 5 has died"]).start()
        with pytest.raises(BroadcastFailed, match=r"^sampler 5 has died$"):
            receiver.receive(1, 1)


def test_other_weights_than_expected_are_refused() -> None:
    with members(2) as (_, (sender, receiver)):
        sent, received = at_once(lambda: send(sender, 1, 4), lambda: receiver.receive(1, 5))
    assert str(received) == "weights 4 came, not 5"
    assert isinstance(sent, BroadcastFailed)


class Liar(Member):
    """Announces another checksum than that of the bytes it sends."""

    def _announce(self, serial: int, index: int, header: Any) -> None:
        if header is not None and index == 1:
            header[1] = header[1][::-1]
        super()._announce(serial, index, header)


def test_damaged_weights_are_refused() -> None:
    group = Group(2, timeout_s=20)
    sender, receiver = at_once(lambda: Liar(group.meeting, 0), lambda: Member(group.meeting, 1))
    _, received = at_once(lambda: send(sender, 1, 6), lambda: receiver.receive(1, 6))
    assert str(received).startswith("sampler 0: weights 6 arrived damaged")


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_group() -> None:
    """In a broadcast of 24 MiB, which no socket's buffer holds. Long before the deadline."""
    group = Group(3, timeout_s=120)
    victim = group.start(1)
    sender, receiver = at_once(lambda: Member(group.meeting, 0), lambda: Member(group.meeting, 2))
    assert victim.stdout is not None
    assert victim.stdout.readline() == "joined\n"
    os.kill(victim.pid, signal.SIGSTOP)
    threading.Timer(1.0, victim.kill).start()
    began = time.monotonic()
    outcomes = at_once(lambda: send(sender, 1, 1), lambda: receiver.receive(1, 1))
    assert any(isinstance(outcome, BroadcastFailed) for outcome in outcomes)
    assert time.monotonic() - began < 60  # a guard: half of the deadline
    victim.wait()
    victim.stdout.close()


@pytest.mark.gpu
def test_nccl_brings_every_bit() -> None:
    """Two processes, each with a GPU of its own, three publications."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    group = Group(2, timeout_s=120, device="cuda")
    processes = [group.start(rank, rounds=3) for rank in range(2)]
    sent, received = (process.communicate(timeout=250)[0] for process in processes)
    assert sent == received
    assert sent.startswith("joined\n")
    assert len(sent.splitlines()) == 4


@pytest.mark.gpu
def test_two_members_on_one_gpu_are_refused() -> None:
    group = Group(2, timeout_s=60, device="cuda")
    outcomes = at_once(*(partial(Member, group.meeting, rank) for rank in range(2)))
    words = "learner rank 0 and sampler 0 share a GPU, which NCCL refuses"
    assert {str(outcome) for outcome in outcomes} == {words}


def test_word_sums_are_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ludus.backends.ray.publication.weights.CHUNK", 100)
    source = random.Random(1)
    words = [source.getrandbits(64) for _ in range(1000)]

    def sums(words: list[int]) -> bytes:
        raw = b"".join(word.to_bytes(8, "little") for word in words)
        return word_sums(torch.frombuffer(bytearray(raw), dtype=torch.uint8))

    def expected(words: list[int]) -> bytes:
        weighted = sum(word * (2 * i + 1) for i, word in enumerate(words))
        return b"".join((n % 2**64).to_bytes(8, "little") for n in (sum(words), weighted))

    assert sums(words) == expected(words)
    for index in (0, 99, 100, 999):
        for bit in (0, 63):
            changed = list(words)
            changed[index] ^= 1 << bit
            assert sums(changed) == expected(changed) != sums(words)
    changed = list(words)
    changed[3], changed[200] = words[200], words[3]
    assert sums(changed) != sums(words)


@pytest.mark.gpu
def test_word_sums_of_a_gpu_are_those_of_the_cpu() -> None:
    data = torch.randint(0, 256, (1 << 26,), dtype=torch.uint8)
    assert word_sums(data) == word_sums(data.to("cuda"))
