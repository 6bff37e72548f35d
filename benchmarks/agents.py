"""Agents of the user that learn from scratch, over several seeds: a command, and AgentScope's.

    python benchmarks/agents.py --seeds 0 1 2

Trains one run per recipe and seed, one at a time (or uses finished runs named
`<recipe>-seed<seed>`), and writes `docs/benchmarks/agents.md`, `.json` and `.svg`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
from pathlib import Path
from typing import Any

from common import RESULTS, machine, table, two_axes

from ludus.evaluate import compare
from ludus.report.collect import read_evaluations
from ludus.store.folders import RunFolder
from ludus.telemetry.metrics import MetricsLog
from recipes import WINDOW, episodes_at, interval, run_of, smoothed

RECIPES = {
    "agent-tiny-command": "command",
    "agent-tiny-agentscope": "AgentScope",
}


def measured(recipe: str, seed: int, runs_dir: Path) -> tuple[RunFolder, dict[str, Any]]:
    """The run of a seed, and what was measured beside it: load, processor time."""
    name = Path(recipe).stem
    beside = runs_dir / f"{name}-seed{seed}.json"
    load, before = os.getloadavg()[0], _processor_s()
    folder = run_of(recipe, seed, [], runs_dir)
    if not beside.exists():
        spent = {"load": [round(load, 1), round(os.getloadavg()[0], 1)]}
        beside.write_text(json.dumps({**spent, "processor_s": round(_processor_s() - before)}))
    return folder, json.loads(beside.read_text())


def _processor_s() -> float:
    """Processor time of this process, and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in used)


def figures(folder: RunFolder, beside: dict[str, Any]) -> dict[str, Any]:
    """The figures of a run."""
    evaluations, lines = read_evaluations(folder), MetricsLog.read(folder.metrics)
    steps = [line.metrics for line in lines if line.stage == "rl"]
    before, after = evaluations["before RL"], evaluations["after RL"]
    return {
        "before": interval(before),
        "after": interval(after),
        "p": compare(before, after).success.p_value,
        "curve": [
            round(line.metrics["evaluate/success"], 4)
            for line in lines
            if line.stage.startswith("evaluate/")
        ],
        "episodes": int(steps[-1]["rollout/episodes_total"]),
        "excluded": int(sum(step["rollout/excluded"] for step in steps)),
        "retries": int(sum(step["rollout/retries"] for step in steps)),
        "minutes": round(lines[-1].metrics["time/elapsed_s"] / 60, 1),
        **beside,
    }


def draw(path: Path, runs: dict[str, dict[int, RunFolder]]) -> None:
    """Success over RL episodes: one axis an agent."""
    figure, axes = two_axes()
    for axis, (recipe, folders) in zip(axes, runs.items(), strict=True):
        for seed, folder in folders.items():
            lines = MetricsLog.read(folder.metrics)
            steps = [line for line in lines if line.stage == "rl"]
            episodes = [line.metrics["rollout/episodes_total"] for line in steps]
            success = smoothed([line.metrics["rollout/success"] for line in steps])
            played = [line for line in lines if line.stage.startswith("evaluate/")]
            places = [episodes_at(line, steps, episodes) for line in played]
            values = [line.metrics["evaluate/success"] for line in played]
            axis.plot(episodes, success, color=f"C{seed}", label=f"seed {seed}")
            axis.plot(places, values, "o", color=f"C{seed}", markersize=4)
        axis.set(xlabel="RL episodes", title=RECIPES[recipe])
    axes[0].set(ylabel="success", ylim=(0, 1.02))
    axes[0].legend(loc="best", frameon=False)
    figure.savefig(path, metadata={"Date": None})


def page(found: dict[str, dict[int, dict[str, Any]]], facts: dict[str, Any]) -> str:
    """The page of the results."""
    head = ("agent", "seed", "start", "end", "paired p", "minutes", "processor s", "RL episodes")
    rows = [
        [RECIPES[recipe], str(seed), seen["before"], seen["after"], f"{seen['p']:.1g}",
         f"{seen['minutes']:.1f}", str(seen["processor_s"]), f"{seen['episodes']:,}"]
        for recipe, seeds in found.items()
        for seed, seen in seeds.items()
    ]  # fmt: skip
    curves = [
        [RECIPES[recipe], str(seed), ", ".join(f"{100 * value:.1f}" for value in seen["curve"])]
        for recipe, seeds in found.items()
        for seed, seen in seeds.items()
    ]
    runs = [seen for seeds in found.values() for seen in seeds.values()]
    loads = [load for seen in runs for load in seen["load"]]
    excluded = sum(seen["excluded"] for seen in runs)
    retries = sum(seen["retries"] for seen in runs)
    return f"""\
# Agents that learn from scratch

Two [agents](../agents.md) walk to a goal (`examples/agents/walk.py`): two or three turns, each with the directions of the goal between three
other things that the agent sees, and no turn to waste. The first is a [command](../command-agents.md): a Python program of the standard library, a
process an episode, which calls the gateway over HTTP. The second is AgentScope's agent, in ludus' process. A policy of 0.15 million parameters starts from
random weights, without demonstrations. It trains with GRPO, 16 groups of 8 episodes a step, for 60 steps.

Success on 200 held-out tasks, played greedily; no training task has the same content. Brackets: Wilson intervals (95 %). p: Bonett and Price's test on
the same tasks. Minutes include all evaluations; processor seconds include the programs.

{table(head, rows)}

Held-out success in per cent, before RL, after every 10 steps, and at the end:

{table(("agent", "seed", "success"), curves)}

![Success over RL episodes](agents.svg)

Lines: success of sampled training episodes, mean over {WINDOW} steps. Dots: success on held-out tasks. Of {sum(s["episodes"] for s in runs):,} training episodes
{excluded} were excluded, with {retries} retries. The runs were made one after the other on one core at a low priority (nice 5 to 10), beside other work on both: load {min(loads)} to {max(loads)}. The curves
of the trials, and the settings that failed, are in the [log](../log.md).

    python benchmarks/agents.py --seeds 0 1 2

## Machine

{", ".join(f"{name} {value}" for name, value in facts.items() if name != "load")}. Raw figures: [agents.json](agents.json).
"""  # noqa: E501 - Markdown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    args = parser.parse_args()
    runs: dict[str, dict[int, RunFolder]] = {}
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for seed in args.seeds:
        for name in RECIPES:
            folder, beside = measured(f"recipes/{name}.yaml", seed, args.runs_dir)
            runs.setdefault(name, {})[seed] = folder
            found.setdefault(name, {})[seed] = figures(folder, beside)
    facts = machine(threads=1)
    draw(RESULTS / "agents.svg", {name: runs[name] for name in RECIPES})
    found = {name: found[name] for name in RECIPES}
    (RESULTS / "agents.json").write_text(json.dumps({**facts, "runs": found}, indent=1) + "\n")
    (RESULTS / "agents.md").write_text(page(found, facts))


if __name__ == "__main__":
    main()
