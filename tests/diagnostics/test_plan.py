"""Plans: memory against torch's saved tensors, time against arithmetic, and the command."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_helpers import make_batch, make_samples, policy
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from ludus.cli import app
from ludus.config.load import load_config
from ludus.config.schema import OptimizerConfig, RunConfig
from ludus.core.errors import ConfigError
from ludus.diagnostics import episodes as played
from ludus.diagnostics import plan as planning
from ludus.diagnostics.episodes import Usage, measure
from ludus.diagnostics.hardware import HARDWARE, Hardware, find_hardware
from ludus.diagnostics.memory import Memory
from ludus.diagnostics.plan_lines import duration, lines
from ludus.train.algorithms.losses import cross_entropy
from ludus.train.learner import Learner
from ludus.train.optimizers.muon import make_optimizer

RECIPE = str(Path(__file__).parents[2] / "recipes" / "babyai-tiny.yaml")


def recipe(*changes: str) -> RunConfig:
    return load_config(RECIPE, list(changes))


@pytest.mark.parametrize("layers", [2, 5])
@pytest.mark.parametrize("inner", [384, 1024])
def test_activations_match_what_autograd_saves(layers: int, inner: int) -> None:
    """Counts each saved storage of the module once, without parameters."""
    args = f"model.architecture.args.num_layers={layers}"
    config = recipe(args, f"model.architecture.args.intermediate_size={inner}")
    shape = planning.shape_of(config)
    model = AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa")
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens, alive = 512, []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (alive.append(t), keep(t))[1], lambda t: t
    ):
        model.model(torch.randint(0, 100, (1, tokens)), use_cache=False)
    assert Memory(config, shape).activations() * tokens == pytest.approx(
        sum(kept.values()), rel=0.3
    )


def test_parameters_and_their_memory() -> None:
    found = planning.plan(recipe("model.dtype=bfloat16"), HARDWARE["h100"])
    model = AutoModelForCausalLM.from_config(planning.shape_of(recipe()))
    num = sum(p.numel() for p in model.parameters())
    assert found.num_parameters == num
    assert found.memory["weights"] == 2 * num
    # 256 episodes of 512 tokens, 4 layers, K and V, 2 heads of 32, 2 bytes
    assert found.memory["KV cache"] == 256 * 512 * 4 * 2 * 2 * 32 * 2
    on_gpu = ["model.device=cuda", "sampler={name: in_process, args: {dtype: bfloat16}}"]
    rounded = planning.plan(recipe(*on_gpu), HARDWARE["h100"])
    assert rounded.memory["weights"] == 4 * num
    assert rounded.memory["sampler's weights"] == 2 * num
    shared = planning.plan(recipe(on_gpu[0]), HARDWARE["h100"])
    assert "sampler's weights" not in shared.memory
    assert shared.seconds["rl: sampling"] > rounded.seconds["rl: sampling"]
    lora = planning.plan(recipe("model.lora={rank: 4}"), HARDWARE["h100"])
    assert lora.memory["optimizer"] < 0.2 * lora.memory["weights"]


@pytest.mark.parametrize(
    "changes",
    [
        [],
        ["model.dtype=bfloat16"],
        ["model.dtype=bfloat16", "learner.master_weights=stochastic_rounding"],
    ],
)
def test_the_state_of_muon(changes: list[str]) -> None:
    """One moment of a matrix of the layers; the plan counts the stage that needs more."""
    both = [*changes, "sft.optimizer.name=muon", "rl.optimizer.name=muon"]
    settings = recipe(*both)
    model = AutoModelForCausalLM.from_config(planning.shape_of(settings))
    model = model.to(getattr(torch, settings.model.dtype))
    assert settings.rl is not None
    optimizer = make_optimizer(
        model, list(model.parameters()), settings.rl.optimizer, settings.learner.master_weights
    )
    for parameter in model.parameters():
        wide = getattr(parameter, "grad_dtype", None) or parameter.dtype
        parameter.grad = torch.zeros_like(parameter, dtype=wide)
    optimizer.prepare()
    state = sum(value.nbytes for s in optimizer.state.values() for value in s.values())
    found = planning.plan(settings, HARDWARE["h100"]).memory["optimizer"]
    assert found == pytest.approx(state, rel=0.01)
    adamw = planning.plan(recipe(*changes), HARDWARE["h100"]).memory["optimizer"]
    one = planning.plan(recipe(*both[:-1]), HARDWARE["h100"]).memory["optimizer"]
    assert found < 0.85 * adamw
    assert one == adamw


@pytest.mark.parametrize("mode", ["float32", "stochastic_rounding"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_and_state_match_those_of_a_step(dtype: str, mode: str) -> None:
    """Bytes of what a learner holds between its backward pass and the next one."""
    if (dtype, mode) == ("float32", "stochastic_rounding"):
        with pytest.raises(
            ConfigError, match=r"stochastic_rounding` needs `model\.dtype: bfloat16"
        ):
            recipe(f"learner.master_weights={mode}")
        return
    changes = [f"model.dtype={dtype}", f"learner.master_weights={mode}"]
    found = planning.plan(recipe(*changes), HARDWARE["h100"])
    model = policy().to(getattr(torch, dtype))
    learner = Learner(model, OptimizerConfig(), 1, settings=recipe(*changes).learner)
    learner.forward_backward(make_batch(make_samples(3)), cross_entropy)
    learner.optimizer.prepare()
    num = sum(p.numel() for p in model.parameters())
    gradients = sum(p.grad.nbytes for p in model.parameters())
    state = sum(value.nbytes for s in learner.optimizer.state.values() for value in s.values())
    assert found.memory["gradients"] / found.num_parameters == gradients / num
    assert found.memory["optimizer"] / found.num_parameters == pytest.approx(state / num, rel=0.01)


HUNDRED = "rl.steps=100"


def test_time_depends_on_work_and_hardware() -> None:
    base = planning.plan(recipe(HUNDRED), HARDWARE["l4"])
    twice = planning.plan(recipe("rl.steps=200", "evaluate.every=0"), HARDWARE["l4"])
    for part in ("rl: sampling", "rl: training", "rl: environment"):
        assert twice.seconds[part] == pytest.approx(2 * base.seconds[part])
    assert planning.plan(recipe(HUNDRED), HARDWARE["h200"]).hours < base.hours
    assert planning.plan(recipe(HUNDRED), HARDWARE["l4"], fill=0.5).hours < base.hours
    grown = planning.plan(recipe(HUNDRED, "rl.horizon=[[0, 4], [50, 8]]"), HARDWARE["l4"])
    assert 0.5 * base.seconds["rl: sampling"] < grown.seconds["rl: sampling"]
    assert grown.seconds["rl: sampling"] < base.seconds["rl: sampling"]
    waits = planning.plan(recipe(HUNDRED), HARDWARE["l4"], env_step_s=0.1)
    alone = planning.plan(recipe(HUNDRED, "rollout.processes=1"), HARDWARE["l4"])
    two = planning.plan(recipe(HUNDRED, "rollout.processes=2"), HARDWARE["l4"])
    assert two.seconds["rl: environment"] == pytest.approx(alone.seconds["rl: environment"] / 2)
    more = waits.seconds["rl: environment"] - alone.seconds["rl: environment"]
    assert more == pytest.approx(100 * 8 * 0.1)


def test_peaks_of_small_machines_keep_their_digits() -> None:
    laptop = replace(HARDWARE["h200"], flops=9.3e9, flops32=140e9)
    [on] = [x for x in lines(recipe(), planning.plan(recipe(), laptop)) if "FLOP" in x]
    assert "9 GFLOP/s in bfloat16, 140 GFLOP/s in float32" in on
    [on] = [x for x in lines(recipe(), planning.plan(recipe(), HARDWARE["h200"])) if "FLOP" in x]
    assert "TFLOP/s in bfloat16" in on


def test_this_machine() -> None:
    here = find_hardware("here", recipe().model)
    assert here.source == "measured just now"
    assert here.memory > 2**30
    assert min(here.bandwidth, here.flops, here.flops32) > 0  # how much, depends on other load
    with pytest.raises(ConfigError, match=r"--hardware: there is no 'h20'.*h200"):
        find_hardware("h20", recipe().model)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_recipe_for_a_gpu_needs_a_named_gpu() -> None:
    with pytest.raises(
        ConfigError, match=r"--hardware here: model\.device is cuda, and this machine"
    ):
        find_hardware("here", recipe("model.device=cuda").model)


def run(*args: str) -> Any:
    return CliRunner().invoke(app, ["plan", RECIPE, *args])


def test_the_command_prints_cost_and_remedies() -> None:
    priced = run("--hardware", "l4", "budget.price_per_hour=1000", "budget.max_cost=0.01",
                 "budget.max_hours=0.0001", "budget.max_tokens=1000")  # fmt: skip
    assert priced.exit_code == 0
    assert " USD" in priced.output
    for limit in ("max_cost, 0.01", "max_hours, 0.0001", "max_tokens, 1,000"):
        assert f"budget.{limit}: the run may stop there" in priced.output
    big = run("--hardware", "t4", "rl.tokens_per_batch=4000000", "rl.groups_per_step=4096")
    assert big.exit_code == 1
    assert "out of memory: the largest part is activations: lower rl.tokens_per_batch" in big.output


def test_a_missing_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.path: there is no folder"):
        planning.plan(recipe("model={path: ./nowhere}"), HARDWARE["l4"])


CPU = Hardware("a laptop", memory=16e9, bandwidth=15e9, flops=140e9, flops32=140e9)
"""The two cores of docs/benchmarks, as `here` measures them."""

RECIPES = Path(__file__).parents[2] / "recipes"


QUIET = {
    "babyai-tiny": {"reset_s": 15e-5, "step_s": 6e-5, "expert_s": 12e-4},
    "textcraft-tiny": {"reset_s": 15e-5, "step_s": 5e-5, "expert_s": 6e-4},
    "webshop-tiny": {"reset_s": 2e-5, "step_s": 7e-5, "expert_s": 8e-4},
}
"""About the environments' seconds on two quiet cores: those of a busy machine would decide."""


