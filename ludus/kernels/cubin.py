"""A cubin's sections: what ptxas does not print.

A cubin is an ELF file. `.text.<symbol>` is a kernel's code, `.nv.constant3` the `__constant__`
variables of the whole module, `.nv.info.<symbol>` a list of attributes. The file comes from the
sandbox: all of its numbers are checked before they are used.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from ludus.core.errors import DataError

SECTION = struct.Struct("<IIQQQQIIQQ")
NO_BITS, SYMBOLS = 8, 2
MAX_THREADS, PARAMETER_BYTES = 0x05, 0x19
"""Attributes: the threads of a block that `__launch_bounds__` allows; size of the parameters."""
WITH_DATA = 4


@dataclass(frozen=True, slots=True)
class CubinKernel:
    """A kernel of a cubin. `max_threads` of a block, by its launch bounds; None: not bounded."""

    symbol: str
    parameter_bytes: int
    max_threads: int | None


@dataclass(frozen=True, slots=True)
class Cubin:
    """The kernels of a cubin, and the bytes of its `__constant__` variables."""

    kernels: tuple[CubinKernel, ...]
    constant_bytes: int


def read_cubin(data: bytes) -> Cubin:
    """Read a cubin.

    Errors: DataError for bytes that are none.
    """
    try:
        return _read(data)
    except (struct.error, ValueError, IndexError, OverflowError) as error:
        raise DataError(f"not a cubin: {error}") from None


def variable(data: bytes, name: str) -> bytes:
    """The initial value of a `__device__` variable of a cubin.

    Errors: DataError for a variable that it lacks.
    """
    try:
        headers = _headers(data)
        for header in headers:
            if header[1] != SYMBOLS:
                continue
            texts = headers[header[6]][4]
            for at in range(header[4], header[4] + header[5], 24):
                text, _, _, section, value, size = struct.unpack_from("<IBBHQQ", data, at)
                end = data.index(b"\0", texts + text)
                if data[texts + text : end] == name.encode() and 0 < section < len(headers):
                    start = headers[section][4] + value
                    return data[start : start + size]
    except (struct.error, ValueError, IndexError, OverflowError) as error:
        raise DataError(f"not a cubin: {error}") from None
    raise DataError(f"the cubin has no variable {name}")


def _headers(data: bytes) -> list[tuple[int, ...]]:
    if data[:5] != b"\x7fELF\x02":
        raise ValueError("it does not begin as a 64-bit ELF file")
    [offset] = struct.unpack_from("<Q", data, 40)
    size, number = struct.unpack_from("<HH", data, 58)
    if size != SECTION.size:
        raise ValueError(f"sections of {size} bytes")
    return [SECTION.unpack_from(data, offset + size * index) for index in range(number)]


def _read(data: bytes) -> Cubin:
    headers = _headers(data)
    [names_at] = struct.unpack_from("<H", data, 62)
    names = headers[names_at][4]
    sections: dict[str, bytes] = {}
    for header in headers:
        start, length = header[4], header[5]
        if header[1] != NO_BITS and start + length > len(data):
            raise ValueError("a section beyond its end")
        end = data.index(b"\0", names + header[0])
        name = data[names + header[0] : end].decode("utf-8", "replace")
        sections[name] = b"" if header[1] == NO_BITS else data[start : start + length]
    kernels = [
        _kernel(name.removeprefix(".text."), sections) for name in sections if name[:6] == ".text."
    ]
    return Cubin(tuple(kernels), len(sections.get(".nv.constant3", b"")))


def _kernel(symbol: str, sections: dict[str, bytes]) -> CubinKernel:
    parameters, threads = 0, None
    for attribute, value, payload in _attributes(sections.get(f".nv.info.{symbol}", b"")):
        if attribute == PARAMETER_BYTES:
            parameters = value
        elif attribute == MAX_THREADS:
            x, y, z = struct.unpack("<III", payload)
            threads = x * y * z
    return CubinKernel(symbol, parameters, threads)


def _attributes(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Number, value and payload; an attribute with a payload has its length as value."""
    place = 0
    while place < len(data):
        form, attribute, value = struct.unpack_from("<BBH", data, place)
        place += 4
        payload = b""
        if form == WITH_DATA:
            payload = data[place : place + value]
            place += value
        yield attribute, value, payload


def readable(symbol: str) -> str:
    """The name in a mangled symbol, without arguments and template arguments.

    `_ZN2ns4tileILi64EEEvPf` is `ns::tile`; what is not understood stays as it is.
    """
    if not symbol.startswith("_Z"):
        return symbol
    rest, parts = re.sub(r"^(L|NK?)", "", symbol[2:]), []
    while match := re.match(r"L?(\d{1,4})", rest):
        start = match.end()
        parts.append(rest[start : start + int(match[1])])
        rest = rest[start + int(match[1]) :]
        if symbol[2] != "N":
            break
    return "::".join(parts) or symbol
