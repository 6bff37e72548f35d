"""Writes the generated pages of docs/. `make docs` runs it; a test compares the pages."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import typer

from ludus.backends.hosts import Table
from ludus.backends.trinity.keys import TABLE as TRINITY
from ludus.backends.verl.keys import TABLE as VERL
from ludus.cli import PANELS, app

DOCS = Path(__file__).parents[1] / "docs"

CLI_HEAD = """\
# Command line

An error message gives the place, the fault and the correct form. Exit codes: 2 for a wrong
configuration or call, 1 for other errors, 130 for Ctrl-C, 143 for SIGTERM,
129 for SIGHUP (a closed terminal; ignored under `nohup`).
`dotted.key=value` overrides a setting; the value is YAML:

```sh
ludus train recipes/babyai-tiny.yaml rl.steps=50 'env.args={level: GoToObj}'
```
"""


def configuration(page: str | None = None) -> str:
    """The configuration page, as `ludus config --markdown` prints it.

    Args:
        page: what the command printed; None: run it.

    Raises:
        LookupError: a plug-in's package is not installed, so its arguments are unknown.
    """
    if page is None:
        command = [sys.executable, "-m", "ludus", "config", "--markdown"]
        page = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    if missing := re.findall(r"^.* which is not installed: .*$", page, re.MULTILINE):
        raise LookupError("; ".join(missing))
    return page


def command_line() -> str:
    """The command-line page: every command, with its arguments and options."""
    rows = [
        f"| {panel} | {', '.join(f'`{verb}`' for verb in verbs)} |"
        for panel, verbs in PANELS.items()
    ]
    parts = [CLI_HEAD, "\n".join(["| | |", "|---|---|", *rows, ""])]
    for path, command in commands():
        if getattr(command, "commands", None):
            continue
        rows = [_row(parameter) for parameter in command.params if parameter.name != "help"]
        usage = " ".join(filter(None, [path, *map(_usage, command.params)]))
        lines = [f"## `{path}`", "", command.help or "", "", "```text", usage, "```", ""]
        if rows:
            lines += ["| | | default |", "|---|---|---|", *rows, ""]
        parts.append("\n".join(lines))
    return "\n".join(parts).rstrip() + "\n"


def host(table: Table) -> str:
    """The page of a host, with the table of recipe keys."""
    text = (DOCS / f"{table.host}.md").read_text(encoding="utf-8")
    head, start, rest = text.partition("<!-- keys: written by `make docs` -->\n")
    _, end, tail = rest.partition("<!-- end -->")
    return f"{head}{start}{table.markdown()}\n{end}{tail}"


def decisions() -> str:
    """The index of the decisions: its head is kept, its list is generated."""
    head, _, _ = (DOCS / "decisions" / "README.md").read_text(encoding="utf-8").partition("## All")
    lines = []
    for page in sorted((DOCS / "decisions").glob("[0-9]*.md")):
        title = page.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        lines.append(f"- [{title}]({page.name})")
    return "\n".join([f"{head}## All", "", *lines]) + "\n"


def readme() -> str:
    """The README, with the figures of its tables read from docs/benchmarks/*.json."""
    text = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    results = _figures("recipes")
    for name, seeds in results.items():
        line = next(line for line in text.splitlines() if line.startswith(f"| [{name}]("))
        cells = line.split(" | ")
        cells[2:4] = [_percentages(seeds, when) for when in ("before", "after")]
        minutes = [seed["minutes"] for seed in seeds.values()]
        first, last = (f"{m:.{int(m < 2)}f}" for m in (min(minutes), max(minutes)))
        cells[4] = f"{first} |" if first == last else f"{first} to {last} |"
        text = text.replace(line, " | ".join(cells))
    head, start, rest = text.partition("<!-- speed: written by `make docs` -->\n")
    _, end, tail = rest.partition("<!-- end -->")
    return f"{head}{start}{_speed_table()}\n{end}{tail}"


def _figures(name: str) -> Any:
    return json.loads((DOCS / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))


def _percentages(seeds: dict[str, Any], when: str) -> str:
    return ", ".join(f"{100 * seed[when]['value']:.1f}" for seed in seeds.values()) + " %"


def _speed_table() -> str:
    """Speed-up over each peer: the slowest, the median and the fastest case."""
    lines = [
        "| against | workload | slowest case | median | fastest case |",
        "| --- | --- | --- | --- | --- |",
    ]
    last = ""
    for against, workload, cases in _speeds():
        order = sorted(cases, key=cases.__getitem__)
        ends = [f"{_speed(cases[case])} ({case})" for case in (order[0], order[-1])]
        middle = _speed(statistics.median(cases.values()))
        shown, last = "" if against == last else against, against
        lines.append(f"| {shown} | {workload} | {ends[0]} | {middle} | {ends[1]} |")
    return "\n".join(lines)


def _speeds() -> Iterator[tuple[str, str, dict[str, float]]]:
    """Yield a peer, a workload, and the speed-up over the peer in each case."""
    steps = [row for row in _figures("step")["rows"] if "ratio" in row]
    trl = f"TRL {_figures('step')['machine']['trl']} `GRPOTrainer`, tuned; samples with `generate`"
    for half in (False, True):
        cases = {
            f"{row['model']}, {row['work'].removesuffix(', bfloat16')}": row["ratio"]["median"]
            for row in steps
            if row["work"].endswith("bfloat16") == half
        }
        yield trl, f"[a GRPO step](docs/benchmarks/step.md), {DTYPES[half]}", cases
    ends = {(r["program"], r["seed"]): r["points"][-1] for r in _figures("success")["rows"]}
    seconds = {
        f"seed {seed}": ends["rollout", seed]["seconds"] / ends["ludus", seed]["seconds"]
        for program, seed in ends
        if program == "ludus"
    }
    yield trl, "[seconds to 80 % success on BabyAI](docs/benchmarks/success.md)", seconds
    yield from _methods("SFT", f"TRL {_figures('methods')['machine']['trl']} `SFTTrainer`, tuned")
    for half, ratio in enumerate(("tree / transformers", "bfloat16, tree / transformers")):
        cases = {
            f"{row['model']}, {row['prompt']} + {row['completion']}"
            if row["completion"] else f"{row['model']}, nothing shared": row[ratio]["median"]
            for row in _figures("learner")["rows"]
        }  # fmt: skip
        yield (
            "a tuned transformers loop",
            f"[an optimizer step](docs/benchmarks/learner.md), {DTYPES[half]}",
            cases,
        )
    yield from _methods("PPO", "a tuned transformers loop")
    vllm = [row for row in _figures("vllm-sampler")["rows"] if "batch" in row]
    cases = {
        f"{row['batch']} rows, {dtype}, {part}": _ratio(
            row["seconds"][f"vLLM {dtype}"][key], row["seconds"][f"ludus {dtype}"][key]
        )
        for row in vllm
        for dtype in DTYPES
        for key, part in (("all", "prefill included"), ("steady", "decoding"))
    }
    yield "vLLM's CPU build", "[sampling](docs/benchmarks/vllm-sampler.md)", cases
    rows = [row for row in _figures("sampler")["rows"] if "generate" in row and "batch" in row]
    for name, workload in {
        "fast": "float32",
        "half": "bfloat16",
        "generic": "[models without a fast decoder](docs/models.md)",
    }.items():
        cases = {
            f"{row['model']}, batch {row['batch']}": _ratio(
                row["seconds"]["generate"], row["seconds"][name]
            )
            if name != "half" else row["half_ratio"]["median"]
            for row in rows
            if name in row["seconds"]
        }  # fmt: skip
        sampling = "[sampling](docs/benchmarks/sampler.md)"
        yield "transformers `generate`", f"{sampling}, {workload}", cases


def _methods(method: str, against: str) -> Iterator[tuple[str, str, dict[str, float]]]:
    """The workloads of a method of methods.json, in each type."""
    for half in (False, True):
        cases = {
            f"{row['model']}, {row['work'].removesuffix(', bfloat16')}": row["ratio"]["median"]
            for row in _figures("methods")["rows"]
            if row["method"] == method and row["work"].endswith("bfloat16") == half
        }
        name = {"SFT": "an SFT step", "PPO": "training of a PPO step"}[method]
        yield against, f"[{name}](docs/benchmarks/methods.md), {DTYPES[half]}", cases


def _speed(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio >= 1 else f"{ratio:.2f}"


def _ratio(peer: list[float], ours: list[float]) -> float:
    """The median of the ratios of neighbouring runs."""
    return statistics.median(p / o for p, o in zip(peer, ours, strict=True))


def commands(path: str = "ludus", command: Any = None) -> Iterator[tuple[str, Any]]:
    """Yield the path and the command of every command and group, the root first."""
    command = command or typer.main.get_command(app)
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(f"{path} {name}", child)


def _usage(parameter: Any) -> str:
    if parameter.param_type_name == "option":
        return ""
    name = (parameter.metavar or parameter.name).upper() + "..." * (parameter.nargs == -1)
    return name if parameter.required else f"[{name}]"


def _row(parameter: Any) -> str:
    if parameter.param_type_name == "option":
        name = ", ".join([*parameter.opts, *parameter.secondary_opts])
        if not parameter.is_flag:
            name += f" {parameter.metavar or parameter.name.upper()}"
    else:
        name = (parameter.metavar or parameter.name).upper()
    flag_off = parameter.default is False or parameter.default is None
    shown = "required" if parameter.required else "" if flag_off else f"`{parameter.default}`"
    cells = [f"`{name}`", parameter.help or "", shown]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


DTYPES = ("float32", "bfloat16")
PAGES = {
    "../README.md": readme,
    "configuration.md": configuration,
    "cli.md": command_line,
    "decisions/README.md": decisions,
    "verl.md": partial(host, VERL),
    "trinity.md": partial(host, TRINITY),
}


def main() -> None:
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