def planned(name: str, on: Hardware) -> float:
    """Minutes of a recipe by its expert's episodes."""
    processes = [] if name == "webshop-tiny" else ["rollout.processes=2"]  # it plays in one
    config = load_config(str(RECIPES / f"{name}.yaml"), processes)
    usage = replace(measure(config), **QUIET[name])
    return planning.plan(config, on, usage=usage).hours * 60


@pytest.mark.parametrize("name", ["babyai-tiny", "textcraft-tiny", "webshop-tiny"])
def test_the_estimate_is_within_a_factor_two_of_measured_runs(name: str) -> None:
    """Measured under other load; the demo on two quiet cores."""
    if name == "webshop-tiny":
        pytest.importorskip("bm25s", reason="needs ludus-rl[webshop]")
    recorded = json.loads((RECIPES.parent / "docs/benchmarks/recipes.json").read_text("utf-8"))
    minutes = [seed["minutes"] for seed in recorded[name].values()]
    middle = (min(minutes) * max(minutes)) ** 0.5
    assert middle / 2 < planned(name, CPU) < 2 * middle


def test_a_fast_gpu_does_not_shorten_environments_and_set_up() -> None:
    fast, slow = (planned("babyai-tiny", on) for on in (HARDWARE["h200"], CPU))
    assert slow / 4 < fast < slow


