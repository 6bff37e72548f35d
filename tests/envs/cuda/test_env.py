"""Kernels as an environment: turns, rewards, roles, and ends that say nothing of a kernel."""

from __future__ import annotations

import asyncio
import multiprocessing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ludus.core.errors import ConfigError, EnvError, ToolError, Unscorable
from ludus.core.types import Message, Spec, StepResult, Task
from ludus.envs import ENVS
from ludus.envs.checks import play
from ludus.envs.checks.check import check_env
from ludus.envs.cuda.env import Cuda
from ludus.envs.cuda.reward import KernelReward, Parts
from ludus.envs.cuda.workers import times_kernels, worker_of
from ludus.kernels.expert import WAYS, kernels_for
from ludus.kernels.verify.result import Verified
from ludus.tasks.kernels.generated import problem

pytestmark = pytest.mark.usefixtures("cpp")

TASK = problem("reduction", 3)  # of each row or column: see `test_the_opening`
PATIENT = {"run_s": 60.0, "parallel": 1}
GOOD, _, PLAIN = kernels_for(TASK)
"""Of full occupancy; a thread for each result, in blocks of 32 threads."""


def made(**args: Any) -> Cuda:
    return Cuda(**{**PATIENT, **args})  # type: ignore[arg-type]


def fenced(source: str) -> Message:
    return Message(role="assistant", content=f"```cuda\n{source}\n```")


async def played(env: Cuda, *sources: str, task: Task = TASK) -> list[StepResult]:
    await env.reset(task)
    return [await env.step(fenced(source)) for source in sources]


def spoilt(source: str) -> str:
    """The kernel with a wrong result in one place."""
    return source.replace("out[", "out[0] = 77.0f; out[", 1)


@pytest.mark.slow
async def test_the_environment_follows_the_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(play, "SLOW_S", 600.0)  # on a loaded machine too, nothing is left out
    found = await check_env("cuda", num_tasks=3, timeout_s=60.0)
    assert [finding for finding in found if finding.check != "speed"] == []  # of a loaded machine


async def test_the_opening_tells_reference_buffers_and_launch_lines() -> None:
    env = made()
    observation = await env.reset(TASK)
    text = observation.messages[0].content
    shape = TASK.data["inputs"]["a"]
    assert TASK.data["reference"].strip() in text
    assert f"a: float32 {shape}; out: float32 {TASK.data['output']}" in text
    assert "// launch: kernel<<<" in text
    assert observation.info == {"role": "generator"}
    bare = await made(guide=False).reset(TASK)
    assert "launch" not in bare.messages[0].content


@pytest.mark.parametrize("kind", WAYS)
async def test_the_expert_solves_problems_of_each_kind(kind: str) -> None:
    env, task = made(), problem(kind, 11)
    await env.reset(task)
    result = await env.step(Message(role="assistant", content=env.expert_action()))
    assert result.terminated
    assert result.reward is not None
    assert env.success_at <= result.reward <= 1.0
    assert env.scores()["correctness"] == 1.0
    assert result.messages[0].content.startswith("passed")
    assert "occupancy" in result.messages[0].content


@pytest.mark.parametrize(
    ("source", "status", "compiles"),
    [
        (spoilt(GOOD), "wrong", 1.0),
        (GOOD.replace("out[", "out[0] = NAN; out[", 1), "wrong", 1.0),
        (GOOD.replace("float", "flaot", 1), "compile_error", 0.0),
        (GOOD.replace("// launch:", "// start:"), "bad_launch", 0.0),
        ("__device__ int nothing;", "bad_launch", 0.0),
        ("#include <stdio.h>\n__global__ void k() { system(\"id\"); }", "refused", 0.0),
        ("__global__ void k() { while (true) {} }\n// launch: k<<<1, 1>>>()", "refused", 0.0),
    ],
)  # fmt: skip
async def test_a_kernel_that_is_not_right_fails(source: str, status: str, compiles: float) -> None:
    env = made()
    (result,) = await played(env, source)
    assert result.messages[0].content.startswith(f"{status}: ")
    assert env.scores()["compilation"] == compiles
    assert env.scores()["correctness"] == 0.0
    assert result.reward == pytest.approx(0.4 * compiles)
    assert result.reward < env.success_at
    assert result.info["success"] is False


