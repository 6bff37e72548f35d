"""Several seeds of a recipe: held-out success before and after RL, and training curves.

    python benchmarks/recipes.py recipes/babyai-tiny.yaml --seeds 0 1 2

Trains one run per seed (or uses finished runs named `<recipe>-seed<seed>`), and writes
`docs/benchmarks/<recipe>.md` and `.svg`, and the recipe's figures in `recipes.json`, from which
`make docs` writes the README's table. `--variant NAME KEY=VALUE...` trains the same seeds with
other settings, too, and compares both on the same held-out tasks.
"""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from common import RESULTS, table, tabulate, two_axes

from ludus.config.load import load_config
from ludus.evaluate import compare
from ludus.evaluate.results import Evaluation
from ludus.pipeline.launch import train
from ludus.pipeline.monitoring.progress import Display
from ludus.report.collect import read_evaluations
from ludus.store import RunStore
from ludus.store.folders import RunFolder
from ludus.telemetry.metrics import Line, MetricsLog

WINDOW = 5  # steps that a point of the smoothed curve averages over


def run_of(
    recipe: str, seed: int, overrides: list[str], runs_dir: Path, variant: str = ""
) -> RunFolder:
    """The finished run of a seed, trained now if there is none."""
    name = f"{Path(recipe).stem}{variant and f'-{variant}'}-seed{seed}"
    folder = RunFolder(runs_dir / f"{name}-1")
    if not folder.report.exists():
        config = load_config(
            recipe, [*overrides, f"name={name}", f"seed={seed}", f"runs_dir={runs_dir}"]
        )
        folder = train(config, Display())
    return folder