def test_usage_is_that_of_the_experts_episodes() -> None:
    found = measure(recipe())
    assert found is not None
    assert 15 < found.prompt < 40  # `mission: go to the red ball. ...`
    assert 2 <= found.sampled <= 4  # `go forward`, end of turn
    assert 2 < found.turns < 8
    assert 0 < found.step_s < found.expert_s
    small = planning.plan(recipe(), CPU, usage=found)
    assert small.tokens < 0.5 * planning.plan(recipe(), CPU).tokens
    assert small.memory == planning.plan(recipe(), CPU).memory, "memory has to hold the largest"


def test_fill_scales_sizes_and_keeps_the_environments_seconds() -> None:
    config = load_config(str(RECIPES / "cuda-tiny.yaml"), ["rollout.max_turns=null"])
    usage = Usage(20, 7, 17, 1, reset_s=0.5, step_s=2.0, expert_s=3.0)
    found = planning.plan(config, CPU, fill=0.5, usage=usage)
    own = planning.plan(config, CPU, fill=0.5)
    episodes = 60 * 24 * 8
    more = found.seconds["rl: environment"] - own.seconds["rl: environment"]
    assert more == pytest.approx(episodes * 2.5)
    assert found.tokens == own.tokens
    assert found.seconds["demonstrations"] > 0
    given = planning.plan(config, CPU, fill=0.5, usage=usage, env_step_s=2.0)
    assert given.seconds["rl: environment"] < found.seconds["rl: environment"]


