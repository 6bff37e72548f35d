"""The reference of the configuration: every key, and every plug-in's arguments.

Generated: keys, types, defaults, limits and descriptions come from the schema (`schema.py`) and the
plug-ins' signatures. `ludus config` prints the reference.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ludus.config import yaml12
from ludus.config.coevolve import CoevolveConfig
from ludus.config.messages import Type, dotted, type_at, walk
from ludus.config.registry import Registry
from ludus.config.schema import RunConfig, Section
from ludus.core.errors import ConfigError, LudusError, did_you_mean
from ludus.core.types import Spec

ANY = "NAME"
"""Stands in the reference for the names in a mapping that the user chooses."""

Registries = Mapping[str, Registry[Any]]
"""Registry by path: {"env": ENVS, "tasks.train": READERS, "metrics": SINKS}."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One key, or one argument of a plug-in."""

    key: str
    type: str
    default: str
    description: str


@dataclass(frozen=True, slots=True)
class Plugin:
    """One row of a registry, with its arguments; `problem`: why they cannot be read."""

    name: str
    summary: str
    arguments: list[Entry]
    open_ended: bool = False
    problem: str = ""


def keys(model: type[BaseModel] = RunConfig) -> list[Entry]:
    """Returns every key in order; a section's own entry comes before its keys."""
    entries = []
    for path in walk(model):
        owner = type_at(model, path[:-1])
        section = owner.model() if owner else None
        assert section is not None  # walk yields the keys of sections
        field = section.model_fields[str(path[-1])]
        entries.append(_entry(dotted(path), field))
        if (inner := _of_mapping(field)) is not None:
            shown = [entry for entry in keys(inner) if not entry.key.startswith("model.")]
            entries += [replace(e, key=f"{dotted(path)}.{ANY}.{e.key}") for e in shown]
    return entries


def _of_mapping(field: FieldInfo) -> type[Section] | None:
    """The section that each value of a mapping is; None for other types."""
    for branch in Type.of(field).branches():
        if get_origin(branch.annotation) is dict:
            inner = Type(get_args(branch.annotation)[1]).model()
            if inner is not None and issubclass(inner, Section):
                return inner
    return None


def plugins(registry: Registry[Any]) -> list[Plugin]:
    """Returns every plug-in of a registry, with the arguments that a config may set."""
    return [plugin(registry, name) for name in registry.names()]


def plugin(registry: Registry[Any], name: str) -> Plugin:
    """Returns one plug-in with its arguments, or the reason why they cannot be read."""
    summary = registry.row(name).summary
    try:
        model = registry.arguments(name)
    except LudusError as error:
        return Plugin(name, summary, [], problem=str(error))
    arguments = keys(model)
    open_ended = model.model_config.get("extra") == "allow"
    return Plugin(name, summary, arguments, open_ended)


def config_reference(registries: Registries) -> str:
    """Returns the whole reference as Markdown: one table per section, then one per plug-in."""
    lines = ["# Configuration", ""]
    for section, title, about, entries in _sections(RunConfig):
        lines += [f"## {title}", "", about, ""] if section else [about, ""]
        lines += [*_table(entries, "key"), ""]
    for section, title, about, entries in _sections(CoevolveConfig):
        lines += [f"### {title} of a co-evolution" if section else "## Co-evolution", ""]
        lines += [about, "", *_table(entries, "key"), ""]
    for paths, registry in _by_registry(registries):
        where = ", ".join(f"`{path}`" for path in paths)
        lines += [f"## Plug-ins: {registry.kind}", "", f"Named by {where}.", ""]
        for plugin in plugins(registry):
            lines += _plugin_markdown(plugin)
    return "\n".join(lines).rstrip() + "\n"