@pytest.mark.slow
async def test_a_kernel_that_never_ends_is_stopped() -> None:
    env = made(run_s=8.0)
    loop = "for (int i = 0; i >= 0; i = (i + 1) & 1023) out[0] = i;"
    source = f"// launch: k<<<1, 1>>>(out)\n__global__ void k(float *out) {{ {loop} }}"
    (result,) = await played(env, source)
    assert result.messages[0].content.startswith("time_limit: ")
    assert result.reward == pytest.approx(0.4)


@pytest.mark.parametrize("text", ["", "I would tile it.", "```python\nx\n```", "no " * 350_000])
async def test_a_message_without_a_kernel_is_a_failure_that_is_told(text: str) -> None:
    env = made(rounds=2)
    await env.reset(TASK)
    result = await env.step(Message(role="assistant", content=text))
    assert result.messages[0].content.startswith("no kernel: ")
    assert result.reward == 0.0
    assert not result.terminated
    again = await env.step(fenced(GOOD))
    assert again.terminated
    assert again.reward is not None
    assert again.reward >= env.success_at


OUTSIDE = (
    "#include <mma.h>\n// launch: k<<<1, 32>>>(out)\n__global__ void k(float *out) {\n"
    "nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float> f;\n"
    "nvcuda::wmma::fill_fragment(f, 0.0f); out[0] = f.x[0]; }"
)


async def test_what_the_cpu_does_not_run_has_no_reward() -> None:
    with pytest.raises(Unscorable, match="unsupported"):
        await played(made(), OUTSIDE)
    with pytest.raises(Unscorable, match="unsupported"):
        await played(made(rounds=2), OUTSIDE, OUTSIDE)


async def test_what_the_cpu_does_not_run_takes_no_value_of_other_turns_away() -> None:
    """A failure of an earlier turn stays one: its episode was `unscorable`."""
    env = made(rounds=2)
    wrong, outside = await played(env, spoilt(GOOD), OUTSIDE)
    assert (wrong.reward, outside.reward) == (pytest.approx(0.4), None)
    assert outside.info["scores"]["best"] == pytest.approx(0.4)
    assert "turn_2" not in outside.info["scores"]
    outside, right = await played(env, OUTSIDE, GOOD)
    assert "Write it without that." in outside.messages[0].content
    assert outside.reward is None
    assert right.reward is not None
    assert right.reward >= env.success_at


async def test_what_the_cpu_does_not_run_counts_as_wrong_on_request() -> None:
    (outside,) = await played(made(unsupported="wrong"), OUTSIDE)
    (wrong,) = await played(made(), spoilt(GOOD))
    assert outside.reward == wrong.reward == pytest.approx(0.4)