@pytest.mark.parametrize(
    ("changes", "at_once"),
    [
        (["env.args.parallel=3"], 3),
        (["env.args.parallel=1000"], 192),  # rollout.concurrency
        (["env.args.parallel=3", "backend={name: ray, args: {env_workers: 2}}"], 6),
    ],
)
def test_the_environments_calls_at_once_bound_its_steps(changes: list[str], at_once: int) -> None:
    config = load_config(str(RECIPES / "cuda-tiny.yaml"), ["rl.group_size=16", *changes])
    base, found = (planning.plan(config, CPU, fill=1, env_step_s=s) for s in (0.0, 3.0))
    for part, episodes in (("rl: environment", 60 * 24 * 16), ("evaluation", 2 * 240 + 120)):
        more = found.seconds[part] - base.seconds[part]
        assert more == pytest.approx(episodes * 3.0 / at_once), part


def test_measurements_of_sft_are_evaluations() -> None:
    every = ["sft.steps=90", "sft.until={every: 20, num_tasks: 50, samples_per_task: 2}"]
    config = load_config(str(RECIPES / "cuda-tiny.yaml"), ["sft.until=null"])
    measured = load_config(str(RECIPES / "cuda-tiny.yaml"), every)
    whole, found = (planning.plan(c, CPU, fill=1).seconds["evaluation"] for c in (config, measured))
    assert found / whole == pytest.approx((2 * 240 + 120 + 5 * 100) / (2 * 240 + 120), rel=0.01)


def test_demonstrations_with_code_are_measured_as_they_are_written() -> None:
    sums = "{name: env, args: {num_tasks: 4, tiers: [chain_sum]}}"
    changes = ["env=reasoning", "env.args.steps=false", f"tasks.train={sums}", "tasks.heldout=null"]
    changes += ["model.tokenizer={name: bpe}", "rollout.max_turns=null"]
    plain = measure(recipe(*changes))
    code = measure(recipe(*changes, "rollout.format=code", f"tools=[{PLAIN}]"))
    assert plain is not None
    assert code is not None
    assert (plain.turns, code.turns) == (1, 2)  # the code, then the answer
    assert (plain.calls, code.calls) == (0, 1)
    assert code.observed > plain.observed  # the results of the code
    assert code.sampled * code.turns > 2 * plain.sampled


PLAIN = "{name: python, args: {sandbox: 'plain_sandbox:PlainSandbox'}}"


def test_each_part_of_a_mixture_is_measured_with_its_own_markers() -> None:
    documents = "{name: ludus.envs.synthetic.facts:documents}"
    few = [
        f"tasks.train.args.parts.{part}.tasks.args.num_tasks=10"
        for part in ("code", "search", "maths")
    ]
    changes = [f"tools=[{PLAIN}, {documents}]", "tasks.heldout=null", *few]
    found = measure(load_config(str(RECIPES / "mixed-tiny.yaml"), changes))
    assert found is not None
    assert 0.4 < found.calls < 0.8  # 60 % of the tasks have a tool: search, maths


