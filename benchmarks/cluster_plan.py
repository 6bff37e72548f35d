"""Simulated against measured steps of `ludus train`, on one core (docs/cluster-planning.md).

    python benchmarks/cluster_plan.py run [--rounds 3] [--runs-dir runs]   # train; about an hour
    python benchmarks/cluster_plan.py compare [--runs-dir runs]            # simulate; the table

Times are those of `quiet.py`: processor time, plus the time in which all wait, as on an idle core.
Those of the back end `ray` are of the clock on the wall: its processes share the machine's cores
with each other and with other load; the simulation gives each a core.
Each workload has one calibrating run a round, the first of it. All others are predicted from the
costs and the episodes of that run: `costs: {measured: RUN}`, and nothing else. The second column
corrects the costs by the time of the run's SFT stage, which does the same work in all runs of a
recipe: other load slows processor time too. The third takes the episodes of the predicted run
itself, and its share of groups that train: the rest of the error is not the policy's. Steps count
from the second on, without those at the end that start no more episodes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

from ludus.config.schema import RunConfig
from ludus.diagnostics.simulation.costs import Costs
from ludus.diagnostics.simulation.engine import Simulation
from ludus.diagnostics.simulation.plan import inputs_of, setup_of
from ludus.diagnostics.simulation.replica import PassCost
from ludus.diagnostics.simulation.spec import ClusterSpec
from ludus.store import RunStore

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "docs" / "benchmarks" / "cluster-plan"
SHORT = "tasks.heldout=null threads=1 report=false"
BABYAI = f"babyai-tiny {SHORT} demonstrations.num_episodes=128 sft.steps=10 rl.groups_per_step=16"
TEXTCRAFT = (
    f"textcraft-tiny {SHORT} demonstrations.num_episodes=400 demonstrations.timeout_s=120 "
    "sft.steps=40 rl.groups_per_step=8 rl.group_size=8"
)
RAY = "backend.name=ray backend.args.cpus=0.5 backend.args.samplers=2 backend.args.env_workers=2"
AHEAD = "rl.algorithm.args.importance_cap=2.0 rollout.deterministic=false rl.max_staleness"
SLOW = "env=slow_babyai:SlowBabyAI rollout.deterministic=false rl.steps=10"
LATENCY = {"p50": 0.05, "p99": 5.0}
ONE_CORE = {"nodes": {"gpus": 0, "cpu_cores": 1}, "layout": "local"}
ACTORS = {
    "nodes": {"count": 3, "gpus": 0, "cpu_cores": 2},
    "learner_gpus": 1,
    "environment_workers": 2,
}
SEEDS = 4


@dataclass(frozen=True)
class Row:
    """A setting: the name of its runs, of the runs that calibrate it, and its overrides."""

    name: str
    base: str
    text: str
    args: str


ROWS = (
    Row("abase", "abase", "BabyAI, 16 groups of 8 (calibrates)", f"{BABYAI} rl.steps=6"),
    Row("ac32", "abase", "concurrency 32", f"{BABYAI} rl.steps=6 rollout.concurrency=32"),
    Row("ag16", "abase", "groups of 16", f"{BABYAI} rl.steps=6 rl.group_size=16"),
    Row(
        "afree",
        "abase",
        "concurrency 32, not deterministic",
        f"{BABYAI} rl.steps=6 rollout.concurrency=32 rollout.deterministic=false",
    ),
    Row("csync", "abase", "latency, synchronous", f"{BABYAI} {SLOW}"),
    Row(
        "xs1",
        "abase",
        "latency, staleness 1, concurrency 128",
        f"{BABYAI} {SLOW} {AHEAD}=1 rollout.concurrency=128",
    ),
    Row(
        "xs2",
        "abase",
        "latency, staleness 2, concurrency 384",
        f"{BABYAI} {SLOW} {AHEAD}=2 rollout.concurrency=384",
    ),
    Row(
        "xs4",
        "abase",
        "latency, staleness 4, concurrency 640",
        f"{BABYAI} {SLOW} {AHEAD}=4 rollout.concurrency=640",
    ),
    Row(
        "rray",
        "abase",
        "Ray: 1 learner, 2 samplers, 2 environment workers",
        f"{BABYAI} rl.steps=8 {RAY}",
    ),
    Row("tbase", "tbase", "TextCraft, 8 groups of 8 (calibrates)", f"{TEXTCRAFT} rl.steps=6"),
    Row("tg16", "tbase", "groups of 16", f"{TEXTCRAFT} rl.steps=6 rl.group_size=16"),
    Row("tc16", "tbase", "concurrency 16", f"{TEXTCRAFT} rl.steps=6 rollout.concurrency=16"),
)


def train(rounds: int, runs_dir: str) -> None:
    """Run all settings in turn, round after round."""
    for _ in range(rounds):
        for row in ROWS:
            program = ["-m", "ludus"] if RAY in row.args else [str(HERE / "quiet_train.py")]
            command = [sys.executable, *program, "train"]
            command += [*row.args.split(), f"name={row.name}", f"runs_dir={runs_dir}"]
            subprocess.run(command, check=True, cwd=HERE)


def counted(steps: list[Any], staleness: int) -> list[Any]:
    """Steps after the first, without those that start no more episodes."""
    return steps[1 : len(steps) - staleness]


def measured_steps(store: RunStore, run: str) -> list[float] | None:
    """Seconds of a run's steps; None for a run that did not end."""
    row = store.run(run)
    rl = row.config["rl"]
    metrics = [step.metrics for step in store.steps(run, "rl")]
    if len(metrics) < rl["steps"]:
        return None
    steps = counted(metrics, rl["max_staleness"])
    return [m["time/wall_s"] - m["time/checkpoint_s"] for m in steps]


