"""Conversations of the agent maths.py for SFT, as AgentScope would send them.

    python examples/agents/maths_examples.py 8000 maths-examples.jsonl

Every third one computes with Python; the others answer at once. Guide: docs/maths-agent.md.
"""

import json
import sys
from pathlib import Path
from typing import Any

from maths import PROMPT
from sums import sums

DESCRIPTION = (
    "Run a Python program and read what it prints. Each call is a new interpreter: variables of "
    "earlier calls are gone."
)
PARAMETERS = {
    "properties": {"code": {"description": "The program.", "type": "string"}},
    "required": ["code"],
    "type": "object",
}
TOOL = {"name": "python", "description": DESCRIPTION, "parameters": PARAMETERS}


def example(question: str, answer: str, with_tool: bool) -> dict[str, Any]:
    """A conversation, and the functions that its prompt shows."""
    code = f"print({question.removeprefix('What is ').removesuffix(' ?')})"
    call = {"name": "python", "arguments": json.dumps({"code": code})}
    turns = [
        {"role": "assistant", "tool_calls": [{"type": "function", "id": "a", "function": call}]},
        {"role": "tool", "tool_call_id": "a", "content": answer},
    ]
    messages = [
        {"role": "system", "content": PROMPT},
        {"role": "user", "content": question},
        *(turns if with_tool else []),
        {"role": "assistant", "content": rf"\boxed{{ {answer} }}"},
    ]
    return {"messages": messages, "tools": [{"type": "function", "function": TOOL}]}


def main(num: int, path: str) -> None:
    tasks = sums(num, first_seed=1_000_000)
    lines = [
        example(task.prompt[0].content, str(task.answer), with_tool=number % 3 == 0)
        for number, task in enumerate(tasks)
    ]
    Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