def tools_recipe(*changes: str) -> RunConfig:
    return load_config(str(RECIPES / "math-tool-tiny.yaml"), list(changes))


def test_tool_calls_take_time() -> None:
    usage = Usage(20, 7, 17, 2, expert_s=0.001, calls=1)
    config = tools_recipe()
    found = planning.plan(config, CPU, usage=usage, call_s=0.5)
    assert found.seconds["rl: tools"] == pytest.approx(40 * 16 * 8 * 0.5 / 64)
    assert found.seconds["evaluation: tools"] == pytest.approx((2 * 384 + 192) * 0.5 / 64)
    assert found.seconds["demonstrations: tools"] == pytest.approx(8000 * 0.5 * 0.5 / 2)
    assert "(tools: 1 calls an episode, as the expert; 0.5 s for each, 64 at the same time)" in (
        lines(config, found)
    )
    twice = planning.plan(config, CPU, usage=usage, call_s=0.5, num_calls=2)
    assert twice.seconds["rl: tools"] == 2 * found.seconds["rl: tools"]
    here = planning.plan(config, CPU, usage=usage)
    assert here.seconds["rl: tools"] > 5  # 79 s of one core
    assert "as a warm Python call, on" in "".join(lines(config, here))
    without = tools_recipe("tools=[]", "rollout.format=plain", "demonstrations.code_share=1")
    assert not [
        part for part in planning.plan(without, CPU, usage=usage).seconds if "tools" in part
    ]


def test_without_an_expert_episodes_use_their_calls_by_fill() -> None:
    config = tools_recipe()
    found = planning.plan(config, CPU, fill=0.5, call_s=1)  # 0.5 of 2 calls
    assert found.seconds["rl: tools"] == pytest.approx(40 * 16 * 8 / 64)
    silent = planning.plan(config, CPU, usage=Usage(20, 7, 17, 2))
    assert "rl: tools" not in silent.seconds
    assert any("--tool-calls sets" in line for line in lines(config, silent))


@pytest.mark.parametrize("group_size", [1, 8])
def test_a_groups_shared_prefixes_count_once(group_size: int) -> None:
    alike, apart = [
        planning._Estimate(recipe(), CPU, None, None, 1.0, 0.35, 0.0, Usage(20, 10, sampled, 5))  # type: ignore[arg-type]
        for sampled in (1e-6, 200)
    ]
    one = planning.Episodes(length=100, sampled=5e-6, turns=5, prompt=20)
    assert alike._distinct(one, group_size) == pytest.approx(1 / group_size, rel=1e-3)
    long = planning.Episodes(length=100, sampled=1000, turns=5, prompt=20)
    shared = (20 + group_size * 80) / (group_size * 100)
    assert apart._distinct(long, group_size) == pytest.approx(shared, rel=0.02)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("tasks.train.args.tiers=[GoToObjj]", "GoToObjj"),
        ("env={name: babyai, args: {levl: x}}", "levl"),
        ("env={name: babyai, args: {level: GoToObjj}}", "GoToObjj"),
    ],
)
def test_wrong_environments_and_tiers_are_refused(change: str, problem: str) -> None:
    refusal = run("--hardware", "l4", change).exception
    assert isinstance(refusal, ConfigError)
    assert problem in str(refusal)


def test_a_model_that_is_not_cached_is_refused_without_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: Any) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", forbidden)
    monkeypatch.setattr(socket, "getaddrinfo", forbidden)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    done = run("--hardware", "l4", "model={path: nobody/nothing-0.6b}")
    assert isinstance(done.exception, ConfigError)
    assert "model.path: nobody/nothing-0.6b is not in the local cache" in str(done.exception)
    assert "`hf download nobody/nothing-0.6b`" in str(done.exception)


def test_a_total_of_minutes_has_its_seconds() -> None:
    assert [duration(s, exact=True) for s in (59.0, 59.7, 131.2, 599.0, 599.6, 7200.0)] == [
        "59 s",
        "1 min 0 s",
        "2 min 11 s",
        "9 min 59 s",
        "10 min",
        "2.0 h",
    ]
    assert duration(131.2) == "2 min"


