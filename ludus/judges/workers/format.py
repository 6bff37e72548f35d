"""Worker process of the judge `format`: a user's pattern on untrusted text may backtrack."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from ludus.judges.workers.pool import Record, serve


def prepare() -> Callable[[Record], Iterable[Record]]:
    """Returns the function that matches."""

    def match(request: Record) -> Iterable[Record]:
        found = re.fullmatch(request["pattern"], request["text"], re.DOTALL)
        yield {"matches": found is not None}

    return match


if __name__ == "__main__":
    serve(prepare)
