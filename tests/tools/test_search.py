"""Search over local documents and at a search server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from raw_server import CLOSE, RawServer, answer

from ludus.core.errors import ConfigError, DataError, ToolError
from ludus.core.types import Spec, ToolCall
from ludus.tools import search_index
from ludus.tools.base import ToolResult
from ludus.tools.passages import snippet
from ludus.tools.search import NOTHING
from ludus.tools.search_index import PASSAGE_CHARS, load_index
from ludus.tools.toolbox import Toolbox

ROWS = [
    {"id": 1, "title": "Everest", "text": "Mount Everest is the tallest mountain, 8,849 m."},
    {"title": "Nile", "text": "The Nile is a river in Africa."},
    {"contents": '"K2"\nThe second tallest mountain is K2.'},
    {"title": "Ünïted", "content": "Ein Fluß in Köln."},
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ludus" / "search"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n", encoding="utf-8")
    return path


async def find(query: str, **args: Any) -> ToolResult:
    spec = Spec(
        name="search", args={key: str(v) if key == "path" else v for key, v in args.items()}
    )
    async with await Toolbox.open([spec]) as toolbox:
        call = ToolCall(name="search", arguments={"query": query})
        (result,) = await toolbox.call([call], "e")
    return result


async def test_json_lines(rows: Path) -> None:
    found = await find("How tall is Everest, the tallest mountain?", path=rows, top_k=2)
    assert found.content == (
        "[1] Everest\nMount Everest is the tallest mountain, 8,849 m.\n\n"
        "[2] K2\nThe second tallest mountain is K2."
    )
    assert (await find("FLUSS Fluß köln", path=rows)).content == "[1] Ünïted\nEin Fluß in Köln."
    assert (await find("quux", path=rows)).content == NOTHING
    assert (await find("Nile", path=rows)).content.startswith("[1] Nile\n")


async def test_a_folder_of_texts(tmp_path: Path) -> None:
    folder = tmp_path / "documents"
    (folder / "deep").mkdir(parents=True)
    (folder / "rivers.txt").write_text("The Nile is long.")
    (folder / "deep" / "hills.md").write_text("# Hills\n\nEverest is high.")
    (folder / "picture.png").write_bytes(b"\xff\xfe")
    found = await find("everest", path=folder)
    assert found.content == "[1] deep/hills\n# Hills\n\nEverest is high."


@pytest.mark.parametrize("query", ["", "  ", "x" * 3000])
async def test_a_query_of_a_wrong_length_is_told(rows: Path, query: str) -> None:
    result = await find(query, path=rows)
    assert result.failed
    assert "give 1 to 2000 characters" in result.content


def test_the_index_is_cached_by_content(
    rows: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_index(rows)
    built: list[int] = []
    build = search_index.build_index
    monkeypatch.setattr(search_index, "build_index", lambda p: built.append(len(p)) or build(p))
    again = load_index(rows)
    assert not built
    assert again.passages == first.passages
    assert again.find("tallest mountain", 9) == first.find("tallest mountain", 9)
    assert again.find("no such", 9) == []
    with rows.open("a") as file:
        file.write(json.dumps({"text": "One more."}))
    assert load_index(rows).find("more", 1)[0].text == "One more."
    assert built == [5]
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("name", ["passages.json", "data.csc.index.npy", "vocab.index.json"])
def test_a_damaged_cache_is_built_anew(rows: Path, cache: Path, name: str) -> None:
    load_index(rows)
    (folder,) = cache.iterdir()
    (folder / name).write_bytes(b"rubbish")
    assert load_index(rows).find("nile", 1)[0].title == "Nile"
    (folder / name).unlink()
    assert load_index(rows).find("nile", 1)[0].title == "Nile"
    assert (folder / name).exists()


def test_a_cache_that_cannot_be_written_stops_nothing(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert load_index(rows).find("nile", 1)[0].title == "Nile"


def test_long_documents_are_cut_into_passages(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    paragraphs = [f"Paragraph {i} " + "word " * 100 for i in range(20)] + ["x" * 4 * PASSAGE_CHARS]
    path.write_text("\n\n".join(paragraphs))
    passages = load_index(path).passages
    assert all(len(passage.text) <= PASSAGE_CHARS + 2 for passage in passages)
    joined = "".join("".join(passage.text.split()) for passage in passages)
    assert joined == "".join("".join(paragraphs).split())


def test_a_snippet_is_around_the_word() -> None:
    text = "lead " * 100 + "Everest " + "tail " * 100
    shown = snippet(text, "the everest", 100)
    assert "Everest" in shown
    assert len(shown) <= 108
    assert shown.startswith("... lead")
    assert snippet("short", "x", 100) == "short"
    assert snippet(text, "?", 100).startswith("lead")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b'{"title": "x"}\n', "line 1: not of the form"),
        (b'{"text": "x"}\n{"text": 3}\n', "line 2: not of the form"),
        (b"[1]\n", "line 1: not of the form"),
        (b"{\n", "line 1: not JSON"),
        (b"\xff\xfe\n", "is not UTF-8"),
        (b"", "contains no text"),
    ],
)
def test_wrong_documents_are_refused(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=told):
        load_index(path)


async def test_missing_documents_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no file or folder"):
        load_index(tmp_path / "nothing")
    args = {"path": str(tmp_path / "nothing")}
    with pytest.raises(DataError, match=r"^tools\.0: .*nothing"):
        await Toolbox.open([Spec(name="search", args=args)])
    with pytest.raises(ConfigError, match=r"^tools\.0: search: give either"):
        await Toolbox.open([Spec(name="search")])
    with pytest.raises(DataError, match=r"has no \.txt or \.md files"):
        load_index(tmp_path)


@pytest.mark.parametrize("args", [{}, {"path": "x", "url": "http://x"}])
async def test_either_path_or_url(args: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="either `path`"):
        await find("x", **args)


async def test_a_search_server() -> None:
    hits = [
        {"document": {"contents": '"Everest"\nMount Everest is high.'}, "score": 9.1},
        {"document": {"title": "K2", "text": "K2 is high."}},
        {"contents": "Only a text."},
    ]
    async with RawServer() as server:
        server.script = [CLOSE, answer({"result": [hits]})]  # a lost search is sent again
        found = await find("high", url=f"{server.url}/retrieve", top_k=3)
    assert found.content == (
        "[1] Everest\nMount Everest is high.\n\n[2] K2\nK2 is high.\n\n[3]\nOnly a text."
    )
    assert server.bodies[-1] == {"queries": ["high"], "topk": 3, "return_scores": True}


@pytest.mark.parametrize(
    "body", [{"result": []}, {"result": [[{"document": 3}]]}, {"results": [[]]}, [1], "x"]
)
async def test_a_search_server_that_answers_rubbish(body: Any) -> None:
    async with RawServer() as server:
        server.script = [answer(body)]
        with pytest.raises(ToolError, match="not a search server's answer"):
            await find("x", url=server.url)


async def test_a_search_server_that_finds_nothing_or_blames_the_query() -> None:
    async with RawServer() as server:
        server.script = [answer({"result": [[]]})]
        assert (await find("x", url=server.url)).content == NOTHING
        server.script = [answer({"detail": "too long"}, 422)]
        assert await find("x", url=server.url) == ToolResult(
            content="search: too long", failed=True
        )
