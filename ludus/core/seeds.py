"""One seed for everything: each random stream derives its own from the run's seed and a name.

No global random state is used, so what a step draws does not depend on what ran before it, and a
resumed run draws what the uninterrupted one would have drawn.
"""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *parts: str | int) -> int:
    """A 63-bit seed for the stream that `parts` name; the same on every platform."""
    text = "/".join([str(seed), *map(str, parts)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
