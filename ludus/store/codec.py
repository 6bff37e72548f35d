"""Lossless encoding of values: a value read back equals the recorded value. (In JSON, the two
halves of a surrogate pair that stand side by side are read back as the character.)

JSON.  Strict and ASCII, valid for every database and parser. A non-finite float becomes an object,
and a key that looks like such an object gets a second dollar sign:

    nan, inf, -inf     {"$float": "nan"}, {"$float": "inf"}, {"$float": "-inf"}
    {"$float": "x"}    {"$$float": "x"}

Text.  A NUL (refused by PostgreSQL) and a lone surrogate (invalid in UTF-8) become `\\u0000` and
`\\ud800`; a backslash is doubled.

Trees.  A trajectory's segments are three zlib streams (`pack_tree`): the ids of all segments in
order as little-endian int32, the logprobs of the sampled segments in order as little-endian
float64, and JSON with one list per segment (below). Advantages and entropies, where a segment has
them, are streams like the logprobs; NaN marks the tokens of a sampled segment without them.

    [parent, num_tokens, sampled, policy_version, reward, metrics, message]

`policy_version` is a list of [version, num_tokens] where several versions sampled the tokens.

The loss mask is `sampled`, repeated `num_tokens` times: a segment has loss on all tokens or none.
"""

from __future__ import annotations

import json
import math
import re
import sys
import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from ludus.core.errors import StoreError
from ludus.core.types import Constraint, Message, Segment

