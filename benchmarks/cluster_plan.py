"""Simulated against measured steps of `ludus train`, on one core (docs/cluster-planning.md).

    python benchmarks/cluster_plan.py run [--rounds 3] [--runs-dir runs]   # train; about an hour
    python benchmarks/cluster_plan.py compare [--runs-dir runs]            # simulate; the table

Times are those of `quiet.py`: processor time, plus the time in which all wait, as on an idle core.
Those of the back end `ray` are of the clock on the wall: its processes share the machine's two
cores, as far as other programs did not use them meanwhile, and so they do in the simulation.

Each workload has one calibrating run a round, the first of it. All others are predicted from the
costs and the episodes of that run: `costs: {measured: RUN}`, and nothing else. The second error
corrects the costs by the machine's speed during the run, relative to that during the calibrating
one: by work that is always the same, after each step (`speed.py`). The third has the latencies of
the run's environments, where others are drawn at random: they are inputs of both. The fourth also
takes the episodes of the predicted run itself, and its share of groups that train: the rest of the
error is not the policy's. A prediction is the mean of SEEDS simulated runs. Steps count from the
second on, without those at the end that start no more episodes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

from slow_babyai import Latencies

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
SLOW = "env.name=slow_babyai:SlowBabyAI env.args.seed=ROUND rollout.deterministic=false rl.steps=10"
LATENCY = {"p50": 0.05, "p99": 5.0}
ONE_CORE = {"nodes": {"gpus": 0, "cpu_cores": 1}, "layout": "local"}
CORES = 2
"""Of the machine."""

ACTORS = {
    "nodes": {"count": 3, "gpus": 0, "cpu_cores": 2},
    "cores": CORES,
    "learner_gpus": 1,
    "environment_workers": 2,
}
SEEDS = 8


@dataclass(frozen=True)
class Row:
    """A setting: the name of its runs, of the runs that calibrate it, and its overrides."""

    name: str
    base: str
    text: str
    args: str


ROWS = (
    Row("abase", "abase", "BabyAI, 16 groups of 8 (calibrates)", f"{BABYAI} rl.steps=8"),
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
    Row("tbase", "tbase", "TextCraft, 8 groups of 8 (calibrates)", f"{TEXTCRAFT} rl.steps=16"),
    Row("tg16", "tbase", "groups of 16", f"{TEXTCRAFT} rl.steps=16 rl.group_size=16"),
    Row("tc16", "tbase", "concurrency 16", f"{TEXTCRAFT} rl.steps=16 rollout.concurrency=16"),
)


def train(rounds: int, runs_dir: str) -> None:
    """Run all settings in turn, round after round."""
    for number in range(1, rounds + 1):
        for row in ROWS:
            subprocess.run(command_of(row, number, runs_dir), check=True, cwd=HERE)


def command_of(row: Row, number: int, runs_dir: str) -> list[str]:
    """The command of a row's run in a round."""
    clock = ["--wall"] if RAY in row.args else []
    command = [sys.executable, str(HERE / "quiet_train.py"), *clock, "train"]
    args = row.args.replace("ROUND", str(number)).split()
    return [*command, *args, f"name={row.name}", f"runs_dir={runs_dir}"]


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


def mean_of(store: RunStore, run: str, name: str) -> float:
    """A metric's mean over the steps that count."""
    steps = [step.metrics for step in store.steps(run, "rl")]
    staleness = store.run(run).config["rl"]["max_staleness"]
    return mean(step.get(name, 0.0) for step in counted(steps, staleness))


def slowness(store: RunStore, run: str, base: str) -> float:
    """Seconds of work that is always the same, relative to those in the calibrating run."""
    return mean_of(store, run, "machine/probe_s") / mean_of(store, base, "machine/probe_s")


def answers(store: RunStore, run: str, seed: int) -> Callable[[int, int], Iterator[float]]:
    """Latencies of the run's episodes, by the number of their group: those of its task."""
    per_step = store.run(run).config["rl"]["groups_per_step"]
    tasks: dict[int, str] = {}
    for stage in ("rl", "rl/left"):
        for step in store.steps(run, stage):
            for group in store.groups(run, stage, step.step):
                begun, place = re.fullmatch(r"rl-(\d+)/g(\d+)", group.id).groups()  # type: ignore[union-attr]
                tasks[int(begun) * per_step + int(place)] = group.task.id
    latencies = Latencies(LATENCY["p50"], LATENCY["p99"], seed)
    # A simulation may begin a group that the run did not: its latencies are other ones.
    return lambda group, attempt: latencies.of(tasks.get(group, f"group {group}"), attempt)


def scaled(costs: Costs, by: float) -> Costs:
    """The costs of a machine that is slower by this factor."""
    decoding = PassCost(
        **{part.name: getattr(costs.decoding, part.name) * by for part in fields(PassCost)}
    )
    names = ("prefill_token_s", "train_token_s", "turn_s", "turn_env_s")
    return replace(costs, decoding=decoding, **{name: getattr(costs, name) * by for name in names})


def predicted_steps(
    store: RunStore,
    run: str,
    base: str,
    runs_dir: str,
    *,
    by: float = 1.0,
    own_latencies: bool = False,
    own_episodes: bool = False,
) -> list[float]:
    """Seconds of the steps, simulated with SEEDS seeds."""
    raw = {**store.run(run).config, "runs_dir": runs_dir}
    config = RunConfig.model_validate(raw)
    assert config.rl is not None
    on_ray = config.backend.name == "ray"
    spec = ClusterSpec.model_validate(
        {
            **(ACTORS if on_ray else ONE_CORE),
            "costs": {"measured": base},
            "episodes": {"measured": run if own_episodes else base},
            "environment": {"latency": latency_of(config)},
            "simulate": {"steps": config.rl.steps, "warmup": 0},
        }
    )
    inputs = inputs_of(config, spec, None, 1.0, runs_dir)
    work = inputs.workload
    if own_latencies and "slow" in config.env.name:
        work = replace(work, answers=answers(store, run, config.env.args["seed"]))
    inputs = replace(inputs, costs=scaled(inputs.costs, by), workload=work)
    available = CORES - mean_of(store, run, "machine/others")
    found: list[float] = []
    for seed in range(SEEDS):
        setup = replace(setup_of(inputs, spec), ends=True, seed=seed)
        setup = replace(setup, cores=available) if on_ray else setup
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

    def predicted(**how: Any) -> list[float]:
        return predicted_steps(store, run, base, runs_dir, **how)

    at_its_speed = predicted(by=by)
    same = predicted(by=by, own_latencies=True)
    own = predicted(by=by, own_latencies=True, own_episodes=True)
    return {
        "run": run,
        "base": base,
        "measured": mean(done[run]),
        "slowness": by,
        "others": mean_of(store, run, "machine/others"),
        "predicted": mean(predicted()),
        "at_its_speed": mean(at_its_speed),
        "with_its_latencies": mean(same),
        "with_own_episodes": mean(own),
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
        error("with_its_latencies"),
        error("with_own_episodes"),
        f"{low:.2f} to {high:.2f}",
        f"{median(lows):.2f} to {median(highs):.2f}",
    ]
    return f"| {' | '.join(cells)} |"


HEADER = """\
| setting | runs | measured, s | predicted, s | error, raw | error, at the run's speed | and with \
its latencies | and with its own episodes | steps measured, p10 to p90 | predicted |
|---|---|---|---|---|---|---|---|---|---|
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
