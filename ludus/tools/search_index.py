"""An index over documents (BM25, by bm25s), kept in a cache folder.

    ~/.cache/ludus/search/1f0c.../    index files, passages.json

The folder's name is a hash of the documents and of what the index depends on: changed documents get
a new index, and several runs share one. Words are compared in lower case, without endings removed,
in any language that separates words by spaces. Ties are in the documents' order.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import bm25s
import numpy as np

from ludus.core.errors import DataError
from ludus.core.files import atomic_folder
from ludus.telemetry.logs import get_logger
from ludus.tools.passages import Passage

log = get_logger(__name__)

SUFFIXES = (".txt", ".md")
PASSAGE_CHARS = 1_500
"""Documents are cut at paragraphs into passages of about this length."""

VERSION = f"1 {bm25s.__version__} {PASSAGE_CHARS}"
PASSAGES = "passages.json"
TEXT_FIELDS = ("text", "contents", "content")
_WORD = re.compile(r"\w+")


class SearchIndex:
    """Passages, and the index of their words."""

    def __init__(self, passages: list[Passage], index: bm25s.BM25) -> None:
        self.passages, self._index = passages, index

    def find(self, query: str, top_k: int) -> list[Passage]:
        """The passages that share a word with the query, best first."""
        vocabulary = self._index.vocab_dict
        words = [word for word in _WORD.findall(query.lower()) if word in vocabulary]
        if not words:
            return []
        scores = self._index.get_scores(words)
        matches = np.flatnonzero(scores > 0)
        best = matches[np.argsort(-scores[matches], kind="stable")[:top_k]]
        return [self.passages[i] for i in best]

    def save(self, folder: Path) -> None:
        """Write the index's files and the passages. Errors: OSError."""
        self._index.save(folder, show_progress=False)
        rows = [[passage.title, passage.text] for passage in self.passages]
        (folder / PASSAGES).write_text(json.dumps(rows), encoding="utf-8")


def load_index(path: Path) -> SearchIndex:
    """The index of a folder or a file, from the cache if it is there.

    Errors: DataError for documents that are missing, empty, or not in UTF-8 or JSON.
    """
    files = _files(path)
    folder = _cache_root() / _digest(path, files)
    if folder.is_dir():
        try:
            return _read(folder)
        except Exception as error:  # of bm25s, numpy, json: a damaged file
            log.warning("the cached search index is damaged", folder=str(folder), error=str(error))
    passages = [passage for file in files for passage in _passages(path, file)]
    if not any(_WORD.search(passage.text) for passage in passages):
        raise DataError(f"search: {path} contains no text")
    built = build_index(passages)
    try:
        with atomic_folder(folder) as temporary:
            built.save(temporary)
    except OSError as error:  # a read-only home: the index is built at each start
        log.warning("the search index cannot be cached", folder=str(folder), error=str(error))
    return built


def build_index(passages: list[Passage]) -> SearchIndex:
    """An index of passages, in memory."""
    vocabulary: dict[str, int] = {}
    ids = [
        [
            vocabulary.setdefault(word, len(vocabulary))
            for word in _WORD.findall(f"{passage.title} {passage.text}".lower())
        ]
        for passage in passages
    ]
    index = bm25s.BM25()
    index.index((ids, vocabulary), show_progress=False)
    return SearchIndex(passages, index)


def _read(folder: Path) -> SearchIndex:
    index = bm25s.BM25.load(folder, mmap=True, show_progress=False)
    rows = json.loads((folder / PASSAGES).read_text(encoding="utf-8"))
    passages = [Passage(title, text) for title, text in rows]
    if index.scores["num_docs"] != len(passages):
        raise ValueError(f"{index.scores['num_docs']} indexed, {len(passages)} stored")
    return SearchIndex(passages, index)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"search: there is no file or folder {path}")
    found = (file for file in path.rglob("*") if file.is_file() and file.suffix in SUFFIXES)
    files = sorted(found, key=lambda file: file.relative_to(path).parts)
    if not files:
        raise DataError(f"search: {path} has no {' or '.join(SUFFIXES)} files")
    return files


def _digest(root: Path, files: list[Path]) -> str:
    digest = hashlib.sha256(VERSION.encode())
    for file in files:
        name = file.name if file == root else str(file.relative_to(root))
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(f"\0{name}\0{content}".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


def _passages(root: Path, file: Path) -> Iterator[Passage]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"search: {file} is not UTF-8 ({error})") from None
    if file != root or file.suffix != ".jsonl":
        title = file.stem if file == root else str(file.relative_to(root).with_suffix(""))
        yield from (Passage(title, part) for part in _parts(text))
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield from _row(f"search: {file}, line {number}", line)


def _row(where: str, line: str) -> Iterator[Passage]:
    """Errors: DataError where a line has no text."""
    try:
        row = json.loads(line)
    except (RecursionError, ValueError) as error:
        raise DataError(f"{where}: not JSON ({error})") from None
    fields = [name for name in TEXT_FIELDS if isinstance(row, dict) and name in row]
    if not fields or not isinstance(row[fields[0]], str):
        raise DataError(f'{where}: not of the form {{"title": ..., "text": ...}}')
    title, text = str(row.get("title") or ""), row[fields[0]]
    if fields[0] == "contents" and not title and "\n" in text:  # Search-R1's corpora
        title, _, text = text.partition("\n")
    yield from (Passage(title.strip('" '), part) for part in _parts(text))


def _parts(text: str) -> Iterator[str]:
    """A text in parts of about PASSAGE_CHARS, cut between paragraphs, else between words."""
    part = ""
    for paragraph in re.split(r"\n\s*\n", text):
        for piece in _pieces(paragraph.strip()):
            if part and len(part) + len(piece) > PASSAGE_CHARS:
                yield part
                part = ""
            part = f"{part}\n\n{piece}" if part else piece
    if part:
        yield part


def _pieces(paragraph: str) -> Iterator[str]:
    while len(paragraph) > PASSAGE_CHARS:
        cut = paragraph.rfind(" ", PASSAGE_CHARS // 2, PASSAGE_CHARS)
        cut = cut if cut > 0 else PASSAGE_CHARS
        yield paragraph[:cut]
        paragraph = paragraph[cut:].lstrip()
    if paragraph:
        yield paragraph


def _cache_root() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "ludus" / "search"
