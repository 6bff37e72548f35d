"""Tools that agents call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any, get_type_hints

from ludus.config.registry import Registry, Row
from ludus.tools.base import Tool


class ToolRegistry(Registry[Tool]):
    """A registry in which "module:function" may be the tool itself, not only its factory."""

    def load(self, name: str) -> Callable[..., Tool]:
        target: Any = super().load(name)
        if inspect.isfunction(target) and not _makes_a_tool(target):
            return _function_tool(target)
        return target  # type: ignore[no-any-return]


def _makes_a_tool(function: Callable[..., Any]) -> bool:
    """True for a factory: a function whose return annotation is a Tool."""
    try:
        returned = get_type_hints(function).get("return")
    except Exception:  # an annotation that cannot be read: FunctionTool names it
        return False
    return inspect.isclass(returned) and issubclass(returned, Tool)


@cache
def _function_tool(function: Callable[..., Any]) -> Callable[..., Tool]:
    """The factory of a function's tool; the same object each time, for the schemas' cache."""
    from ludus.tools.function import FunctionTool

    return partial(FunctionTool, function)


TOOLS: Registry[Tool] = ToolRegistry(
    "tool",
    {
        "calculator": Row(
            "ludus.tools.calculator:calculator", "", "arithmetic: one expression, its value"
        ),
        "mcp": Row("ludus.tools.mcp:Mcp", "tools", "tools of an MCP server, stdio or HTTP"),
        "python": Row(
            "ludus.tools.python:PythonTool", "", "runs Python in the sandbox, fresh or stateful"
        ),
        "remote": Row(
            "ludus.tools.verl_tool:RemoteTools",
            "tools",
            "functions of a tool server (`ludus serve tools`, or verl-tool's)",
        ),
        "search": Row(
            "ludus.tools.search:search",
            "tools",
            "passages of your documents (BM25), or of a search server",
        ),
    },
    needs=("specs", "call"),
)
