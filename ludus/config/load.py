"""Load a run's configuration from YAML or Python, with overrides, strictly.

    config = load_config("recipes/babyai-tiny.yaml", ["rl.steps=50", "env.args.level=GoToObj"])

All faults are reported together. Each line names the place, the fault and the correct form:

    recipes/babyai-tiny.yaml: rollout.max_truns is not a key (did you mean rollout.max_turns?)
    override rl.steps=0: rl.steps must be a whole number >= 1, got 0
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ludus.config import yaml12
from ludus.config.messages import PathKey, Type, dotted, explain, show
from ludus.config.overrides import apply_override
from ludus.config.recipes import shipped_recipes
from ludus.config.registry import Registry
from ludus.config.schema import RunConfig
from ludus.config.secrets import shown_override, without_passwords
from ludus.core.errors import ConfigError, LudusError, MissingDependency, did_you_mean
from ludus.core.files import NOT_REGULAR
from ludus.core.modules import load_module, told
from ludus.core.types import Spec

Source = str | Path | Mapping[str, Any] | RunConfig | Callable[[], Any]
Config = TypeVar("Config", bound=BaseModel)


def load_config(source: Source, overrides: Sequence[str] = ()) -> RunConfig:
    """Returns the configuration of `source`, with `dotted.key=value` overrides applied.

    `source` is the path of a YAML file, the name of a recipe of the package, "module:function" or
    "path.py:function", a function, a mapping, or a `RunConfig`. A function takes no argument and
    returns a `RunConfig` or a mapping.
    The value of an override is YAML: `rl=null` removes the stage, `metrics.0.args.port=9000`
    changes a list's item. An override creates a section that is null or absent.

    Raises:
        ConfigError: one line per fault: the file or the override, the dotted path, the allowed
            values, and the nearest name.
    """
    return load_as(RunConfig, source, overrides)


def load_as(
    schema: type[Config], source: Source | BaseModel, overrides: Sequence[str] = ()
) -> Config:
    """As `load_config`, for another schema of a whole recipe."""
    raw = _read(source)
    faults: list[str] = []
    data = _plain(raw.data, (), faults, raw)
    if not faults and data is None:
        faults.append(f"{raw.origin}: the file is empty: {_needs(schema)}")
    elif not faults and not isinstance(data, dict):
        faults.append(f"{raw.origin}: must be a mapping of keys, got {show(data)}")
    elif not faults and (remedy := other_kind(data, schema)):
        faults.append(f"{raw.origin}: {remedy}")
    if faults:
        raise ConfigError("\n".join(faults))
    data = _overridden(raw, data, overrides, faults)
    if unwritable := [raw.message(path, text) for path, text in _unwritable(data, ())]:
        raise ConfigError("\n".join(faults + unwritable))
    try:
        # JSON, because strict mode then accepts a list for a tuple, and no other conversion.
        config = schema.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        faults += [raw.message(path, line) for path, line in explain(error, schema)]
    if faults:
        raise ConfigError("\n".join(faults))
    return config


def located(source: Source, overrides: Sequence[str], faults: str) -> str:
    """Returns faults, one a line, with the origin of those that begin with a dotted key: the
    override, or the file and the line. `load_config` accepted `source` and `overrides`."""
    raw = _read(source)
    data = _overridden(raw, _plain(raw.data, (), [], raw), overrides, [])
    sections = {*RunConfig.model_fields, *data}

    def told_with(fault: str) -> str:
        path = _key(fault, raw)
        return raw.message(path, fault) if path and path[0] in sections else fault

    return "\n".join(map(told_with, faults.splitlines()))


def _overridden(raw: _Raw, data: Any, overrides: Sequence[str], faults: list[str]) -> Any:
    """Returns `data` with the overrides, of which `raw` notes the places."""
    for override in overrides:
        try:
            before = data
            path, data = apply_override(data, override)
            raw.mark(path, override, before)
        except ConfigError as error:
            faults.append(str(error))
    return data


def _key(fault: str, raw: _Raw) -> PathKey:
    """The dotted key that a fault begins with, or the key below it of an override that gives the
    name of a plug-in, or the value that the fault quotes."""
    found = re.match(r"\w+(\.\w+)*", fault)
    parts = found[0].split(".") if found else []
    path = tuple(int(part) if part.isdecimal() else part for part in parts)
    if (*path, "name") in raw.overridden:
        return (*path, "name")
    quoted = re.search(r"'([^']+)'", fault)
    for key, override in raw.overridden.items():
        value = override.partition("=")[2]
        below = len(key) > len(path) and key[: len(path)] == path
        if quoted and below and re.search(rf"(?<!\w){re.escape(quoted[1])}(?!\w)", value):
            return key
    return path


def _needs(schema: type[BaseModel]) -> str:
    """The keys without which a file of this kind cannot be, in words."""
    needed = [f"`{name}`" for name, field in schema.model_fields.items() if field.is_required()]
    return f"it needs at least {' and '.join(needed)}" if needed else "set at least one key"


def is_coevolution(source: Source) -> bool:
    """Returns whether a recipe is of a co-evolution, and not of a run. Errors: ConfigError."""
    return _coevolves(_read(source).data)


def _coevolves(data: Any) -> bool:
    return isinstance(data, Mapping) and {"iterations", "curriculum"} <= set(data)


def other_kind(data: Mapping[str, Any], schema: type[BaseModel]) -> str:
    """Returns what to do with a recipe of the other kind (run, co-evolution); else ""."""
    if _coevolves(data) == ("iterations" in schema.model_fields):
        return ""
    if schema is RunConfig:
        return "this is a recipe of co-evolution: run it with `ludus coevolve`"
    return "this is the recipe of a run, without `iterations` and `curriculum`: use `ludus train`"


def dump_config(config: BaseModel) -> str:
    """The resolved configuration with all keys, as YAML that `load_config` reads back."""
    return yaml12.dump(config.model_dump(mode="json"))


def dump_changes(config: BaseModel) -> str:
    """The keys whose values differ from the defaults, as YAML that `load_config` reads back to the
    same configuration."""
    return yaml12.dump(config.model_dump(mode="json", exclude_defaults=True))


def diff(before: BaseModel, after: BaseModel) -> list[str]:
    """Returns the dotted keys whose values differ, in the order of the configuration."""
    return list(_differences((), before.model_dump(mode="json"), after.model_dump(mode="json")))


def lookup(config: BaseModel, key: str) -> Any:
    """Returns the value at a dotted key of `diff`; None where the path ends early."""
    value: Any = config.model_dump(mode="json")
    for part in key.split("."):
        value = _item(value, int(part) if isinstance(value, list) else part)
    return value


def check_specs(
    config: RunConfig, registries: Mapping[str, Registry[Any]], source: str = ""
) -> None:
    """Validate the arguments of every plug-in, before anything runs.

    `registries` maps a path to the registry that owns it: {"env": ENVS, "tasks.train": READERS,
    "metrics": SINKS}. A path may hold a spec, a list of specs, or null. A plain text at a path that
    allows one (`model.tokenizer`) is not a plug-in's name and is skipped. `source` is the prefix
    of each line.

    Raises:
        ConfigError: one line per fault.
        MissingDependency: the only fault is a package that is not installed.
    """
    faults: list[LudusError] = []
    for path, registry in registries.items():
        for where, spec in specs_at(config, path):
            try:
                registry.check(spec, where)
            except LudusError as error:
                faults.append(error)
    if not faults:
        return
    if all(isinstance(fault, MissingDependency) for fault in faults):
        raise faults[0]
    prefix = f"{source}: " if source else ""
    lines = [line for fault in faults for line in str(fault).splitlines()]
    raise ConfigError("\n".join(prefix + line for line in lines))


def specs_at(config: RunConfig, path: str) -> Iterator[tuple[str, Spec]]:
    """Yields the specs at a dotted path, each with its own path; a plain text is none."""
    value: Any = config
    for part in path.split("."):
        value = getattr(value, part) if value is not None else None
    items = [(path, value)]
    if isinstance(value, list):
        items = [(f"{path}.{i}", item) for i, item in enumerate(value)]
    yield from ((where, item) for where, item in items if isinstance(item, Spec))


@dataclass(slots=True)
class _Raw:
    """Values before validation, and the origin of each value."""

    origin: str
    data: Any
    lines: dict[PathKey, int] = field(default_factory=dict)
    overridden: dict[PathKey, str] = field(default_factory=dict)

    def message(self, path: PathKey, text: str) -> str:
        """The fault with its origin: the override, or the file and the line.

        A rule about several keys names them between backticks; it blames an override of any.
        """
        text = without_passwords(text)
        for name in re.findall(r"`([\w.]+)", text):
            for key in ((*path, *name.split(".")), tuple(name.split("."))):
                equal = takewhile(lambda pair: pair[0] == pair[1], zip(key, path, strict=False))
                for length in range(len(key), len(list(equal)), -1):
                    if key[:length] in self.overridden:
                        return f"override {self.overridden[key[:length]]}: {text}"
        for length in range(len(path), 0, -1):
            if path[:length] in self.overridden:
                return f"override {self.overridden[path[:length]]}: {text}"
            if path[:length] in self.lines:
                return f"{self.origin}: {text} [line {self.lines[path[:length]]}]"
        return f"{self.origin}: {text}"

    def mark(self, path: PathKey, override: str, before: Any) -> None:
        """Note that `path` and everything below it come from the override, and so do the sections
        above it that `before`, the values without it, does not have."""
        override = shown_override(override)
        for origins in (self.lines, self.overridden):
            for key in [key for key in origins if key[: len(path)] == path]:
                del origins[key]
        for length in range(1, len(path) + 1):
            before = _item(before, path[length - 1])
            if path[:length] not in self.lines and (length == len(path) or before is None):
                self.overridden.setdefault(path[:length], override)


def _item(value: Any, key: str | int) -> Any:
    """The value at a key of a mapping, or an index of a list; None where there is none."""
    if isinstance(value, list):
        return value[key] if isinstance(key, int) and key < len(value) else None
    return value.get(key) if isinstance(value, dict) else None


# Reading a source


def _read(source: Source | BaseModel) -> _Raw:
    if isinstance(source, BaseModel | Mapping):
        return _Raw("config", source)
    if callable(source):
        name = f"{source.__module__}:{getattr(source, '__qualname__', type(source).__name__)}"
        return _Raw(name, _call(source, name))
    path = Path(source)
    if path.is_file():
        if path.suffix == ".py":
            raise ConfigError(f"{source}: name the function too, e.g. {source}:config")
        return _read_yaml(path)
    text = str(source)
    if ":" in text:
        return _Raw(text, _call(_import(text), text))
    if text in (shipped := shipped_recipes()):
        return _read_yaml(shipped[text])
    raise ConfigError(f"{text}: {_not_a_file(path)}")


def _read_yaml(path: Path) -> _Raw:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    data, lines = yaml12.parse(text, str(path))
    return _Raw(str(path), data, lines)


def _not_a_file(path: Path) -> str:
    if path.is_dir():
        return "is a folder, not a YAML file"
    if path.exists():
        return NOT_REGULAR
    folders = [path.parent, Path("recipes")]
    found = [f for folder in reversed(folders) for f in sorted(folder.glob("*.y*ml"))]
    files = {f.stem: str(f) for f in found if f.is_file()}
    choices = {name: name for name in shipped_recipes()} | files  # a file wins
    hint = did_you_mean(path.stem, choices) or ": `ludus recipes` lists those of the package"
    for stem, choice in choices.items():
        hint = hint.replace(f"(did you mean {stem}?)", f"(did you mean {choice}?)")
    return f"no such file{'' if path.suffix else ' or recipe'}{hint}"


def _import(target: str) -> Callable[[], Any]:
    """The function of "module:function" or "path.py:function"."""
    module_name, _, name = target.rpartition(":")
    is_file = module_name.endswith(".py")
    if is_file and not Path(module_name).expanduser().is_file():
        raise ConfigError(f"{target}: no such file")
    try:
        module = load_module(module_name)
    except LudusError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and not is_file:
            raise ConfigError(f"{target}: no module named {error.name!r}") from None
        raise ConfigError(f"{target}: {module_name} raised {told(error)}") from error
    function = getattr(module, name, None)
    if function is None or not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        problem = "has no function" if function is None else "has no callable"
        raise ConfigError(
            f"{target}: {module_name} {problem} {name!r}{did_you_mean(name, functions)}"
        )
    return function  # type: ignore[no-any-return]


def _call(function: Callable[[], Any], name: str) -> Any:
    try:
        if (made := function()) is None:
            raise ConfigError(f"{name} returned None; it has to return a configuration")
        return made
    except ValidationError as error:
        lines = [f"{item['loc']}: {item['msg']}" for item in error.errors()]
        for model in _sections(RunConfig):
            if model.__name__ == error.title:
                lines = [text for _, text in explain(error, model)]
        raise ConfigError("\n".join(f"{name}: {line}" for line in lines)) from None
    except LudusError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{name}: it raised {told(error)}") from error


def _sections(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for info in model.model_fields.values():
        below = Type.of(info).model()
        if below is not None:
            yield from _sections(below)


# Conversion to plain values


def _plain(value: Any, path: PathKey, faults: list[str], raw: _Raw) -> Any:
    """Converts to mappings, lists and plain values; a value that cannot be stored is a fault."""
    if isinstance(value, BaseModel):
        value = {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                text = f"a key must be text, got {show(key)}"
                faults.append(
                    raw.message((*path, str(key)), f"{dotted(path)}: {text}" if path else text)
                )
        return {str(k): _plain(v, (*path, str(k)), faults, raw) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, (*path, i), faults, raw) for i, item in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):  # an enum's member
        return str.__str__(value)
    if isinstance(value, int | float):  # numpy's float64 is a float
        return int(value) if isinstance(value, int) else float(value)
    text = f"{show(value)} is a {type(value).__name__}, which a configuration cannot hold"
    faults.append(raw.message(path, f"{dotted(path)}: {text}" if path else text))
    return None


def _unwritable(value: Any, path: PathKey) -> Iterator[tuple[PathKey, str]]:
    """Yields the place and the fault of each plain value that no file or database could hold."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _unwritable(key, path)
            yield from _unwritable(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unwritable(item, (*path, index))
    elif isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        yield path, f"{dotted(path)} must be text, got {show(value)}: a surrogate is no character"
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        yield path, f"{dotted(path)} must be within 64 bits, got {show(value)}"


def _differences(path: PathKey, before: Any, after: Any) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in {**before, **after}:
            if key not in before or key not in after:
                yield dotted((*path, key))
            else:
                yield from _differences((*path, key), before[key], after[key])
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from _differences((*path, index), old, new)
    elif type(before) is not type(after) or before != after:
        yield dotted(path)