@pytest.mark.parametrize("kind", ["parts", "kevin", "ladder"])
async def test_a_time_that_is_not_believed_is_no_fault_of_the_tools(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = made()
    env._timed, env._reward = True, KernelReward(kind=kind)  # type: ignore[arg-type]
    worker, told = env._worker, "0.1 us are not possible"

    async def verify(*args: Any) -> Verified:
        return replace(await worker.verify(*args), unbelieved=told, message=f"right; {told}")

    fake = SimpleNamespace(interface=worker.interface, verify=verify)
    monkeypatch.setattr("ludus.envs.cuda.env.worker_of", lambda settings: fake)
    (result,) = await played(env, GOOD)
    assert told in result.messages[0].content
    assert result.info["success"] is True
    assert "the time is not believed" in result.info["explanation"]
    assert result.reward == pytest.approx({"parts": 0.75, "kevin": 0.3, "ladder": -0.1}[kind])
    told = ""
    with pytest.raises(ToolError, match="has no speed-up: right"):
        await played(env, GOOD)


@pytest.mark.parametrize(
    ("expression", "problem"), [("a * 0", "within 0.01 of 0"), ("a", "equal"), ("b", "NameError")]
)
async def test_a_reference_that_tests_nothing_has_no_reward(expression: str, problem: str) -> None:
    code = (
        "import torch\nclass Model(torch.nn.Module):\n    def forward(self, a):\n"
        f"        return {expression}\ndef get_inputs():\n    return [torch.randn(8)]\n"
    )
    with pytest.raises(Unscorable, match=problem):
        await made().reset(Task(id="bad", data={"reference": code}))


async def test_a_task_without_a_reference_names_the_readers() -> None:
    with pytest.raises(Unscorable, match="generated_kernels"):
        await made().reset(Task(id="bad"))


async def test_an_episode_earns_its_best_value() -> None:
    env = made(rounds=4, stop_efficiency=1.0)
    kernels = ["nonsense", spoilt(PLAIN), PLAIN, GOOD]
    results = await played(env, *kernels)
    assert [r.terminated for r in results] == [False, False, False, True]
    assert GOOD != PLAIN
    scores = env.scores()
    rewards = [float(r.reward or 0.0) for r in results]
    assert rewards[0] == 0.0
    assert rewards[1] == pytest.approx(0.4)
    assert sum(rewards) == pytest.approx(scores["best"])
    assert scores["best"] == max(scores[f"turn_{i}"] for i in range(1, 5))
    assert env.success_at <= sum(rewards) <= env.score_range[1]
    lines = env.explanation().splitlines()
    assert [line.split(":")[0] for line in lines[::2]] == [
        "turn 1 (generator)", "turn 2 (generator)", "turn 3 (generator)", "turn 4 (optimiser)",
    ]  # fmt: skip
    bonus = ["improvement_bonus" in line for line in lines[1::2]]
    assert bonus == [False, False, False, True], "what improves on a wrong kernel earns no bonus"


async def test_a_worse_turn_takes_nothing_away() -> None:
    env = made(rounds=2, stop_efficiency=1.0)
    right, wrong = await played(env, PLAIN, spoilt(PLAIN))
    assert (right.reward or 0.0) > 0.4
    assert wrong.reward == 0.0


async def test_a_message_of_half_a_character_is_a_failure_that_is_told() -> None:
    (result,) = await played(made(), GOOD + "// \ud800")
    assert "a lone surrogate" in result.messages[0].content
    assert result.reward == 0.0


async def test_each_turn_of_a_template_kernel_has_other_inputs() -> None:
    """A report tells a wrong value and the right one: neither is of use in the next turn."""
    env = made(language="templates", rounds=3, guide=False)
    wrong = "thread 32 for i < out0\nout[i] = a[0, 0]"
    task = problem("reduction", 4)
    await env.reset(task)
    message = Message(role="assistant", content=wrong)
    told = [(await env.step(message)).messages[0].content.splitlines()[0] for _ in range(3)]
    assert all(text.startswith("wrong: ") for text in told)
    assert len({*told}) == 3


async def test_kevins_turns_have_values_of_their_own() -> None:
    env = made(
        rounds=3, reward=KernelReward(kind="kevin"), turn_rewards="scores", stop_efficiency=1.0
    )
    results = await played(env, PLAIN, spoilt(PLAIN), PLAIN)
    assert [r.reward for r in results] == pytest.approx([0.3, 0.0, 0.3])
    assert env.score_range == (0.0, pytest.approx(0.9))


async def test_a_right_kernel_ends_the_episode_early() -> None:
    (first,) = await played(made(rounds=4), PLAIN)
    assert first.terminated
    first, second = await played(made(rounds=2, stop_efficiency=1.0), PLAIN, PLAIN)
    assert (first.terminated, second.terminated) == (False, True)


async def test_the_optimiser_takes_over_a_right_kernel() -> None:
    env = made(rounds=4, stop_efficiency=1.0)
    first, second, third = await played(env, spoilt(PLAIN), PLAIN, spoilt(PLAIN))
    assert first.info["role"] == "generator"
    assert "conversation" not in first.info
    assert first.messages[0].content.endswith("Correct it. Answer with the whole kernel.")
    assert second.info["role"] == "optimiser"
    opening, kernel, found = second.info["conversation"]
    assert (opening["role"], kernel["role"], found["role"]) == ("user", "assistant", "user")
    assert TASK.data["reference"].strip() in opening["content"]
    assert PLAIN.strip() in kernel["content"]
    assert found["content"] == second.messages[0].content
    assert found["content"].endswith("make it more efficient. Answer with the whole kernel.")
    assert third.info["role"] == "optimiser"
    assert "conversation" not in third.info
    assert third.info["success"] is True


async def test_inputs_differ_from_kernel_to_kernel() -> None:
    """What one turn was told of the values helps no later one."""
    env = made(rounds=2)
    one, other = await played(env, spoilt(GOOD), spoilt(GOOD) + "// again")
    texts = [r.messages[0].content.splitlines()[0] for r in (one, other)]
    assert all(text.startswith("wrong: ") for text in texts)
    assert texts[0] != texts[1]


async def test_a_fault_of_the_sandbox_is_a_fault_of_the_tools() -> None:
    env = made(parallel=2)  # a worker of its own
    await env.reset(TASK)
    long = "for (int k = 0; k < 2000000000; k++) out[k & 1] = k * 0.5f;"
    source = f"// launch: k<<<64, 64>>>(out)\n__global__ void k(float *out) {{ {long} }}"
    step = asyncio.create_task(env.step(fenced(source)))
    shim = worker_of(env._settings)._verifier._shim._jail
    while not step.done():  # between two runs the jail only starts anew
        if shim._ground is not None and shim._slots:
            await asyncio.sleep(1.0)  # it builds or runs
            shim._ground.process.kill()  # type: ignore[attr-defined]
        await asyncio.sleep(0.05)
    with pytest.raises(ToolError):
        await step
    (result,) = await played(env, GOOD)  # the jail starts anew
    assert result.info["success"] is True


async def test_steps_need_an_episode() -> None:
    env = made()
    with pytest.raises(EnvError, match="call reset first"):
        await env.step(fenced(GOOD))
    await played(env, GOOD)
    with pytest.raises(EnvError, match="call reset first"):
        await env.step(fenced(GOOD))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"stop_efficiency": 0.5}, "one round"),
        ({"rounds": 2, "stop_speedup": 1.5}, "nothing is timed"),
        ({"turn_rewards": "scores"}, "one round"),
        ({"rounds": 2, "turn_rewards": "scores"}, "kind: kevin"),
        ({"reward": {"kind": "ladder"}}, "the ladder is one of speed-ups"),
        ({"reward": {"parts": {"performance": 0.3}}}, "parts.performance has no effect"),
        ({"reward": {"parts": {"performnce": 0.3}}}, "did you mean .*performance"),
        ({"reward": {"kind": "kevin", "parts": {}}}, "parts has no effect"),
        ({"language": "fortran"}, "language"),
        ({"architecture": "sm_1"}, "architecture"),
    ],
)
async def test_settings_without_effect_are_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ENVS.build(Spec(name="cuda", args=args), "env")