def slowness(store: RunStore, run: str, base: str) -> float:
    """Seconds of SFT, which does the same work in all runs of a recipe, relative to the base."""
    one, other = (
        median(step.metrics["time/wall_s"] for step in store.steps(name, "sft"))
        for name in (run, base)
    )
    return one / other


def scaled(costs: Costs, by: float) -> Costs:
    """The costs of a machine that is slower by this factor."""
    decoding = PassCost(fixed_s=costs.decoding.fixed_s * by, row_s=costs.decoding.row_s * by)
    names = ("prefill_token_s", "train_token_s", "turn_s")
    return replace(costs, decoding=decoding, **{name: getattr(costs, name) * by for name in names})


def predicted_steps(
    store: RunStore, run: str, base: str, runs_dir: str, *, own_episodes: bool, by: float
) -> list[float]:
    """Seconds of the steps, simulated with SEEDS seeds."""
    raw = {**store.run(run).config, "runs_dir": runs_dir}
    config = RunConfig.model_validate(raw)
    assert config.rl is not None
    spec = ClusterSpec.model_validate(
        {
            **(ACTORS if config.backend.name == "ray" else ONE_CORE),
            "costs": {"measured": base},
            "episodes": {"measured": run if own_episodes else base},
            "environment": {"latency": latency_of(config)},
            "simulate": {"steps": config.rl.steps, "warmup": 0},
        }
    )
    inputs = inputs_of(config, spec, None, 1.0, runs_dir)
    inputs = replace(inputs, costs=scaled(inputs.costs, by))
    found: list[float] = []
    for seed in range(SEEDS):
        setup = replace(setup_of(inputs, spec), ends=True, seed=seed)
        steps = Simulation(setup).run()
        found += [step.seconds for step in counted(steps, config.rl.max_staleness)]
    return found


def latency_of(config: RunConfig) -> dict[str, float] | None:
    """Of the environment; None: that of the run's episodes. In a run on Ray, these wait for cores
    too, which is no latency."""
    if "slow" in config.env.name:
        return LATENCY
    return {"constant": 0.0} if config.backend.name == "ray" else None


