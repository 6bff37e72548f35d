"""Overrides of a configuration: `rl.steps=50`, `env.args.level=GoToObj`, `rl=null`.

Overrides change values before validation, by the schema: a null or absent section is created from
its defaults; a plug-in given as a name becomes {name: ..., args: {...}}.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from ludus.config import yaml12
from ludus.config.messages import PathKey, Type, dotted, show
from ludus.config.schema import RunConfig
from ludus.config.secrets import MASK, is_secret, shown_override
from ludus.core.errors import ConfigError
from ludus.core.types import Spec


def apply_override(data: Any, override: str) -> tuple[PathKey, Any]:
    """Returns the override's path, and a copy of `data` with the override's value at that path.

    Raises:
        ConfigError: not of the form `dotted.key=value`, or the path leads through a plain value.
    """
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        shown = shown_override(override)
        raise ConfigError(f"override {shown}: write it as dotted.key=value")
    origin = f"override {shown_override(override)}"
    value, _ = yaml12.parse(text, origin)
    path: list[str | int] = []
    try:
        changed = _put(data, Type(RunConfig), parts, value, path)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None
    return tuple(path), changed


def _put(
    node: Any, at: Type | None, parts: Sequence[str], value: Any, path: list[str | int]
) -> Any:
    """Returns a copy of `node` with `value` at `parts`; appends the resolved keys to `path`."""
    if not parts:
        return value
    head, *rest = parts
    if node is None:
        node = [] if at and (at.admits(list) or at.admits(tuple)) else {}
    if isinstance(node, str) and at and at.admits(Spec) and not at.admits(str):
        node = {"name": node}
    if isinstance(node, list):
        index = _index(head, len(node), dotted(path))
        path.append(index)
        child = node[index] if index < len(node) else None
        new = _put(child, at.child(index) if at else None, rest, value, path)
        return [*node[:index], new, *node[index + 1 :]]
    if not isinstance(node, dict):
        shown = MASK if any(map(is_secret, path)) else show(node)
        raise ConfigError(f"{dotted(path)} is {shown}, which has no entry {head!r}")
    child = node[head] if head in node else _default(at, head)
    path.append(head)
    return {**node, head: _put(child, at.child(head) if at else None, rest, value, path)}


def _index(text: str, length: int, where: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) > length:
        allowed = f"0 to {length}" if length else "0"
        raise ConfigError(f"{where} is a list: write an index ({allowed}), got {text!r}")
    return int(text)


def _default(at: Type | None, name: str) -> Any:
    """The default of an absent key, so that overriding one part keeps the rest."""
    section = at.model() if at else None
    if section is None or name not in section.model_fields:
        return None
    info = section.model_fields[name]
    if info.is_required():
        return None
    value = info.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return list(value) if isinstance(value, tuple) else value
