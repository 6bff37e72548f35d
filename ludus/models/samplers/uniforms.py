"""Random numbers of turns: a turn's seed alone determines them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ludus.models.decoders.native import Unavailable, library


def fill_uniforms(seed: int, row_W: NDArray[np.float64]) -> None:
    """Fill a contiguous row with the first numbers of numpy's `Generator(Philox(seed)).random()`.

    Native code takes 2 microseconds; numpy takes 20, mostly to set up its objects.

    Errors: ValueError for a negative seed.
    """
    native = _native() if 0 <= seed < 2**64 else None
    if native is None:
        row_W[:] = np.random.Generator(np.random.Philox(seed)).random(len(row_W))
    else:
        native(seed, len(row_W), row_W.ctypes.data)


@functools.cache
def _native() -> Callable[[int, int, int], None] | None:
    try:
        function: Any = library().ludus_uniforms
    except Unavailable:
        return None
    function.argtypes = [ctypes.c_uint64, ctypes.c_long, ctypes.c_void_p]
    function.restype = None
    return function  # type: ignore[no-any-return]
