"""Generated kernel problems: their references run, and their outputs depend on every input."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ludus.config.schema import CurriculumConfig
from ludus.core.errors import ConfigError, DataError
from ludus.core.types import Spec
from ludus.kernels.verify.problem import KernelProblem
from ludus.tasks.kernels.difficulty import operations, parse
from ludus.tasks.kernels.generated import KINDS, operation_of, problem
from ludus.tasks.readers import TaskList, read_tasks
from ludus.tasks.splits import fingerprint
from ludus.tasks.tiers import TierSampler


def read(**args: Any) -> TaskList:
    return read_tasks(Spec(name="generated_kernels", args=args))


def reference(code: str) -> dict[str, Any]:
    """The names that a reference of ours defines; references of others are untrusted code."""
    names: dict[str, Any] = {}
    exec(compile(code, "reference", "exec"), names)
    return names


@pytest.mark.parametrize("kind", KINDS)
def test_references_run_and_their_outputs_depend_on_every_input(kind: str) -> None:
    for seed in range(40):
        task = problem(kind, seed)
        names = reference(task.data["reference"])
        model = names["Model"](*names["get_init_inputs"]())
        torch.manual_seed(seed)
        inputs = names["get_inputs"]()
        assert [list(tensor.shape) for tensor in inputs] == list(task.data["inputs"].values())
        out = model(*inputs)
        assert out.is_contiguous()
        assert out.dtype == torch.float32
        assert list(out.shape) == task.data["output"], task.data["reference"]
        assert out.isfinite().all()
        assert out.abs().max() > 0.01, "no tiny output"
        assert out.numel() == 1 or out.std() > 0.01, "no constant output"
        for i in range(len(inputs)):
            torch.manual_seed(1000 + seed)
            others = [torch.randn_like(x) if j == i else x for j, x in enumerate(inputs)]
            changed = model(*others)
            assert (changed - out).abs().max() > 0.01, (task.id, i)


@pytest.mark.parametrize("kind", KINDS)
def test_large_problems_have_shapes_for_a_gpu(kind: str) -> None:
    made = [operation_of(kind, seed, "large") for seed in range(20)]
    elements = [sum(map(_numel, one.inputs.values())) + _numel(one.output) for one in made]
    assert min(elements) > 100_000
    assert max(elements) < 1 << 28, "a gigabyte in all"


def _numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def test_a_problem_is_the_same_in_every_run() -> None:
    task = problem("fused", 3)
    assert task.id == "kernel:fused/small/3"
    assert task == problem("fused", 3)
    matmul = problem("matmul", 1)
    assert matmul.data["name"] == "a by transpose of b"
    assert matmul.data["inputs"] == {"a": [67, 25], "b": [64, 25]}
    assert matmul.data["output"] == [67, 64]
    assert matmul.data["signature"] == "void kernel(const float* a, const float* b, float* out)"


def test_operations_of_a_problem_are_known() -> None:
    assert problem("matmul", 1).data["flops"] == 2 * 67 * 25 * 64
    assert {problem("transpose", seed).data["flops"] for seed in range(20)} == {0}
    for kind in ("matmul", "convolution"):
        for seed in range(20):
            task = problem(kind, seed)
            names = reference(task.data["reference"])
            with FlopCounterMode(display=False) as counter:
                names["Model"]()(*names["get_inputs"]())
            assert task.data["flops"] == counter.get_total_flops(), task.id
    assert all(problem("fused", seed).data["flops"] > 0 for seed in range(20))
    assert KernelProblem.of(problem("matmul", 1)).flops == 214400.0


def test_problems_come_kind_by_kind_and_none_twice() -> None:
    tasks = read(num_problems=700)
    assert Counter(task.data["kind"] for task in tasks) == dict.fromkeys(KINDS, 100)
    assert Counter(task.tier for task in tasks) == {"easy": 200, "medium": 300, "hard": 200}
    assert len({task.data["reference"] for task in tasks}) == 700
    assert [t.data["kind"] for t in read(num_problems=3, kinds=["matmul", "fused"])] == [
        "matmul",
        "fused",
        "matmul",
    ]


def test_their_tiers_are_those_of_a_curriculum() -> None:
    until = {"score/compiled": 0.8, "success": 0.6, "score/speedup": 1.2}
    tiers = {"easy": {"until": until}, "medium": {"until": until}, "hard": {}}
    config = CurriculumConfig.model_validate({"tiers": tiers})
    order = TierSampler(read(num_problems=70), 0, True, config)
    assert {next(order).data["kind"] for _ in range(20)} == {"elementwise", "transpose"}


def test_held_out_problems_are_other_problems() -> None:
    train = {fingerprint(task) for task in read(num_problems=70)}
    spec = Spec(name="generated_kernels", args={"num_problems": 70})
    heldout = read_tasks(spec, taken=lambda task: fingerprint(task) in train)
    assert len(heldout) == 70
    assert not train & {fingerprint(task) for task in heldout}


def test_a_kind_without_further_problems() -> None:
    with pytest.raises(DataError, match="kind 'matvec': 2000 seeds in a row give no new problem"):
        read_tasks(
            Spec(name="generated_kernels", args={"num_problems": 2, "kinds": ["matvec"]}),
            taken=lambda task: True,
        )


def test_wrong_arguments() -> None:
    with pytest.raises(ConfigError, match=r"kinds\.0.*matmull.*did you mean matmul"):
        read(num_problems=1, kinds=["matmull"])
    with pytest.raises(ConfigError, match="num_problems"):
        read(num_problems=0)


def test_the_rule_by_code_knows_what_is_easy() -> None:
    """The tiers of kinds are a choice; by code, no product is as hard as a network."""
    by_code = {
        kind: {operations(parse(problem(kind, n).data["reference"])).tier for n in range(40)}
        for kind in KINDS
    }
    assert by_code["elementwise"] == by_code["transpose"] == {"easy"}
    assert all("hard" not in tiers for tiers in by_code.values())