def test_a_plan_names_the_steps_that_its_times_are_of() -> None:
    """An algorithm, and episodes, that the file does not show: they are overridden or defaults."""
    config = recipe("rl.steps=1200", "rl.algorithm=dapo")
    text = "\n".join(lines(config, planning.plan(config, HARDWARE["l4"])))
    assert "(rl: dapo, 1,200 steps of 32 x 8 episodes)" in text


def test_an_environment_that_raises_is_told_with_its_task(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from ludus.envs.base import Env\n"
        "from ludus.core.types import Task\n"
        "class Mine(Env):\n"
        "    @classmethod\n"
        "    def task(cls, tier, seed):\n"
        "        return Task(id=f'mine/{seed}', data={'seed': seed})\n"
        "    async def reset(self, task):\n"
        "        return {}['lever']\n"
        "    async def step(self, action):\n"
        "        return None\n"
    )
    config = recipe(f"env={path}:Mine", "tasks.train.args.tiers=null", "tasks.heldout=null")
    with pytest.raises(ConfigError, match=r"task mine/\d+: KeyError: 'lever' \[mine.py, line 8\]"):
        measure(config)


def test_an_environment_that_raises_in_some_tasks_is_planned_by_the_others(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from ludus.envs.base import Env\n"
        "from ludus.core.types import Message, Observation, StepResult, Task\n"
        "class Mine(Env):\n"
        "    @classmethod\n"
        "    def task(cls, tier, seed):\n"
        "        return Task(id=f'mine/{seed}', data={'seed': seed})\n"
        "    async def reset(self, task):\n"
        "        self.doors = {} if task.data['seed'] % 4 else {'lever': 1}\n"
        "        return Observation(messages=[Message(role='user', content='pull')])\n"
        "    async def step(self, action):\n"
        "        return StepResult(messages=[], reward=float(1 / (1 - len(self.doors))),\n"
        "                          terminated=True)\n"
        "    def expert_action(self):\n"
        "        return 'lever'\n"
    )
    changes = [f"env={path}:Mine", "tasks.train.args.tiers=null", "tasks.heldout=null"]
    found = measure(recipe(*changes, "tasks.train.args.num_tasks=20"))
    assert found is not None
    assert found.turns == 1
    assert found.failed == (
        "5 of 20 episodes of the expert failed (task mine/0: ZeroDivisionError: division by zero "
        "[mine.py, line 11]): the estimate is of the others"
    )


TWO_LEVELS = """
import time
from ludus.envs.base import Env
from ludus.core.types import Message, Observation, StepResult, Task

class Mine(Env):
    blocking = True

    @classmethod
    def tiers(cls):
        return ["good", "bad"]

    @classmethod
    def task(cls, tier, seed):
        return Task(id=f"{tier}/{seed}", data={"seed": seed}, tier=tier)

    async def reset(self, task):
        if task.tier == "bad":
            FAULT
        return Observation(messages=[Message(role="user", content="pull")])

    async def step(self, action):
        return StepResult(messages=[], reward=1.0, terminated=True)

    def expert_action(self):
        return "lever"
"""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raise KeyError('lever')", "KeyError: 'lever' [mine.py, line 19]"),
        ("time.sleep(30)", "it took longer than 0 s"),
    ],
)
def test_all_levels_are_planned_though_they_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, said: str
) -> None:
    monkeypatch.setattr(played, "LONGEST_S", 0.4)
    path = tmp_path / "mine.py"
    path.write_text(TWO_LEVELS.replace("FAULT", fault))
    args = "{tiers: [good, bad], first_seed: 0, num_tasks: 2400}"
    changes = [f"env={path}:Mine", f"tasks.train.args={args}", "tasks.heldout=null"]
    found = measure(recipe(*changes))
    assert found is not None
    assert "episodes of the expert failed (task bad/" in found.failed
    assert said in found.failed
