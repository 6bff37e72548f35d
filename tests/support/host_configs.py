"""A small configuration for tests of hosts."""

from __future__ import annotations

from typing import Any

from ludus.config.schema import RunConfig


def config(**sections: Any) -> RunConfig:
    """A configuration that hosts accept, with other sections in place of its own."""
    base: dict[str, Any] = {
        "model": {"architecture": "qwen3", "tokenizer": "words", "context_length": 128},
        "env": "babyai",
        "tasks": {"train": {"name": "env", "args": {"num_tasks": 4}}},
        "rl": {},
    }
    return RunConfig.model_validate({**base, **sections})
