"""The code of docs/tools.md runs as the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ludus
from ludus.core.errors import ToolError
from ludus.core.types import ToolCall
from ludus.tools.toolbox import Toolbox

PAGE = (Path(ludus.__file__).parents[1] / "docs" / "tools.md").read_text(encoding="utf-8")


def own_tool(folder: Path) -> str:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    assert len(code.splitlines()) <= 21  # its file's name, and 20 lines
    (folder / "my_tools.py").write_text(code)
    return f"{folder / 'my_tools.py'}:opening_hours"


async def test_your_own_tool(tmp_path: Path) -> None:
    async with await Toolbox.open([own_tool(tmp_path)]) as toolbox:
        (spec,) = toolbox.specs
        assert spec.description == "When a place is open."
        assert spec.parameters["properties"]["day"]["description"] == "the day, as YYYY-MM-DD."

        def call(**arguments: str) -> ToolCall:
            return ToolCall(name="opening_hours", arguments=arguments)

        results = await toolbox.call(
            [
                call(place="library", day="2024-02-29"),
                call(place="museum", day="2024-03-03"),
                call(place="bar", day="2024-02-29"),
                call(place="museum"),
            ],
            "e",
        )
        assert [result.content for result in results[:2]] == ["9 to 18", "closed"]
        assert results[2].content.endswith("no place 'bar'; known: library, museum")
        assert [result.failed for result in results] == [False, False, True, True]
        with pytest.raises(ToolError, match="no entry"):
            await toolbox.call([call(place="museum", day="2999-01-01")], "e")


def test_the_page_lists_every_tool() -> None:
    from ludus.tools import TOOLS

    assert all(f"[`{name}`](#{name}" in PAGE for name in TOOLS)
