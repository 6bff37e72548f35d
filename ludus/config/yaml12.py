"""YAML for configurations: plain values of YAML 1.2, no duplicate keys, line numbers.

PyYAML reads YAML 1.1, where `1e-3` is a text, `on` is true, `010` is eight and `1:30` is ninety.
Here `1e-3` is a number and the other three are texts, which the strict schema refuses.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from ludus.config.messages import PathKey, dotted
from ludus.core.errors import ConfigError

MAX_VALUES = 100_000
"""Limit of a text's values. A few aliases of aliases stand for billions."""

_RULES: list[tuple[str, str, str]] = [
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", "~nN\0"),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:int", r"[-+]?(?:0|[1-9][0-9]*)|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("tag:yaml.org,2002:merge", r"<<", "<"),
]


class _Loader(yaml.SafeLoader):
    """Reads plain values by the rules above only."""


class _Dumper(yaml.SafeDumper):
    """Quotes a text that YAML 1.1 or 1.2 would read as another type."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Escape Unicode's line breaks: PyYAML writes them unescaped and reads them as spaces."""
        style = '"' if any(character in data for character in "\x85\u2028\u2029") else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)


_Dumper.add_representer(str, _Dumper.represent_str)
_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in _RULES:
    _expression = re.compile(rf"^(?:{_pattern})$")
    _firsts = ["" if character == "\0" else character for character in _first]
    _Loader.add_implicit_resolver(_tag, _expression, _firsts)
    _Dumper.add_implicit_resolver(_tag, _expression, _firsts)


def parse(text: str, origin: str) -> tuple[Any, dict[PathKey, int]]:
    """Returns the value of a text, and the line (from 1) of every key and list item.

    Raises:
        ConfigError: invalid YAML, a duplicate key, deep nesting, or more than MAX_VALUES values,
            with `origin` and the line.
    """
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None, {}
            lines: dict[PathKey, int] = {}
            faults = list(_locate(node, (), lines, []))
            if faults:
                raise ConfigError("\n".join(f"{origin}: {fault}" for fault in faults))
            return loader.construct_document(node), lines
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = " ".join(part for part in (error.context, error.problem) if part)
        line = f" [line {mark.line + 1}]" if mark else ""
        raise ConfigError(f"{origin}: not valid YAML: {reason}{line}") from None
    except RecursionError:
        raise ConfigError(f"{origin}: nested too deeply") from None
    except KeyError as error:  # PyYAML looks up the text of `!!bool text`
        raise ConfigError(f"{origin}: not valid YAML: {error} is neither true nor false") from None
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{origin}: not valid YAML: {reason}") from None


def _locate(
    node: yaml.Node, path: PathKey, lines: dict[PathKey, int], open_nodes: list[yaml.Node]
) -> Any:
    """Fill `lines`; yield a fault for every duplicate key."""
    if any(node is above for above in open_nodes):
        yield f"{dotted(path)} refers to itself [line {node.start_mark.line + 1}]"
        return
    children: list[tuple[str | int, yaml.Node, int]] = []
    if isinstance(node, yaml.SequenceNode):
        children = [(i, item, item.start_mark.line + 1) for i, item in enumerate(node.value)]
    elif isinstance(node, yaml.MappingNode):
        first: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in first and key.tag != "tag:yaml.org,2002:merge":
                place = dotted((*path, name))
                yield f"{place} is given twice [lines {first[name]} and {line}]"
            first.setdefault(name, line)
            children.append((name, value, line))
    for part, child, line in children:
        lines.setdefault((*path, part), line)
        if len(lines) > MAX_VALUES:
            raise yaml.YAMLError(f"more than {MAX_VALUES:,} values, aliases included")
        yield from _locate(child, (*path, part), lines, [*open_nodes, node])


def dump(value: Any) -> str:
    """Returns a value as YAML that `parse` reads back unchanged; keys keep their order."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
    return text


def inline(value: Any) -> str:
    """Returns a value on one line, as written after a key: `[0.9, 0.95]`."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, sort_keys=False, allow_unicode=True,
        width=float("inf"),
    )  # fmt: skip
    return text.removesuffix("\n").removesuffix("\n...")