def compare(runs_dir: str) -> list[dict[str, Any]]:
    """Measured and predicted seconds of each setting."""
    rows = []
    with RunStore.open(None, runs_dir, read_only=True) as store:
        done = {
            run.id: seconds
            for run in store.runs()
            if run.status == "completed" and (seconds := measured_steps(store, run.id)) is not None
        }
        for row in ROWS:
            runs = [name for name in done if name.rsplit("-", 1)[0] == row.name]
            bases = [name for name in done if name.rsplit("-", 1)[0] == row.base]
            if not runs or not bases:
                continue
            found = [pair(store, runs_dir, done, name, nearest(name, bases)) for name in runs]
            rows.append({"setting": row.text, "runs": found})
            print(show(rows[-1]), flush=True)
    return rows


def nearest(run: str, bases: list[str]) -> str:
    """The calibrating run of the same round, else the last; for itself, another one."""
    number = int(run.rsplit("-", 1)[1])
    others = [base for base in bases if base != run] or bases
    return min(others, key=lambda base: abs(int(base.rsplit("-", 1)[1]) - number))


def pair(
    store: RunStore, runs_dir: str, done: dict[str, list[float]], run: str, base: str
) -> dict[str, Any]:
    """A run's measured and predicted seconds."""
    by = slowness(store, run, base)

    def predicted(own_episodes: bool, factor: float) -> list[float]:
        return predicted_steps(store, run, base, runs_dir, own_episodes=own_episodes, by=factor)

    at_its_speed = predicted(False, by)
    return {
        "run": run,
        "base": base,
        "measured": mean(done[run]),
        "slowness": by,
        "predicted": mean(predicted(False, 1.0)),
        "at_its_speed": mean(at_its_speed),
        "with_own_episodes": mean(predicted(True, by)),
        "measured_steps": [round(seconds, 3) for seconds in done[run]],
        "predicted_p10_p90": middle(at_its_speed),
    }


def middle(seconds: list[float]) -> tuple[float, float]:
    """The 10th and the 90th percentile."""
    tenths = quantiles(seconds, n=10, method="inclusive")
    return tenths[0], tenths[-1]


def show(row: dict[str, Any]) -> str:
    """A row of the table."""
    runs = row["runs"]

    def error(name: str) -> str:
        errors = [100 * (run[name] / run["measured"] - 1) for run in runs]
        spread = f" ({min(errors):+.0f} to {max(errors):+.0f})" if len(errors) > 1 else ""
        return f"{median(errors):+.0f} %{spread}"

    seconds = [run["measured"] for run in runs]
    spread = f" ({min(seconds):.2f} to {max(seconds):.2f})" if len(runs) > 1 else ""
    predicted = median(run["at_its_speed"] for run in runs)
    low, high = middle([s for run in runs for s in run["measured_steps"]])
    lows, highs = zip(*(run["predicted_p10_p90"] for run in runs), strict=True)
    cells = [
        row["setting"],
        str(len(runs)),
        f"{median(seconds):.2f}{spread}",
        f"{predicted:.2f}",
        error("predicted"),
        error("at_its_speed"),
        error("with_own_episodes"),
        f"{low:.2f} to {high:.2f}",
        f"{median(lows):.2f} to {median(highs):.2f}",
    ]
    return f"| {' | '.join(cells)} |"


HEADER = """\
| setting | runs | measured, s | predicted, s | error, raw | error, at the run's speed | and with \
its own episodes | steps measured, p10 to p90 | predicted |
|---|---|---|---|---|---|---|---|---|
"""


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    return HEADER + "\n".join(map(show, rows)) + "\n"


if __name__ == "__main__":
    arguments = dict(zip(sys.argv[2::2], sys.argv[3::2], strict=False))
    folder = str(Path(arguments.get("--runs-dir", "runs")).resolve())
    if sys.argv[1:2] == ["run"]:
        train(int(arguments.get("--rounds", "3")), folder)
    elif sys.argv[1:2] == ["compare"]:
        found = compare(folder)
        OUT.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        OUT.with_suffix(".md").write_text(table(found))
        print(table(found))
    else:
        sys.exit(__doc__)