def smoothed(values: list[float]) -> list[float]:
    """Trailing means over WINDOW steps."""
    windows = (values[max(0, i - WINDOW + 1) : i + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def interval(evaluation: Evaluation) -> str:
    success = evaluation.success
    return f"{success.value:.1%} ({success.low or 0:.1%} to {success.high or 0:.1%})"


def draw(path: Path, groups: dict[str, dict[int, RunFolder]]) -> None:
    """Success of training episodes and of held-out tasks, over episodes and over time.

    `groups` has the runs by seed, of the recipe ("") and of its variant.
    """
    figure, axes = two_axes()
    runs = [(variant, *item) for variant, runs in groups.items() for item in runs.items()]
    for variant, seed, folder in runs:
        color, style = f"C{seed % 10}", ":" if variant else "-"
        lines = MetricsLog.read(folder.metrics)
        steps = [line for line in lines if line.stage == "rl"]
        played = [line for line in lines if line.stage.startswith("evaluate/")]
        success = smoothed([line.metrics["rollout/success"] for line in steps])
        first = steps[0].metrics["rollout/episodes_total"] - steps[0].metrics["rollout/episodes"]
        episodes = [line.metrics["rollout/episodes_total"] - first for line in steps]
        minutes = [line.metrics["time/elapsed_s"] / 60 for line in steps]
        for axis, xs in zip(axes, (episodes, minutes), strict=True):
            label = f"seed {seed}{variant and f', {variant}'}"
            axis.plot(xs, success, style, color=color, label=label)
        evaluated = [episodes_at(line, steps, episodes) for line in played]
        times = [line.metrics["time/elapsed_s"] / 60 for line in played]
        held_out = [line.metrics["evaluate/success"] for line in played]
        for axis, xs in zip(axes, (evaluated, times), strict=True):
            axis.plot(xs, held_out, "o", color=color, markersize=4)
    axes[0].set(xlabel="RL episodes", ylabel="success", ylim=(0, 1))
    axes[1].set(xlabel="minutes since the start, SFT included")
    axes[0].legend(loc="best", frameon=False)
    figure.savefig(path, metadata={"Date": None})


def episodes_at(played: Line, steps: list[Line], episodes: list[float]) -> float:
    """RL episodes that had been played when an evaluation was made."""
    if played.stage == "evaluate/before":
        return 0.0
    if played.stage == "evaluate/after":
        return episodes[-1]
    return episodes[min(played.step, len(steps)) - 1]


def figures(folder: RunFolder) -> dict[str, Any]:
    """The entry of a seed in recipes.json."""
    evaluations, lines = read_evaluations(folder), MetricsLog.read(folder.metrics)
    last = next(line for line in reversed(lines) if line.stage == "rl")
    sft = max((n.metrics["rollout/episodes_total"] for n in lines if n.stage == "sft"), default=0)
    ends = {when: evaluations[f"{when} RL"].success for when in ("before", "after")}
    return {
        **{
            when: {"value": round(s.value, 4), "low": s.low, "high": s.high}
            for when, s in ends.items()
        },
        "minutes": round(lines[-1].metrics["time/elapsed_s"] / 60, 1),
        "episodes": int(last.metrics["rollout/episodes_total"] - sft),
    }


def seed_table(folders: dict[int, RunFolder]) -> str:
    rows = []
    for seed, folder in folders.items():
        evaluations = read_evaluations(folder)
        before, after = evaluations["before RL"], evaluations["after RL"]
        gain = compare(before, after).success
        seen = figures(folder)
        points = [100 * (value or 0) for value in (gain.value, gain.low, gain.high)]
        cells = [str(seed), interval(before), interval(after)]
        cells += ["{:+.1f} ({:+.1f} to {:+.1f})".format(*points), f"{gain.p_value:.2g}"]
        rows.append([*cells, f"{seen['minutes']:.1f}", f"{seen['episodes']:,}"])
    head = ("seed", "after SFT", "after RL", "gain, points", "paired p", "minutes", "RL episodes")
    return table(head, rows)


def tier_table(folders: dict[int, RunFolder]) -> str:
    """Mean over seeds of each tier's success."""
    ends = [read_evaluations(folder) for folder in folders.values()]

    def mean(tier: str, when: str) -> str:
        return f"{sum(end[when].tiers[tier].success.value for end in ends) / len(ends):.1%}"

    return tabulate(
        ends[0]["after RL"].tiers,
        ("tier", str),
        ("after SFT", lambda tier: mean(tier, "before RL")),
        ("after RL", lambda tier: mean(tier, "after RL")),
    )


def variant_table(name: str, folders: dict[int, RunFolder], others: dict[int, RunFolder]) -> str:
    """Both ends of the variant's runs, and the recipe's gain over them on the same tasks."""
    rows = []
    for seed, folder in others.items():
        ends = read_evaluations(folder)
        gain = compare(ends["after RL"], read_evaluations(folders[seed])["after RL"]).success
        points = [100 * (value or 0) for value in (gain.value, gain.low, gain.high)]
        cells = [str(seed), interval(ends["before RL"]), interval(ends["after RL"])]
        cells += ["{:+.1f} ({:+.1f} to {:+.1f})".format(*points), f"{gain.p_value:.2g}"]
        rows.append([*cells, f"{figures(folder)['minutes']:.1f}"])
    head = ("seed", f"{name}: after SFT", f"{name}: after RL", "the recipe's gain over it, points")
    return table((*head, "paired p", "minutes"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument("--note", default="")
    parser.add_argument("--variant", nargs="+", default=[], metavar=("NAME", "KEY=VALUE"))
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    variant = args.variant[0] if args.variant else ""
    folders = {s: run_of(args.recipe, s, args.overrides, args.runs_dir) for s in args.seeds}
    others = {
        s: run_of(args.recipe, s, [*args.overrides, *args.variant[1:]], args.runs_dir, variant)
        for s in (args.seeds if variant else [])
    }
    name, seeds = Path(args.recipe).stem, " ".join(map(str, args.seeds))
    draw(RESULTS / f"{name}.svg", {"": folders, variant: others} if variant else {"": folders})
    first = folders[args.seeds[0]]
    evaluations = read_evaluations(first)
    with RunStore.open(None, str(args.runs_dir), read_only=True) as store:
        versions = store.run(first.id).versions
    note = f"{args.note}\n\n" if args.note else ""
    compared, command = "", f"recipes/{name}.yaml --seeds {seeds}"
    if variant:
        compared = (
            f"The same recipe with `{shlex.join(args.variant[1:])}`:\n\n"
            f"{variant_table(variant, folders, others)}\n\n"
        )
        command += f" --variant {shlex.join(args.variant)}"
    text = f"""\
# The recipe {name}, {len(folders)} seeds

{evaluations["after RL"].num_tasks} held-out tasks, played greedily. Brackets: Wilson
intervals (95 %). p: Bonett and Price's test on the same tasks.

{seed_table(folders)}

{tier_table(folders)}

{compared}![Success over RL episodes and over time]({name}.svg)

Lines: success of sampled training episodes, mean over {WINDOW} steps. Dots: success on
held-out tasks.

{note}    python benchmarks/recipes.py {command}

## Machine

{", ".join(f"{package} {value}" for package, value in versions.items())}
"""
    (RESULTS / f"{name}.md").write_text(text)
    file = RESULTS / "recipes.json"
    results = json.loads(file.read_text()) | {name: {s: figures(f) for s, f in folders.items()}}
    file.write_text(json.dumps(results, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
