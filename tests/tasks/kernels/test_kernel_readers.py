"""KernelBench and the AI CUDA Engineer Archive, from samples of our own in their formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kernel_samples import (
    DOUBLE,
    FUNCTIONAL,
    FUSED,
    KERNEL,
    PRODUCT,
    ROW_SUM,
    STACK,
    kernel,
    module,
    problem,
)

from ludus.core.errors import ConfigError, DataError
from ludus.core.types import Spec
from ludus.tasks.kernels.difficulty import operations, parse
from ludus.tasks.readers import TaskList, read_tasks
from ludus.tasks.splits import check_disjoint

Rows = list[Any]


def write(path: Path, rows: Rows) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(reader: str, path: str | None = None, **args: Any) -> TaskList:
    on_bad_line = args.pop("on_bad_line", "refuse")
    given = args if path is None else {"path": path, **args}
    return read_tasks(Spec(name=reader, args=given), on_bad_line=on_bad_line)


def kernelbench(path: str | None = None, **args: Any) -> TaskList:
    return read("kernelbench", path, **args)


def archive(path: str | None = None, **args: Any) -> TaskList:
    return read("cuda_engineer_archive", path, **args)


PROBLEMS = [
    problem(3, PRODUCT),
    problem(7, FUSED, level=2),
    problem(3, STACK, level=3),
    problem(1, STACK, level=4),
]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_kernelbench_from_a_file(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"problems{suffix}", PROBLEMS)
    tasks = kernelbench(path)
    assert [(task.id, task.tier) for task in tasks] == [
        ("kernelbench:1/3", "easy"),
        ("kernelbench:2/7", "medium"),
        ("kernelbench:3/3", "hard"),
        ("kernelbench:4/1", "hard"),
    ]
    assert tasks[0].data == {"name": "3_ours", "number": 3, "level": 1, "reference": PRODUCT}
    assert tasks[0].source == path
    assert tasks.rows["kernelbench:2/7"] == 2
    assert [task.id for task in kernelbench(path, levels=[3, 2])] == [
        "kernelbench:2/7",
        "kernelbench:3/3",
    ]
    assert len(kernelbench(path, limit=3)) == 3


def test_kernelbench_from_a_folder_whose_files_tell_the_level(tmp_path: Path) -> None:
    write(tmp_path / "data" / "level_1.parquet", [problem(1), problem(2, ROW_SUM)])
    without = {k: v for k, v in problem(5, FUSED).items() if k != "level"}
    write(tmp_path / "data" / "level_2.jsonl", [without])
    folder = str(tmp_path / "data")
    assert [task.id for task in kernelbench(folder)] == [
        "kernelbench:1/1",
        "kernelbench:1/2",
        "kernelbench:2/5",
    ]
    (only,) = kernelbench(folder, levels=[2])
    assert (only.tier, only.data["level"]) == ("medium", 2)
    assert len(kernelbench(folder, limit=2)) == 2
    with pytest.raises(DataError, match=r"has no level_3\.parquet \(\.jsonl, \.json\)"):
        kernelbench(folder, levels=[3])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty has no level_1\.parquet"):
        kernelbench(str(tmp_path / "empty"))


CARD = """---
configs:
- config_name: default
  data_files:
{files}
---
"""


def hub(folder: Path, rows: dict[int, Rows]) -> None:
    """A data set in the working folder, which `datasets` finds by the hub's name."""
    files = "\n".join(f"  - split: level_{n}\n    path: level_{n}.parquet" for n in rows)
    for n, some in rows.items():
        write(folder / f"level_{n}.parquet", some)
    (folder / "README.md").write_text(CARD.format(files=files))


def test_both_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    hub(
        tmp_path / "ScalingIntelligence" / "KernelBench",
        {n: [problem(1, level=n), problem(2, ROW_SUM, level=n)] for n in (1, 2, 3, 4)},
    )
    hub(
        tmp_path / "SakanaAI" / "AI-CUDA-Engineer-Archive",
        {n: [kernel(4, Level_ID=n), kernel(4, "b", Level_ID=n)] for n in (1, 2, 3)},
    )
    assert [task.id for task in kernelbench(levels=[4, 1])] == [
        "kernelbench:4/1",
        "kernelbench:4/2",
        "kernelbench:1/1",
        "kernelbench:1/2",
    ]
    assert len(kernelbench()) == 8
    tasks = archive(unit="kernel")
    assert [task.id for task in tasks[:3]] == [
        "kernelbench:1/4/1",
        "kernelbench:1/4/2",
        "kernelbench:2/4/1",
    ]
    assert tasks[0].source == "SakanaAI/AI-CUDA-Engineer-Archive/level_1"
    assert [task.id for task in archive()] == [f"kernelbench:{n}/4" for n in (1, 2, 3)]