_UNSAFE = re.compile("[\x00\\\\\ud800-\udfff]")
_ESCAPED = re.compile(r"\\(\\|u[0-9a-f]{4})")
_COMPRESSION = 1  # about the size of level 9, in a fifth of the time
_SHORT = 4096
"""Most bytes that are compressed with a window of this size: an episode's streams are short, and
preparing zlib's usual tables takes three times as long as compressing them."""
_to_json = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def encode_json(value: Any, what: str = "the value") -> str:
    """Returns strict JSON. Errors: StoreError where JSON cannot hold a value."""
    try:
        text = _to_json(value)
        if '"$' not in text:
            return text
    except ValueError:  # a non-finite float: escape below
        pass
    except TypeError as error:
        raise StoreError(f"{what} cannot be stored as JSON: {error}") from error
    try:
        return _to_json(_escape(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"{what} cannot be stored as JSON: {error}") from error


def decode_json(text: str | bytes) -> Any:
    """Returns the value that `encode_json` encoded."""
    value = json.loads(text)
    marked = b'"$' in text if isinstance(text, bytes) else '"$' in text
    return _unescape(value) if marked else value


def _escape(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(float(value))}
    if isinstance(value, dict):
        return {
            f"${key}" if isinstance(key, str) and key.startswith("$") else key: _escape(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_escape(item) for item in value]
    return value


def _unescape(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"$float"}:
            return float(value["$float"])
        return {key.removeprefix("$"): _unescape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_unescape(item) for item in value]
    return value


def escape_text(text: str) -> str:
    """Returns text valid in every database; `unescape_text` restores the original."""
    return _UNSAFE.sub(lambda hit: "\\\\" if hit[0] == "\\" else f"\\u{ord(hit[0]):04x}", text)


def unescape_text(text: str) -> str:
    """The inverse of `escape_text`."""
    if "\\" not in text:
        return text
    return _ESCAPED.sub(lambda hit: "\\" if hit[1] == "\\" else chr(int(hit[1][1:], 16)), text)


@dataclass(frozen=True, slots=True)
class Tree:
    """A trajectory's segments as three byte strings, in the format of the module's docstring."""

    segments: bytes
    token_ids: bytes
    logprobs: bytes
    advantages: bytes | None = None
    entropies: bytes | None = None

    def columns(self) -> dict[str, bytes | None]:
        """The values by name; `dataclasses.asdict` copies them, and takes ten times as long."""
        return {name: getattr(self, name) for name in self.__slots__}


def pack_tree(segments: Sequence[Segment], what: str) -> Tree:
    """Returns the segments in stored form. `what` names the trajectory in errors."""
    heads = [
        [
            segment.parent,
            len(segment.token_ids),
            int(segment.sampled),
            segment.version_runs or segment.policy_version,
            segment.reward,
            {name: float(value) for name, value in segment.metrics.items()},
            segment.message and segment.message.to_json(),
            *_constraint(segment),
        ]
        for segment in segments
    ]
    return Tree(
        _compress(encode_json(heads, what).encode()),
        _pack("i", [segment.token_ids for segment in segments], what),
        _pack("d", [segment.logprobs for segment in segments if segment.logprobs], what),
        _pack_extra([segment.advantages for segment in segments], segments, what),
        _pack_extra([segment.entropies for segment in segments], segments, what),
    )


def _constraint(segment: Segment) -> list[list[object]]:
    """A further entry of a constrained segment's head: grammar and stop ids."""
    found = segment.constraint
    return [] if found is None else [[found.grammar, [*found.stop_token_ids]]]


def _read_constraint(stored: Sequence[Any] | None = None) -> Constraint | None:
    if stored is None:
        return None
    grammar, stop_token_ids = stored
    return Constraint(str(grammar), tuple(map(int, stop_token_ids)))


def _pack_extra(
    rows: Sequence[list[float] | None], segments: Sequence[Segment], what: str
) -> bytes | None:
    """Returns a number for each sampled token; None where no segment has any."""
    if not any(rows):
        return None
    turns = [(row, s) for row, s in zip(rows, segments, strict=True) if s.sampled]
    missing = [math.nan]
    return _pack("d", [row or missing * len(s.token_ids) for row, s in turns], what)


def unpack_tree(tree: Tree, what: str) -> list[Segment]:
    """Returns the segments of a tree. Errors: StoreError for damaged bytes."""
    try:
        heads = decode_json(zlib.decompress(tree.segments))
        token_ids = _unpack("i", tree.token_ids)
        logprobs = _unpack("d", tree.logprobs)
        advantages, entropies = _extra(tree.advantages), _extra(tree.entropies)
        segments: list[Segment] = []
        token = logprob = 0
        for parent, length, sampled, versions, reward, metrics, message, *constraint in heads:
            runs = [(v, count) for v, count in versions] if isinstance(versions, list) else None
            segments.append(
                Segment(
                    parent,
                    token_ids[token : token + length],
                    logprobs[logprob : logprob + length] if sampled else None,
                    Message.model_validate(message) if message is not None else None,
                    min(v for v, _ in runs) if runs else versions,
                    reward,
                    metrics,
                    version_runs=runs,
                    advantages=_numbers(advantages, logprob, length * sampled),
                    entropies=_numbers(entropies, logprob, length * sampled),
                    constraint=_read_constraint(*constraint),
                )
            )
            token += length
            logprob += length * sampled
        if (token, logprob) != (len(token_ids), len(logprobs)):
            raise ValueError(f"{len(token_ids)} ids and {len(logprobs)} logprobs stored")
        if any(len(extra) not in (0, logprob) for extra in (advantages, entropies)):
            raise ValueError(f"{logprob} sampled tokens, but another number of their values")
    except (ValueError, TypeError, zlib.error) as error:
        raise StoreError(
            f"{what} is damaged in the store ({error}): restore the database from a backup"
        ) from error
    return segments


def _pack(kind: Literal["i", "d"], rows: Iterable[Sequence[float]], what: str) -> bytes:
    try:
        numbers = array(kind, [*chain.from_iterable(rows)])
    except (OverflowError, TypeError) as error:
        name = "token ids are 32-bit integers" if kind == "i" else "logprobs are floats"
        raise StoreError(f"{what} cannot be stored: {name} ({error})") from error
    if sys.byteorder == "big":
        numbers.byteswap()
    return _compress(numbers.tobytes())


def _compress(data: bytes) -> bytes:
    if len(data) > _SHORT:
        return zlib.compress(data, _COMPRESSION)
    stream = zlib.compressobj(_COMPRESSION, zlib.DEFLATED, _SHORT.bit_length() - 1, 5)
    return stream.compress(data) + stream.flush()


def _extra(data: bytes | None) -> list[float]:
    return [] if data is None else _unpack("d", data)


def _numbers(values: list[float], start: int, length: int) -> list[float] | None:
    """Returns the values of a segment; None where it has none."""
    row = values[start : start + length]
    return None if not row or math.isnan(row[0]) else row


def _unpack(kind: Literal["i", "d"], data: bytes) -> list[Any]:
    numbers: array[Any] = array(kind)
    numbers.frombytes(zlib.decompress(data))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