def show_reference(key: str | None, registries: Registries) -> RenderableType:
    """Returns the output of `ludus config [KEY]`: all keys, or one key or section and its plug-ins.

    A section lists its plug-ins; the key of a plug-in shows their arguments too. `coevolve` shows
    the keys of a co-evolution.

    Raises:
        ConfigError: unknown key.
    """
    entries = keys()
    if key is None:
        return _grid(entries)
    if key == "coevolve":
        return _grid(keys(CoevolveConfig))
    chosen = [entry for entry in entries if entry.key == key or entry.key.startswith(f"{key}.")]
    if not chosen:
        return _one_plugin(key, registries, entries)
    parts: list[RenderableType] = [_grid(chosen)]
    for paths, registry in _by_registry(registries):
        owned = [path for path in paths if any(entry.key == path for entry in chosen)]
        if not owned:
            continue
        parts.append(Text(f"\nPlug-ins for {', '.join(owned)}:\n", style="bold"))
        if key in owned:
            parts += [_plugin_shown(plugin) for plugin in plugins(registry)]
        else:
            parts.append(_plugin_names(registry))
            parts.append(Text(f"\nludus config NAME, or {owned[0]}, shows their arguments."))
    return Group(*parts)


def _plugin_names(registry: Registry[Any]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 2))
    table.add_column(no_wrap=True, overflow="fold", style="bold")
    table.add_column(overflow="fold")
    for name in registry.names():
        table.add_row(name, Text(registry.row(name).summary))
    return table


def _one_plugin(name: str, registries: Registries, entries: list[Entry]) -> RenderableType:
    """Returns the plug-ins of a name, built in, installed, or "module:Class"; without one, the keys
    that have it as their end or section (`target_kl`: `rl.optimizer.target_kl`), or a plug-in's
    argument."""
    parts: list[RenderableType] = []
    known = [entry.key for entry in entries]
    for paths, registry in _by_registry(registries):
        if name in registry.names():
            parts.append(Text(f"Plug-in for {', '.join(paths)}:\n", style="bold"))
            parts.append(_plugin_shown(plugin(registry, name)))
        known += registry.names()
    if not parts and ":" in name.strip(":"):
        registry = _outside(name, registries)
        registry.arguments(name)  # raises where it cannot be read
        parts.append(_plugin_shown(plugin(registry, name)))
    ends = [entry for entry in entries if f".{name}." in f"{entry.key}."]
    if not parts and ends:
        parts.append(_grid(ends))
    near = did_you_mean(name, known)
    below = any(name.startswith(f"{path}.") for path in registries)
    if not parts and (below or "did you mean" not in near):  # it may read all plug-ins
        parts = _of_argument(name, registries)
    if not parts:
        near = near or ": `ludus config` lists all keys"
        shown = name if name.strip(".: ") else repr(name)
        raise ConfigError(f"{shown} is not a key, a section or a plug-in{near}")
    return Group(*parts)


def _of_argument(name: str, registries: Registries) -> list[RenderableType]:
    """Returns the argument of plug-ins that a key ends with, and the keys that set it; empty: there
    is none. `entropy_target` is one of most algorithms, as `rl.algorithm.args.entropy_target`.
    """
    argument, parts = name.rpartition(".")[2], list[RenderableType]()
    grouped = _by_registry(registries)
    of_path = [g for g in grouped if any(name.startswith(f"{path}.") for path in g[0])]
    if "." in name and not of_path:
        return []
    # Those of back ends import what takes seconds, so they come last.
    for paths, registry in of_path or sorted(grouped, key=lambda g: "backend" in g[0]):
        if parts and "backend" in paths:
            break
        owners: list[str] = []
        found: Entry | None = None
        for each in plugins(registry):
            for entry in each.arguments:
                if entry.key == argument:
                    owners.append(each.name)
                    found = found or entry
        if found is not None:
            own = [path for path in paths if name.startswith(f"{path}.")] or paths
            key = " or ".join(f"{path}.args.{argument}" for path in own)
            parts.append(Text(f"An argument of {', '.join(owners)}; set it as {key}:\n", "bold"))
            parts.append(_grid([found], "argument"))
    return parts


