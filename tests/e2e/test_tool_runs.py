"""Runs with tools: trained, killed, resumed, shown, exported."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from harness import RECIPES, Ludus, Zygote

TOOLS = str(RECIPES / "tools.yaml")


def write(folder: Path, code: bool = False) -> None:
    """Sums, and conversations in which the calculator computes them."""
    rng = random.Random(0)
    sums = [(rng.randrange(10), rng.randrange(10)) for _ in range(48)]
    ask = [{"role": "user", "content": "{} + {} ="}]

    def conversation(a: int, b: int) -> list[dict[str, Any]]:
        arguments = {"expression": f"{a} + {b}"}
        call = {"content": "", "tool_calls": [{"name": "calculator", "arguments": arguments}]}
        block = {"content": f"<code>{a} + {b}</code>"}
        answer = f"<answer>{a + b}</answer>" if code else str(a + b)
        return [
            *asked(a, b),
            {"role": "assistant", **(block if code else call)},
            {"role": "tool", "name": "calculator", "content": str(a + b)},
            {"role": "assistant", "content": answer},
        ]

    def asked(a: int, b: int) -> list[dict[str, Any]]:
        return [{**message, "content": message["content"].format(a, b)} for message in ask]

    def lines(name: str, rows: list[dict[str, Any]]) -> None:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    lines("sums.jsonl", [{"prompt": asked(a, b), "answer": a + b} for a, b in sums[:12]])
    held = [pair for pair in dict.fromkeys(sums) if pair not in sums[:12]][:4]
    lines("held.jsonl", [{"prompt": asked(a, b), "answer": a + b} for a, b in held])
    lines("taught.jsonl", [{"messages": conversation(a, b)} for a, b in sums])


@pytest.mark.slow
def test_killed_in_a_step_with_tools_it_is_the_same_run(
    ludus: Ludus, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = Ludus(zygote, tmp_path_factory.mktemp("whole"))
    for folder in (whole.cwd, ludus.cwd):
        write(folder)
    whole("train", TOOLS).ok()
    calls = [line["rollout/tool_calls"] for line in whole.metrics() if line["stage"] == "rl"]
    assert sum(calls) > 0
    for target, nth in [
        ("ludus.tools.toolbox:Toolbox.call", 6),
        ("ludus.rollout.tool_use:EpisodeTools.end", 14),
    ]:
        strike = f"strike({target!r}, {nth}, 'kill')"
        resume = ("--resume", "tiny-1") if ludus.run().exists() else (TOOLS,)
        done = ludus("train", *resume, setup=strike)
        assert done.code == -signal.SIGKILL, done.all
    ludus("train", "--resume", "tiny-1").ok()
    mine, other = ludus.state(), whole.state()
    for part in other:
        assert mine[part] == other[part], f"{part} differ"


def test_code_blocks_are_trained_shown_and_exported(ludus: Ludus) -> None:
    write(ludus.cwd, code=True)
    ludus("train", TOOLS, "rollout.format=code", "rollout.markers.tool=calculator").ok()
    assert any(line.get("rollout/tool_calls", 0) > 0 for line in ludus.metrics())
    assert (ludus.run() / "report.html").exists()
    ludus("export", "tiny-1", "all.jsonl").ok()
    rows = [json.loads(line) for line in (ludus.cwd / "all.jsonl").read_text().splitlines()]
    inside = [
        (segment, row["segments"][segment["parent"]], row)
        for row in rows
        for segment in row["segments"]
        if segment["message"] and segment["message"]["role"] == "tool"
    ]
    assert inside
    for result, code, _ in inside:
        assert not result["sampled"]
        assert code["sampled"]
        assert result["text"] is None or "<execution_results>" in result["text"]
    shown = ludus("show", "tiny-1", inside[0][2]["id"]).ok()
    assert "<execution_results>" in shown.out
    ludus("export", "tiny-1", "sft.jsonl", "--what", "sft").ok()
