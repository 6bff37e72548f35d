"""A member of a group in a process of its own: prints the checksums that it received.

    python broadcast_member.py RANK ROUNDS MEETING     MEETING: the fields of a `Meeting`, as JSON

Rank 0 sends the tensors of `weights_of(version)` ROUNDS times, other ranks receive them. A failure
is printed too.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import torch
from torch import Tensor

from ludus.backends.ray.publication.broadcast import BroadcastFailed, Meeting, Member
from ludus.backends.ray.publication.weights import in_buckets

BUCKET_BYTES = 8 << 20


def weights_of(version: int, device: str = "cpu") -> dict[str, Tensor]:
    """Returns tensors of 24 MiB that depend on a version, in three buckets and more."""
    source = torch.Generator().manual_seed(version)
    tensors = {f"large {n}": torch.randn(1024, 1024, generator=source) for n in range(6)}
    tensors["small"] = torch.randn(3, 5, generator=source).to(torch.bfloat16)
    tensors["none"] = torch.empty(0, 4)
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def send(member: Member, serial: int, version: int) -> list[str]:
    """Broadcast the weights of a version; returns the checksums of the buckets."""
    tensors = weights_of(version, member.meeting.device)
    groups = list(in_buckets(tensors.items(), BUCKET_BYTES))
    checksums = [member.send(serial, version, n, dict(group)) for n, group in enumerate(groups)]
    member.end(serial, len(groups))
    return checksums


def main() -> None:
    rank, rounds = int(sys.argv[1]), int(sys.argv[2])
    fields = json.loads(sys.argv[3])
    meeting = Meeting(**{**fields, "names": tuple(fields["names"])})
    if meeting.device == "cuda":
        torch.cuda.set_device(rank)
    try:
        member = Member(replace(meeting, serial=1), rank)
        print("joined", flush=True)
        for serial in range(1, rounds + 1):
            if rank == 0:
                checksums = send(member, serial, serial)
            else:
                buckets, checksums = member.receive(serial, serial)
                found = {name: tensor for bucket in buckets for name, tensor in bucket.tensors()}
                for name, tensor in weights_of(serial, meeting.device).items():
                    assert torch.equal(found[name], tensor), name
            print(json.dumps(checksums), flush=True)
        member.close()
    except BroadcastFailed as error:
        print(f"failed: {error}", flush=True)


if __name__ == "__main__":
    main()
