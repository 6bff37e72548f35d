"""The page of `success.py`: a table, and success over seconds."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

from common import RESULTS, table, two_axes, write

NAMES = {
    "ludus": "ludus",
    "rollout": "TRL, `rollout_func`",
    "environment": "TRL, `environment_factory`",
}
COLORS = {"ludus": "C0", "rollout": "C1", "environment": "C2"}


def reached(result: dict[str, Any], target: float) -> dict[str, float] | None:
    """The first point at or above the target, if there is one."""
    return next((point for point in result["points"] if point["success"] >= target), None)


def draw(path: Path, results: list[dict[str, Any]], target: float) -> None:
    """Held-out success over seconds of training, and over steps."""
    figure, axes = two_axes()
    told: set[str] = set()
    for result in results:
        name = NAMES[result["program"]].replace("`", "")
        for axis, what in zip(axes, ("seconds", "step"), strict=True):
            axis.plot(
                [point[what] for point in result["points"]],
                [point["success"] for point in result["points"]],
                "o-",
                color=COLORS[result["program"]],
                markersize=3,
                linewidth=1,
                label=None if name in told else name,
            )
        told.add(name)
    for axis, label in zip(axes, ("seconds of training", "steps"), strict=True):
        axis.axhline(target, color="0.5", linewidth=0.8, linestyle="--")
        axis.set(xlabel=label, ylim=(0, 1))
    axes[0].set(ylabel="held-out success")
    axes[0].legend(loc="lower right", frameon=False)
    figure.savefig(path, metadata={"Date": None})


def row_of(result: dict[str, Any], target: float) -> dict[str, str]:
    """The table's cells, by their headings."""
    point, steps = reached(result, target), result["steps"]
    last = result["points"][-1]
    num, sampled = len(steps), sum(step["sampled_tokens"] for step in steps)
    seconds, rollout_s = steps[-1]["seconds"], steps[-1]["rollout_s"]
    return {
        "seed": str(result["seed"]),
        "program": NAMES[result["program"]],
        f"s to {target:.0%}": (
            f"**{point['seconds']:.0f}**" if point else f"not in {last['seconds']:.0f}"
        ),
        "steps": str(num),
        "start": f"{result['points'][0]['success']:.1%}",
        "end": f"{last['success']:.1%}",
        "s per step": f"{seconds / num:.2f} ({rollout_s / num:.2f} of it rollout)",
        "tokens sampled": f"{sampled:,.0f}",
        "ms per sampled token": f"{1e3 * seconds / sampled:.2f}",
        "micro-batch": str(result["micro_batch"] or ""),
    }


def factors(results: list[dict[str, Any]], target: float) -> list[str]:
    """By how much ludus was there before each of the others, seed by seed."""
    ours = {r["seed"]: reached(r, target) for r in results if r["program"] == "ludus"}
    lines = []
    for name in (name for name in NAMES if name != "ludus"):
        theirs = [r for r in results if r["program"] == name and r["seed"] in ours]
        both = [(r["seed"], ours[r["seed"]], reached(r, target)) for r in theirs]
        told = [
            f"{b['seconds'] / a['seconds']:.1f} (seed {seed}; steps: {b['step']}, {a['step']})"
            for seed, a, b in both
            if a and b
        ]
        if told:
            lines.append(f"{NAMES[name]} / ludus, seconds to the target: {', '.join(told)}.")
    return lines


def publish(
    results: list[dict[str, Any]],
    facts: dict[str, Any],
    about: str,
    target: float,
    bound_s: float,
    note: str,
) -> None:
    rows = [row_of(result, target) for result in results]
    draw(RESULTS / "success.svg", results, target)
    seeds = " ".join(dict.fromkeys(str(result["seed"]) for result in results))
    trl = version("trl")
    text = f"""
# Time to success against TRL

{about}

{table(list(rows[0]), [list(row.values()) for row in rows])}

{chr(10).join(factors(results, target))}

![Held-out success over seconds and over steps](success.svg)

Both programs start from the same weights. They have the same tokenizer, tasks, groups, loss (GRPO,
clipped at 0.2, no KL term), temperature, tokens per turn, turns, AdamW, learning rate and warm-up.
They see the same texts, end episodes at the same point, and train on the sampled tokens only. Their
random numbers differ, so the curves differ like those of two seeds. A run stops after
{bound_s:.0f} seconds.

TRL {trl} is tuned: the fastest of the tested micro-batches, no reference model, no
checkpointing, fused AdamW, no logging. It plays turns in a `rollout_func` around `generate`. Its
`environment_factory` samples the same tokens from the same seed (a test checks this) in the same
time ([log](../log.md)). With it, an environment cannot end an episode directly, but TRL drops a
reply that exceeds the completion together with its call, and the conversation ends.

{note}

    python benchmarks/success.py --seeds {seeds}
"""
    write("success", text, facts, results, ("trl", "accelerate", "minigrid"))
