"""A process that compiles one grammar: `python grammar_probe.py MEGABYTES SECONDS < GRAMMAR`.

A schema of 1 KB can take llguidance minutes and many gigabytes, or abort its process. Here it may;
the caller reads the end. Then some values are written, byte by byte, as far as `STEPS`: some
grammars fail after their first bytes only. Exit code 3: the grammar fails, with the reason.
"""

from __future__ import annotations

import resource
import sys
from typing import Any

STEPS = 64
SPECIAL = (b"<end>", b"<tool_call>", b"</tool_call>")


class Bytes:
    """A tokenizer of single bytes, and of special tokens."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([i]) for i in range(256)), *SPECIAL)
    special_token_ids = (256, 257, 258)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def walk(matcher: Any, size: int, preferred: bytes) -> str:
    """Write a value; returns the reason where it fails, or an empty text."""
    for _ in range(STEPS):
        if matcher.is_stopped():
            return str(matcher.get_error() or "")
        bits = bytearray(matcher.compute_bitmask())
        allowed = [i for i in range(size) if bits[i // 8] >> i % 8 & 1 and i != 256]
        if error := matcher.get_error():
            return str(error)
        if not allowed:
            return "" if matcher.is_accepting() else "no value follows it"
        chosen = next((byte for byte in preferred if byte in allowed), allowed[0])
        matcher.consume_token(chosen)
    return str(matcher.get_error() or "")


def main() -> int:
    """Returns the exit code."""
    megabytes, seconds = int(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    tokenizer = LLTokenizer(TokenizerWrapper(Bytes()))
    compiled = LLMatcher(tokenizer, sys.stdin.read(), log_level=0)
    error = compiled.get_error()
    for preferred in (b"", b'{"}', b'"}]', b"<"):
        error = error or walk(compiled.deep_copy(), tokenizer.vocab_size, preferred)
    sys.stdout.write(error)
    return 3 if error else 0


if __name__ == "__main__":
    sys.exit(main())
