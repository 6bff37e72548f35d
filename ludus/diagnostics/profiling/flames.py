"""Flame graphs: HTML page, speedscope JSON, folded stacks."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ludus.diagnostics.profiling.sampling import Stacks


@dataclass(slots=True)
class Frame:
    """A function in a call tree, with its number of samples."""

    name: str
    count: int = 0
    inner: dict[str, Frame] = field(default_factory=dict)

    def plain(self) -> list[Any]:
        """Returns [name, count, [inner frames, most samples first]]."""
        below = sorted(self.inner.values(), key=lambda frame: -frame.count)
        return [self.name, self.count, [frame.plain() for frame in below]]


def tree(stacks: Stacks) -> Frame:
    """Returns the call tree of all stacks."""
    root = Frame("all")
    for stack, count in stacks.items():
        root.count += count
        frame = root
        for name in stack:
            frame = frame.inner.setdefault(name, Frame(name))
            frame.count += count
    return root


def flame_page(stacks: Stacks, title: str, subtitle: str) -> str:
    """Returns a self-contained HTML page: widths are time; click to zoom; search by name."""
    environment = Environment(
        loader=PackageLoader("ludus.diagnostics.profiling", "."),
        autoescape=True,
        undefined=StrictUndefined,
    )
    template = environment.get_template("flames.html")
    return template.render(title=title, subtitle=subtitle, frames=tree(stacks).plain())


def folded(stacks: Stacks, title: str, subtitle: str) -> str:
    """Returns one line a stack, most samples first: `outer;inner 12`."""
    return "".join(f"{';'.join(stack)} {count}\n" for stack, count in stacks.most_common())


def speedscope(stacks: Stacks, title: str, subtitle: str) -> str:
    """Returns a file for https://www.speedscope.app, which processes it locally."""
    names = {name: i for i, name in enumerate(dict.fromkeys(n for stack in stacks for n in stack))}
    content = {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "name": f"{title}: {subtitle}",
        "shared": {"frames": [{"name": name} for name in names]},
        "profiles": [
            {
                "type": "sampled",
                "name": title,
                "unit": "none",
                "startValue": 0,
                "endValue": stacks.total(),
                "samples": [[names[name] for name in stack] for stack in stacks],
                "weights": list(stacks.values()),
            }
        ],
    }
    return json.dumps(content)
