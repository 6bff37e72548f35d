"""Seeds: every random stream derives its seed from the run's seed and a name.

There is no global random state, so a step's random numbers do not depend on earlier steps, and a
resumed run draws the same numbers as an uninterrupted run.
"""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *parts: str | int) -> int:
    """A 63-bit seed for the stream named by `parts`; the same on every platform."""
    text = "/".join([str(seed), *map(str, parts)])
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