def test_an_absent_data_set_of_the_hub_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = "cannot load the data set ScalingIntelligence/KernelBench, split level_2"
    with pytest.raises(DataError, match=words):
        kernelbench(levels=[2])


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_the_archives_problems_come_once_without_kernels(tmp_path: Path, suffix: str) -> None:
    rows = [kernel(1, "a"), kernel(1, "b"), kernel(2, "a"), kernel(2, "c", CUDA_Code=None)]
    tasks = archive(write(tmp_path / f"rows{suffix}", rows))
    assert [task.id for task in tasks] == ["kernelbench:1/1", "kernelbench:1/2"]
    assert tasks[0].data == {
        "name": "1_ours",
        "number": 1,
        "level": 1,
        "reference": DOUBLE,
        "functional": FUNCTIONAL,
    }


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_what_the_archive_says_of_a_kernel_is_a_claim(tmp_path: Path, suffix: str) -> None:
    wrong = {"Correct": False, "Error": "mismatch", "Max_Diff": 0.5, "CUDA_Speedup_Native": None}
    rows = [kernel(1, "a"), kernel(1, "b", **wrong), kernel(1, "c", Correct=None)]
    path = write(tmp_path / f"rows{suffix}", rows)
    first, second, third = archive(path, unit="kernel")
    assert (first.data["kernel"], first.data["kernel_name"]) == (KERNEL, "a")
    assert first.data["claims"] == {
        "correct": True,
        "max_diff": 1e-6,
        "error": None,
        "runtime": 0.011,
        "runtime_native": 0.022,
        "runtime_compile": 0.033,
        "speedup_native": 2.0,
        "speedup_compile": 3.0,
    }
    assert (second.data["claims"]["correct"], second.data["claims"]["speedup_native"]) == (
        False,
        None,
    )
    assert second.data["claims"]["error"] == "mismatch"
    assert third.data["claims"]["correct"] is None
    for task in (first, second, third):
        others = set(task.data) - {"claims"}
        assert others == {
            "name",
            "number",
            "level",
            "reference",
            "functional",
            "kernel",
            "kernel_name",
        }
        assert task.answer is None
    assert [t.id for t in archive(path, unit="kernel", claimed_correct=True)] == [first.id]
    assert [t.id for t in archive(path, unit="kernel", claimed_correct=False)] == [second.id]


def test_a_claim_that_is_not_finite_is_none(tmp_path: Path) -> None:
    rows = [kernel(CUDA_Speedup_Native=float("nan"), Max_Diff=float("inf"))]
    (task,) = archive(write(tmp_path / "rows.parquet", rows), unit="kernel")
    assert task.data["claims"]["speedup_native"] is None
    assert task.data["claims"]["max_diff"] is None
    json.dumps(task.model_dump(mode="json"), allow_nan=False)


def test_a_held_out_problem_of_the_one_is_no_training_task_of_the_other(tmp_path: Path) -> None:
    train = archive(write(tmp_path / "rows.jsonl", [kernel(3)]))
    heldout = kernelbench(write(tmp_path / "problems.jsonl", [problem(3, PRODUCT), problem(4)]))
    with pytest.raises(DataError, match=r"1 of 2 held-out tasks are training tasks too"):
        check_disjoint(train, heldout)


BAD = [
    ("kernelbench", {"code": DOUBLE, "level": 1, "name": "x"}, "has no column 'problem_id'"),
    ("kernelbench", {"cod": DOUBLE}, "has no column 'code' (did you mean cod?)"),
    ("kernelbench", problem(code=None), "column 'code' must be a text, got None"),
    ("kernelbench", problem(code=" "), "column 'code' is empty"),
    ("kernelbench", problem(code="def f(:"), "column 'code' is not Python: invalid syntax in its"),
    ("kernelbench", problem(code="x = 1"), "'code' does not define Model and get_inputs"),
    ("kernelbench", problem(code="class Model: 0"), "'code' does not define get_inputs"),
    ("kernelbench", problem(code="x = '\0'"), "column 'code' is not Python"),
    ("kernelbench", problem(code="(" * 5000), "column 'code' is"),
    ("kernelbench", problem(code="-" * 100_000 + "1"), "column 'code' is nested too deeply"),
    ("kernelbench", problem(code="#" * 200_001), "has 200,001 characters; at most 200,000"),
    ("kernelbench", problem(level=5), "has level 5; known levels are 1, 2, 3, 4"),
    ("kernelbench", problem(level="1"), "column 'level' must be a whole number >= 0, got '1'"),
    ("kernelbench", problem(level=True), "column 'level' must be a whole number >= 0, got True"),
    ("kernelbench", problem(level=1.5), "column 'level' must be a whole number >= 0, got 1.5"),
    ("kernelbench", problem(number=-1), "column 'problem_id' must be a whole number >= 0, got -1"),
    ("kernelbench", problem(9, name=7), "column 'name' must be a text, got 7"),
    ("kernelbench", problem(1), "repeats problem 1 of level 1"),
    ("kernelbench", [1], "is not an object but list"),
    ("archive", {"Op_Name": "x", "Level_ID": 1}, "has no column 'PyTorch_Code_Module'"),
    ("archive", kernel(Task_ID=None), "column 'Task_ID' must be a whole number >= 0, got None"),
    ("archive", kernel(CUDA_Code=None), "column 'CUDA_Code' must be a text, got None"),
    ("archive", kernel(Correct="yes"), "column 'Correct' must be true, false or null, got 'yes'"),
    ("archive", kernel(Correct=1), "column 'Correct' must be true, false or null, got 1"),
    ("archive", kernel(CUDA_Speedup_Native="2x"), "'CUDA_Speedup_Native' must be a number or null"),
    ("archive", kernel(Error=3), "column 'Error' must be a text, got 3"),
    ("archive", kernel(PyTorch_Code_Functional=5), "'PyTorch_Code_Functional' must be a text"),
]


