"""`ray start` on a busy host: it gives up after 30 s, and is tried again within `start_s`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ludus.cluster import node

pytest.importorskip("ray", reason="needs the extra ray")

TOO_SLOW = "Exception: The current node timed out during startup. This could happen because ..."
COUNTS = """
import sys
from pathlib import Path
count = Path(sys.argv[1])
number = int(count.read_text() or 0) if count.exists() else 0
count.write_text(str(number + 1))
print("INFO: Local node IP")
if number < int(sys.argv[2]):
    print(sys.argv[3], file=sys.stderr)
    sys.exit(1)
"""


def started(
    monkeypatch: pytest.MonkeyPatch, count: Path, failures: int, text: str, start_s: float = 60
) -> dict[str, Any]:
    command = [sys.executable, "-c", COUNTS, str(count), str(failures), text]
    monkeypatch.setattr(node, "ray_start", lambda _: command)
    return node.start({"name": "none-such", "head": True, "start_s": start_s})


def test_a_node_that_was_too_slow_is_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    count = tmp_path / "count"
    assert started(monkeypatch, count, 2, TOO_SLOW) == {"processes": 0}
    assert count.read_text() == "3"


def test_it_is_not_tried_after_the_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(node.Fault, match=r"`ray start` did not end within 0\.01 s"):
        started(monkeypatch, tmp_path / "count", 9, TOO_SLOW, start_s=0.01)


def test_another_fault_is_told_in_its_own_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    count = tmp_path / "count"
    with pytest.raises(node.Fault, match=r"^`ray start` failed: Exception: no room$"):
        started(monkeypatch, count, 1, "Exception: no room\nINFO: bye")
    assert count.read_text() == "1"
