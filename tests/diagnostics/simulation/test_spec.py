"""The cluster's file: strict, with the place of each fault; and the command."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ludus.cli import app
from ludus.core.errors import ConfigError
from ludus.diagnostics.simulation.spec import Distribution, load_spec

ROOT = Path(__file__).parents[3]
LAPTOP = str(ROOT / "examples" / "clusters" / "laptop.yaml")
RECIPE = str(ROOT / "recipes" / "babyai-tiny.yaml")

NODE = "nodes: {count: 2, gpus: 8, kind: h100}\n"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("nodes: {cuont: 2}", r"nodes.cuont is not a key \(did you mean nodes.count\?\)"),
        ("layuot: local", r"layuot is not a key \(did you mean layout\?\)"),
        ("nodes: {count: 0}", r"nodes.count must be a whole number >= 1 .*, got 0"),
        (NODE + "layout: shared", r"layout must be .*local.*colocated.*disaggregated"),
        (NODE + "learner_gpus: 16", r"16 GPUs do not hold `learner_gpus: 16` and a sampler"),
        (NODE + "layout: colocated\nlearner_gpus: 4", r"belongs to `layout: disaggregated`"),
        (NODE + "gpus_per_sampler: 9\nlayout: colocated", r"exceeds a node's 8 GPUs"),
        (NODE + "layout: local", r"one node with at most one GPU"),
        (NODE + "cores: 4", r"`cores` is for processes that compute on CPUs: set `nodes.gpus: 0`"),
        (
            "nodes: {gpus: 0}\nlayout: local\ncores: 4",
            r"`cores` has no effect in `layout: local`, which is one process: set `nodes",
        ),
        (NODE + "environment_workers: 1000", r"exceeds the 128 cores of all nodes"),
        (
            "faults: {recovery_s: 60}",
            r"`recovery_s` has no effect without faults: set `node_mtbf_h`",
        ),
        ("currency: EUR", r"`currency` has no effect without `price_per_gpu_hour`"),
        (
            "nodes: {gpus: 0}\nlayout: local\nnetwork: {node_gb_s: 1}",
            r"`network` has no effect in `layout: local`",
        ),
        ("environment: {latency: {p50: 1}}", r"set `constant`, or both `p50` and `p99`"),
        ("environment: {latency: {p50: 2, p99: 1}}", r"`p99` must not be below `p50`"),
        ("environment: {latency: {constant: 1, p50: 1, p99: 2}}", r"set `constant`, or both"),
        ("episodes: {prompt: 10}", r"all of `prompt`, `turns`, `sampled` and `observed`"),
        ("costs: {train_mfu: 1.5}", r"costs.train_mfu must be .*<= 1"),
        ("faults: {node_mtbf_h: -1}", r"faults.node_mtbf_h must be"),
        ("network: fast", r"network must be a section"),
        ("nodes: {count: 2", r"line 1|line 2"),
        ("# no key", r"the file is empty: set at least one key"),
        ("nodes: {count: 1000000000}", r"nodes.count must be .*<= 100000"),
        (NODE + "network: {node_gb_s: 1.0e-300}", r"network.node_gb_s must be a number >= 1e-06"),
        (NODE + "costs: {decode_efficiency: 1.0e-320}", r"costs.decode_efficiency must be"),
        (NODE + "costs: {train_token_s: 1.0e+308}", r"costs.train_token_s must be"),
        (NODE + "costs: {pass_s: 0, row_s: 0}", r"costs.pass_s must be a number >= 1e-09"),
        (NODE + "costs: {measured: ''}", r"costs.measured must be text that is not empty"),
        (NODE + "environment: {latency: {p50: 1.0e-300, p99: 1}}", r"at most 1,000,000 times"),
        (NODE + "price_per_gpu_hour: 1.0e+308", r"price_per_gpu_hour must be"),
        (NODE + 'currency: "a\\nb"', r"currency must be text that matches"),
    ],
)
def test_a_wrong_file_names_place_and_remedy(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=fault) as raised:
        load_spec(str(path))
    assert str(path) in str(raised.value)


def test_absent_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file; see docs/cluster-planning\.md"):
        load_spec(str(tmp_path / "absent.yaml"))
    with pytest.raises(ConfigError, match="is a folder"):
        load_spec(str(tmp_path))


def test_overrides_reach_the_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(NODE)
    spec = load_spec(str(path), ["learner_gpus=12", "environment.latency={constant: 2}"])
    assert (spec.learners, spec.samplers) == (12, 4)
    assert spec.environment.latency == Distribution(constant=2)
    with pytest.raises(ConfigError, match="override learner_gpus=99"):
        load_spec(str(path), ["learner_gpus=99"])


def test_quantiles_of_a_distribution() -> None:
    latency = Distribution(p50=0.05, p99=5.0)
    assert latency.sigma == pytest.approx(math.log(100) / 2.3263479)
    assert latency.mean == pytest.approx(0.05 * math.exp(latency.sigma**2 / 2))
    assert Distribution(constant=3).mean == 3


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "clusters").glob("*.yaml")))
def test_the_examples_are_valid(path: Path) -> None:
    load_spec(str(path))


def plan(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", RECIPE, *args])
    error = result.exception if isinstance(result.exception, ConfigError) else ""
    return result.exit_code, f"{result.output}{error}"


@pytest.mark.parametrize(
    ("args", "fault"),
    [
        (["--advice"], "--advice belongs to --cluster"),
        (["--cluster", "absent.yaml"], "--cluster absent.yaml: no such file"),
        (["--cluster", LAPTOP, "--hardware", "h100"], "--hardware does not belong to --cluster"),
        (
            ["--cluster", LAPTOP, "cluster.nodes.kind=h1000"],
            "nodes.kind: there is no 'h1000' (did you mean",
        ),
        (["--cluster", LAPTOP, "rl=null"], "no `rl`"),
        (
            ["--cluster", LAPTOP, "cluster.simulate.scale=2"],
            "simulate.scale: 2 leaves less than one sampler, group a step, worker or episode: at "
            "most 1",
        ),
    ],
)
def test_wrong_calls_are_refused(args: list[str], fault: str) -> None:
    code, output = plan(*args, "--fill", "0.5")
    assert code
    assert fault in output


def test_the_command_prints_rates_and_what_they_rest_on() -> None:
    node = str(ROOT / "examples" / "clusters" / "node-8xh100.yaml")
    code, output = plan("--cluster", node, "--fill", "0.5", "cluster.simulate.steps=2")
    assert code == 0, output
    for words in (
        "4 train, 4 samplers of 1",
        "assumed: 0.35 of the peak",
        "(its data sheet)",
        "waiting for episodes",
        "episodes/s",
        "in use",
        "bottleneck",
        "cost",
    ):
        assert words in output
    assert "measured" not in output.replace("docs/benchmarks", "")


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ("environment: {latency: {constant: 1000000}}", r"environment.latency: no episode ends"),
        ("simulate: {steps: 1000000000}", r"more than simulate.max_events = 40,000,000: lower"),
        (
            "episodes: {prompt: 1.0e+6, turns: {constant: 5}, sampled: {constant: 9}, observed: 0}",
            r"episodes.prompt: 1e\+06 tokens leave no room for a turn",
        ),
    ],
)
def test_what_cannot_be_simulated_is_told(tmp_path: Path, more: str, fault: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(f"{NODE}{more}\n")
    done = CliRunner().invoke(app, ["plan", RECIPE, "--cluster", str(path), "--fill", "0.5"])
    assert isinstance(done.exception, ConfigError)
    assert re.search(fault, str(done.exception))