def test_references_run_outside_of_the_sandbox_only_where_they_are_trusted() -> None:
    with pytest.raises(ConfigError, match=r"timing: auto: .*set trust_references: true"):
        made(timing="auto")
    with pytest.raises(ConfigError, match="trust_references: nothing is timed"):
        made(trust_references=True)


def test_timing_needs_a_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match=r"timing: gpu: this machine has no CUDA device"):
        made(timing="gpu", trust_references=True)
    env = made(
        timing="auto",
        trust_references=True,
        rounds=2,
        stop_speedup=2.0,
        reward=KernelReward(parts=Parts(performance=1)),
    )
    assert env.success_at == pytest.approx(0.6 / 0.75)  # of the weights that are left


@pytest.mark.parametrize("architecture", ["sm_70", "sm_72", "sm_1", "sm_91"])
def test_an_architecture_without_a_compiler_is_refused_at_once(architecture: str) -> None:
    with pytest.raises(ConfigError, match=rf"architecture: '?{architecture}"):
        made(architecture=architecture)
    made(architecture="sm_75")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_that_nothing_is_timed_is_told_once_for_a_run(capfd: pytest.CaptureFixture[str]) -> None:
    """The processes that play the expert told it again."""
    child = multiprocessing.get_context("spawn").Process(
        target=times_kernels, kwargs={"required": False}
    )
    child.start()
    child.join()
    assert child.exitcode == 0
    assert "not timed" not in capfd.readouterr().err
