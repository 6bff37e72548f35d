"""Renderers by task: parts of a mixture have their own, and a task may show fewer functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ludus.core.types import Task, ToolSpec
from ludus.models.chat.renderer import Renderer
from ludus.tasks.mixture import part_of


class TaskRenderers:
    """The renderer of each task. Rollouts and the replay of SFT ask it, so their prompts are equal.

    Args:
        default: renderer of tasks whose part has no other.
        parts: by part of a mixture, where parts have their own format or tools.
        functions: names of the functions of the run's `tools`, of which `Task.tools` shows some.
    """

    def __init__(
        self,
        default: Renderer,
        parts: Mapping[str, Renderer] | None = None,
        functions: Collection[str] = (),
    ) -> None:
        self.default, self._parts = default, dict(parts or {})
        self._functions = frozenset(functions)
        self._fewer: dict[tuple[str, tuple[str, ...]], Renderer] = {}
        self._own: dict[tuple[str, str], Renderer] = {}

    def of(self, task: Task, functions: Sequence[ToolSpec] | None = None) -> Renderer:
        """The renderer that shows the functions of a task: its environment's, and its `tools`; or
        `functions` in their place."""
        part = part_of(task) or ""
        renderer = self._parts.get(part, self.default)
        if functions is not None:
            own = part, "\n".join(tool.model_dump_json() for tool in functions)
            if own not in self._own:
                self._own[own] = renderer.with_tools(functions)
            return self._own[own]
        hidden = frozenset() if task.tools is None else self._functions - set(task.tools)
        shown = [tool for tool in renderer.tools if tool.name not in hidden]
        if len(shown) == len(renderer.tools):
            return renderer
        key = part, tuple(tool.name for tool in shown)
        if key not in self._fewer:
            self._fewer[key] = renderer.with_tools(shown)
        return self._fewer[key]
