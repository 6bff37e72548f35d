"""Texts of single tokens, with the tokenizer in a run's folder."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from ludus.store.folders import RunFolder

MAX_TOKENIZERS = 4
LONGEST = 12
"""Tokens that may spell one character together."""

Decode = Callable[[list[int]], str]


class Tokenizers:
    """The tokenizers of the runs shown last."""

    def __init__(self) -> None:
        self._found: OrderedDict[Path, Decode | None] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, folder: RunFolder | None) -> Decode | None:
        """Returns the decoder of a run; None where its folder or tokenizer is not here."""
        if folder is None or not folder.tokenizer.is_dir():
            return None
        with self._lock:
            if folder.tokenizer not in self._found:
                self._found[folder.tokenizer] = _load(folder.tokenizer)
            self._found.move_to_end(folder.tokenizer)
            while len(self._found) > MAX_TOKENIZERS:
                self._found.popitem(last=False)
            return self._found[folder.tokenizer]


def _load(folder: Path) -> Decode | None:
    """The decoder of a tokenizer's folder; None where it cannot be loaded."""
    with suppress(Exception):  # of tokenizers' reader: the page then shows the messages' texts
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
    with suppress(Exception):  # a tokenizer without tokenizer.json
        from ludus.models.chat.tokenizers import load_tokenizer

        slow = load_tokenizer(str(folder))
        return lambda ids: str(slow.decode(ids, skip_special_tokens=False))
    return None


def token_texts(decode: Decode, ids: Sequence[int]) -> list[str]:
    """Returns each token's text; their concatenation is the text of all.

    Tokens that spell one character together have the text "" but for the last of them.
    """
    texts: list[str] = []
    start = 0
    before: list[int] = []
    for end in range(1, len(ids) + 1):
        fresh = list(ids[start:end])
        text = _continued(decode, before, fresh)
        if text.endswith("�") and len(fresh) < LONGEST and end < len(ids):
            texts.append("")
            continue
        texts.append(text)
        start, before = end, fresh[-1:]
    return texts


def _continued(decode: Decode, before: list[int], fresh: list[int]) -> str:
    """The text of `fresh` after `before`: decoders strip a space at the start of a text."""
    for context in (before, []) if before else ([],):
        with suppress(OverflowError, ValueError, IndexError):  # ids that no tokenizer has
            head, whole = decode(context) if context else "", decode(context + fresh)
            if whole.startswith(head):
                return whole[len(head) :]
    return " ".join(f"[{id}]" for id in fresh)