def _outside(name: str, registries: Registries) -> Registry[Any]:
    """The registry of a "module:Class", which is no row of any: the one that supplies the most of
    its parameters, as a task and a model to an agent. One name may be an environment's own."""
    parameters = inspect.signature(registries["env"].load(name)).parameters.values()
    needed = {p.name for p in parameters if p.default is p.empty}
    likely = max(registries.values(), key=lambda registry: len(registry.context & needed))
    return likely if len(likely.context & needed) > 1 else registries["env"]


def _entry(key: str, field: FieldInfo) -> Entry:
    return Entry(key, Type.of(field).words(), _default(field), field.description or "")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, Section):
        return ""
    if isinstance(value, Spec):
        value = {"name": value.name, "args": value.args} if value.args else value.name
    if isinstance(value, tuple):
        value = list(value)
    return yaml12.inline(value)


def _sections(root: type[BaseModel]) -> Iterator[tuple[str, str, str, list[Entry]]]:
    """Path, title, docstring and direct entries of each section, the root first."""
    paths = [(), *walk(root)]
    entries = {entry.key: entry for entry in keys(root)}
    for path in paths:
        at = type_at(root, path)
        model = at.model() if at else None
        if model is None or not issubclass(model, Section):
            continue
        own = [entries[dotted((*path, name))] for name in model.model_fields]
        yield dotted(path), f"`{dotted(path)}`", " ".join((model.__doc__ or "").split()), own
        for name, field in model.model_fields.items():
            if (inner := _of_mapping(field)) is not None:
                place = f"{dotted((*path, name))}.{ANY}"
                below = [entry for key, entry in entries.items() if key.startswith(f"{place}.")]
                yield place, f"`{place}`", " ".join((inner.__doc__ or "").split()), below


def _by_registry(registries: Registries) -> list[tuple[list[str], Registry[Any]]]:
    grouped: dict[int, tuple[list[str], Registry[Any]]] = {}
    for path, registry in registries.items():
        grouped.setdefault(id(registry), ([], registry))[0].append(path)
    return list(grouped.values())


def _table(entries: list[Entry], head: str) -> list[str]:
    rows = [f"| {head} | type | default | meaning |", "|---|---|---|---|"]
    for entry in entries:
        default = f"`{entry.default}`" if entry.default else ""
        kind = entry.type.replace("[", "\\[")  # a pattern is no link
        cells = [f"`{entry.key}`", kind, default, entry.description]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return rows


def _plugin_markdown(plugin: Plugin) -> list[str]:
    lines = [f"### `{plugin.name}`", ""]
    if plugin.summary:
        lines += [f"{plugin.summary[0].upper()}{plugin.summary[1:]}.", ""]
    if plugin.problem:
        return [*lines, plugin.problem, ""]
    if plugin.arguments:
        lines += [*_table(plugin.arguments, "argument"), ""]
    if plugin.open_ended:
        lines += ["Further arguments are passed through.", ""]
    return lines if plugin.arguments or plugin.open_ended else [*lines, "No arguments.", ""]


def _grid(entries: list[Entry], head: str = "key") -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(head, no_wrap=True, overflow="fold")
    table.add_column("default", overflow="fold", max_width=24)
    table.add_column("type and meaning", overflow="fold")
    for entry in entries:
        meaning = Text(f"{entry.type}. " if not entry.description else f"{entry.type}: ")
        table.add_row(Text(entry.key), Text(entry.default), meaning + Text(entry.description))
    return table


def _plugin_shown(plugin: Plugin) -> RenderableType:
    title = Text.assemble((plugin.name, "bold"), f"  {plugin.summary}")
    if plugin.problem:
        return Group(title, Padding(Text(plugin.problem), (0, 0, 0, 2)))
    inner: list[RenderableType] = []
    if plugin.arguments:
        inner.append(_grid(plugin.arguments, "argument"))
    if plugin.open_ended:
        inner.append(Text("Further arguments are passed through."))
    return Group(title, Padding(Group(*inner or [Text("No arguments.")]), (0, 0, 1, 2)))
