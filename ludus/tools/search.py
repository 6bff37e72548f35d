"""Search: a local index over the user's documents, or a search server by URL.

    {name: search, args: {path: documents}}         a folder of text files
    {name: search, args: {path: documents.jsonl}}   {"title": ..., "text": ...} a line
    {name: search, args: {url: "http://127.0.0.1:8000/retrieve"}}

A search server speaks the protocol of Search-R1's retriever, which verl-tool uses too:

    POST {"queries": ["tallest mountain"], "topk": 3, "return_scores": true}
    -> {"result": [[{"document": {"contents": "\\"Everest\\"\\nMount Everest ..."}, "score": 9.1}]]}
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from ludus.core.errors import ConfigError, ToolError, first_fault
from ludus.core.modules import require
from ludus.core.types import ToolCall, ToolSpec
from ludus.tools.base import Tool, ToolResult
from ludus.tools.passages import Passage, snippet

if TYPE_CHECKING:
    from ludus.tools.search_index import SearchIndex

DESCRIPTION = "Search the documents for words; returns the passages that fit best."
NOTHING = "No document contains any of these words."
SEARCHING = "search over local documents"
MAX_QUERY_CHARS = 2_000


def search(
    path: Annotated[
        Path | None, Field(description="A folder of text files (.txt, .md), or a .jsonl file.")
    ] = None,
    url: Annotated[
        str | None, Field(description="In place of `path`: the address of a search server.")
    ] = None,
    top_k: Annotated[int, Field(ge=1, le=100, description="Passages of an answer.")] = 3,
    snippet_chars: Annotated[
        int, Field(ge=50, description="Characters that are shown of a passage.")
    ] = 600,
    name: Annotated[str, Field(description="The function's name for the model.")] = "search",
    description: Annotated[
        str, Field(description="What it searches, for the model.")
    ] = DESCRIPTION,
    deadline_s: Annotated[
        float, Field(gt=0, description="With `url`: seconds of a call, retries included.")
    ] = 30.0,
    max_in_flight: Annotated[
        int, Field(ge=1, description="With `url`: calls at the same time.")
    ] = 64,
    token_env: Annotated[
        str | None, Field(description="With `url`: environment variable with its token.")
    ] = None,
) -> Tool:
    """The search tool. Errors: ConfigError, DataError, MissingDependency."""
    if (path is None) == (url is None):
        raise ConfigError("search: give either `path` (your documents) or `url` (a server)")
    source: _Local | _Remote
    if path is not None:
        require("bm25s", "tools", SEARCHING)
        from ludus.tools.search_index import load_index

        source = _Local(load_index(path.expanduser()))
    else:
        source = _Remote(str(url), deadline_s, max_in_flight, token_env)
    return Search(source, _spec(name, description), top_k, snippet_chars)


def search_in(
    passages: Sequence[Passage],
    *,
    top_k: int = 3,
    snippet_chars: int = 600,
    name: str = "search",
    description: str = DESCRIPTION,
) -> Tool:
    """The search tool over passages in memory. Errors: MissingDependency."""
    require("bm25s", "tools", SEARCHING)
    from ludus.tools.search_index import build_index

    index = _Local(build_index(list(passages)))
    return Search(index, _spec(name, description), top_k, snippet_chars)


def _spec(name: str, description: str) -> ToolSpec:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "What to look for."}},
        "required": ["query"],
        "additionalProperties": False,
    }
    return ToolSpec(name=name, description=description, parameters=schema)


class Search(Tool):
    """A function `search(query)` over a source of passages."""

    def __init__(
        self, source: _Local | _Remote, spec: ToolSpec, top_k: int, snippet_chars: int
    ) -> None:
        self._source, self._spec = source, spec
        self._top_k, self._snippet_chars = top_k, snippet_chars

    async def specs(self) -> Sequence[ToolSpec]:
        return [self._spec]

    async def call(self, call: ToolCall, episode: str) -> ToolResult:
        query = call.arguments["query"].strip()
        if not query or len(query) > MAX_QUERY_CHARS:
            wanted = f"give 1 to {MAX_QUERY_CHARS} characters, not {len(query)}"
            return ToolResult(content=f"{call.name}: query: {wanted}", failed=True)
        found = await self._source.find(query, self._top_k)
        if isinstance(found, str):
            return ToolResult(content=f"{call.name}: {found}", failed=True)
        shown = [self._shown(number, one, query) for number, one in enumerate(found, start=1)]
        return ToolResult(content="\n\n".join(shown) or NOTHING)

    async def close(self) -> None:
        await self._source.close()

    def _shown(self, number: int, passage: Passage, query: str) -> str:
        text = snippet(passage.text, query, self._snippet_chars)
        return f"[{number}] {passage.title}\n{text}".replace(" \n", "\n", 1)


class _Local:
    """Passages of the user's documents."""

    def __init__(self, index: SearchIndex) -> None:
        self._index = index

    async def find(self, query: str, top_k: int) -> list[Passage] | str:
        return await asyncio.to_thread(self._index.find, query, top_k)

    async def close(self) -> None:
        """Nothing to release."""


class _Document(BaseModel):
    contents: str | None = None
    title: str | None = None
    text: str | None = None

    def passage(self) -> Passage:
        """Search-R1's `contents` has the title in its first line."""
        if self.contents is None:
            return Passage(self.title or "", self.text or "")
        title, _, text = self.contents.partition("\n")
        return Passage(title.strip('" '), text) if text else Passage("", title)


class _Hit(_Document):
    document: _Document | None = None


class _Retrieved(BaseModel):
    result: list[list[_Hit]] = Field(min_length=1, max_length=1)


class _Remote:
    """Passages of a search server."""

    def __init__(
        self, url: str, deadline_s: float, max_in_flight: int, token_env: str | None
    ) -> None:
        from ludus.core.remote import RemoteClient

        self._client = RemoteClient(
            url,
            deadline_s=deadline_s,
            max_in_flight=max_in_flight,
            token_env=token_env,
            idempotent=True,
        )

    async def find(self, query: str, top_k: int) -> list[Passage] | str:
        """The passages, or the server's message where it blames the query."""
        from ludus.core.remote import Blamed

        try:
            body = {"queries": [query], "topk": top_k, "return_scores": True}
            answer = _Retrieved.model_validate(await self._client.post(body))
        except Blamed as error:
            return str(error)
        except ValidationError as error:
            raise ToolError(
                f"{self._client.url}: not a search server's answer: {first_fault(error)}"
            ) from None
        return [(hit.document or hit).passage() for hit in answer.result[0][:top_k]]

    async def close(self) -> None:
        await self._client.close()