@pytest.mark.parametrize(("data_set", "bad", "reason"), BAD, ids=range(len(BAD)))
def test_a_malformed_row_is_refused_with_its_place_or_skipped(
    tmp_path: Path, data_set: str, bad: Any, reason: str
) -> None:
    good = problem(1) if data_set == "kernelbench" else kernel(1)
    path = write(tmp_path / "rows.jsonl", [good, bad])
    reader, args = (kernelbench, {}) if data_set == "kernelbench" else (archive, {"unit": "kernel"})
    with pytest.raises(DataError) as refused:
        reader(path, **args)
    said = str(refused.value)
    assert f"{path}: 1 malformed line (`tasks.on_bad_line: skip` skips them): line 2 " in said
    assert reason in said
    tasks = reader(path, on_bad_line="skip", **args)
    assert len(tasks) == 1
    assert [bad.number for bad in tasks.skipped] == [2]


def test_a_row_of_another_level_than_its_file(tmp_path: Path) -> None:
    path = write(tmp_path / "level_2.jsonl", [problem(1, level=1)])
    with pytest.raises(DataError, match="'level' is 1, but its file or split is of level 2"):
        kernelbench(path)


def test_arguments(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [kernel(1)])
    with pytest.raises(ConfigError, match="KernelBench has no level 5: its levels are 1, 2, 3, 4"):
        kernelbench(path, levels=[5])
    with pytest.raises(ConfigError, match="Archive has no level 4: its levels are 1, 2, 3"):
        archive(path, levels=[4])
    with pytest.raises(ConfigError, match="`revision` is of the hub, and `path` names a file"):
        archive(path, revision="main")
    with pytest.raises(ConfigError, match="`claimed_correct` is of kernels: set `unit: kernel`"):
        archive(path, claimed_correct=True)
    with pytest.raises(DataError, match=r"absent\.jsonl does not exist"):
        kernelbench(str(tmp_path / "absent.jsonl"))
    (tmp_path / "rows.csv").write_text("code\nx\n")
    with pytest.raises(DataError, match=r"must be one of \.parquet, \.jsonl, \.json"):
        kernelbench(str(tmp_path / "rows.csv"))
    with pytest.raises(DataError, match="gives no task"):
        archive(path, levels=[2])


def test_without_a_level_the_code_tells_the_difficulty(tmp_path: Path) -> None:
    codes = [DOUBLE, ROW_SUM, PRODUCT, FUSED, STACK, FUNCTIONAL]
    rows = [problem(n, code, level=None) for n, code in enumerate(codes)]
    tasks = kernelbench(write(tmp_path / "rows.jsonl", rows))
    assert [task.tier for task in tasks] == ["easy", "easy", "easy", "medium", "hard", "medium"]
    assert tasks[0].id == "kernelbench:x/0"
    assert "level" not in tasks[0].data


@pytest.mark.parametrize(
    ("code", "tier"),
    [
        (module("return x"), "easy"),
        (module('"\\d"; return x'), "easy"),
        (module("return torch.relu(x).view(4, -1).transpose(0, 1)"), "easy"),
        (module("return self.conv(x)", init="self.conv = nn.Conv2d(3, 8, 3)"), "easy"),
        (module("return self.conv(x) * 2", init="self.conv = nn.Conv2d(3, 8, 3)"), "medium"),
        (module("x = x @ x.T\n        return torch.softmax(x, dim=1)"), "medium"),
        (module("return self.rnn(x)[0]", init="self.rnn = nn.LSTM(16, 16)"), "hard"),
        (module("return x", before="class Block(nn.Module):\n    pass\n\n"), "hard"),
        (module("return x", before="from transformers import AutoModel\n"), "hard"),
        (module("\n        ".join(["x = torch.sin(torch.matmul(x, x))"] * 5)), "hard"),
    ],
)
def test_the_rule_by_code(code: str, tier: str) -> None:
    assert operations(parse(code)).tier == tier


def test_a_reference_is_never_run(tmp_path: Path) -> None:
    mark = tmp_path / "run"
    code = f"open({str(mark)!r}, 'w')\n" + DOUBLE
    kernelbench(write(tmp_path / "rows.jsonl", [problem(1, code, level=None)]))
    assert not mark.exists()
