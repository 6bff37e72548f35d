"""Rate limits of tools in the episode driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_tools import calls, made, play, tokenizer

from ludus.config.schema import LimitConfig
from ludus.core.errors import ConfigError
from ludus.core.types import Status
from ludus.tools.limits.limiter import Limits

__all__ = ["tokenizer"]  # a fixture


def limits_of(folder: Path, **settings: Any) -> Limits:
    limit = LimitConfig.model_validate({"store": f"file://{folder}", **settings})
    return Limits({"double": limit}, ["double", "echo"])


async def test_calls_wait_for_the_limit_of_their_function_and_the_wait_is_a_metric(
    tokenizer: Any, tmp_path: Path
) -> None:
    three = calls(*(("double", {"number": n}) for n in range(3)), ("echo", {"code": "x"}))
    collector = await made(tokenizer, [three, "done"], "double", "echo", deadline_s=0.1)
    assert collector.tools
    collector.tools.limits = limits_of(tmp_path, rate_per_s=5, burst=1)
    trajectory = await play(collector)
    assert trajectory.status == Status.COMPLETED
    assert trajectory.metrics["tool_calls"] == 4
    # Permits at 0, 0.2 and 0.4 s: longer than the calls' deadline, which begins after the wait.
    assert trajectory.metrics["tool_wait_seconds"] >= 0.6 - 0.01
    assert trajectory.metrics["tool_seconds"] >= 0.4 - 0.01


async def test_a_call_without_a_permit_in_time_is_a_tool_that_failed(
    tokenizer: Any, tmp_path: Path
) -> None:
    twice = calls(("double", {"number": 1}), ("double", {"number": 2}))
    collector = await made(tokenizer, [twice, "done"], "double")
    assert collector.tools
    collector.tools.limits = limits_of(tmp_path, rate_per_s=0.01, max_wait_s=0.1)
    trajectory = await play(collector)
    assert trajectory.status == Status.ERROR_TOOL
    assert "limits.double: no permit within 0.1 s" in (trajectory.error or "")


def test_a_limit_of_no_function_is_refused(tmp_path: Path) -> None:
    limit = LimitConfig(rate_per_s=1, store=f"file://{tmp_path}")
    with pytest.raises(ConfigError, match=r"limits\.duoble: .* \(did you mean double\?\)"):
        Limits({"duoble": limit}, ["double", "echo"])
    with pytest.raises(ConfigError, match=r"limits\.search: .* \(the run has no tools\)"):
        Limits({"search": limit}, [])
