"""Stacks as a flame graph: a page of its own, speedscope's JSON, folded lines."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ludus.diagnostics.profiling.sampling import Stacks


@dataclass(slots=True)
class Frame:
    """A function called from the frames above it: how often it was seen."""

    name: str
    count: int = 0
    inner: dict[str, Frame] = field(default_factory=dict)

    def plain(self) -> list[Any]:
        """[name, count, [inner frames, the most seen first]]."""
        below = sorted(self.inner.values(), key=lambda frame: -frame.count)
        return [self.name, self.count, [frame.plain() for frame in below]]


def tree(stacks: Stacks) -> Frame:
    """All stacks, merged from their outer ends."""
    root = Frame("all")
    for stack, count in stacks.items():
        root.count += count
        here = root
        for name in stack:
            here = here.inner.setdefault(name, Frame(name))
            here.count += count
    return root


def flame_page(stacks: Stacks, title: str, subtitle: str) -> str:
    """A page that asks nothing of the network: widths are time, a click zooms, words are found."""
    environment = Environment(
        loader=PackageLoader("ludus.diagnostics.profiling", "."),
        autoescape=True,
        undefined=StrictUndefined,
    )
    template = environment.get_template("flames.html")
    return template.render(title=title, subtitle=subtitle, frames=tree(stacks).plain())


def folded(stacks: Stacks, title: str, subtitle: str) -> str:
    """A line a stack, the most seen first: `outer;inner 12`."""
    return "".join(f"{';'.join(stack)} {count}\n" for stack, count in stacks.most_common())


def speedscope(stacks: Stacks, title: str, subtitle: str) -> str:
    """A file for https://www.speedscope.app, which shows it without sending it anywhere."""
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
