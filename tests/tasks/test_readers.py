import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from faulty_envs import NoSuchLevel

from ludus.core.errors import ConfigError, DataError
from ludus.core.types import Spec, Task
from ludus.envs.base import Env
from ludus.tasks import READERS
from ludus.tasks.readers import load_hf, read_tasks

GOOD = {"prompt": "What is 6 * 7?", "answer": "42", "topic": "arithmetic"}


class Levels(Env):
    """An environment's class, as far as tasks are concerned."""

    @classmethod
    def tiers(cls) -> Sequence[str]:
        return ("easy", "hard")

    @classmethod
    def task(cls, tier: str | None, seed: int) -> Task:
        return Task(id=f"{tier}-{seed}", data={"tier": tier, "seed": seed}, tier=tier)


@pytest.fixture
def lines(tmp_path):
    def write(*rows, name="tasks.jsonl"):
        path = tmp_path / name
        data = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in rows]
        path.write_bytes(b"\n".join(data) + b"\n")
        return str(path)

    return write


def read(path, **kwargs):
    on_bad_line = kwargs.pop("on_bad_line", "refuse")
    return read_tasks(
        Spec(name="json", args={"path": path, **kwargs}), "tasks.train", on_bad_line=on_bad_line
    )


def test_a_line_becomes_a_task(lines):
    path = lines(GOOD, b"", {"prompt": [{"role": "system", "content": "Hi"}], "answer": 3})
    first, second = read(path, env={"name": "babyai"}, judge="answer")
    assert first.id == f"{path}:1"
    assert first.prompt[0].role == "user"
    assert first.prompt[0].content == "What is 6 * 7?"
    assert first.answer == "42"
    assert first.data == {"topic": "arithmetic"}
    assert first.source == path
    assert first.env == Spec(name="babyai")
    assert first.judge == Spec(name="answer")
    assert second.id == f"{path}:3"
    assert second.prompt[0].role == "system"
    assert second.answer == 3


def test_fields_are_mapped_by_name(lines):
    row = {"question": "q?", "solution": 1, "key": 17, "level": 2, "kept": "k", "left": "l"}
    (task,) = read(
        lines(row), prompt="question", answer="solution", id="key", tier="level", data=["kept"]
    )
    assert (task.id, task.tier, task.answer, task.data) == ("17", "2", 1, {"kept": "k"})


def test_a_row_gives_the_consistency_of_its_answer(lines):
    rows = [{**GOOD, "p": 0.7}, {**GOOD, "p": 1}, {**GOOD, "p": None}]
    tasks = read(lines(*rows), consistency="p")
    assert [task.consistency for task in tasks] == [0.7, 1.0, None]
    assert "p" not in tasks[0].data
    for wrong in (1.5, -0.1, "0.7", True, [0.5]):
        with pytest.raises(DataError, match="line 1 field 'p' must be a number from 0 to 1"):
            read(lines({**GOOD, "p": wrong}), consistency="p")


def test_a_row_names_the_tools_of_its_task(lines):
    rows = [
        {**GOOD, "prompt": str(n), "has": names} for n, names in enumerate((["a", "b"], [], None))
    ]
    tasks = read(lines(*rows), tools="has")
    assert [task.tools for task in tasks] == [["a", "b"], [], None]
    assert "has" not in tasks[0].data
    assert [task.tools for task in read(lines(*rows))] == [None] * 3
    for wrong in ("a", [1], {"a": 1}):
        with pytest.raises(DataError, match=r"line 1 field 'has' must be a list of names or null"):
            read(lines({**GOOD, "has": wrong}), tools="has")
    with pytest.raises(DataError, match=r"no row has the field 'tools' \(fields: prompt"):
        read(lines(GOOD), tools="tools")


def test_limit_stops_reading_before_what_follows(lines):
    tasks = read(lines(GOOD, {**GOOD, "prompt": "b"}, b"{not json"), limit=2)
    assert len(tasks) == 2


BAD = {
    b'{"prompt": ': "is not JSON: ",
    b"[1, 2]": "is not an object but list",
    b'{"promt": "x", "answer": 1}': "has no field 'prompt' (did you mean promt?)",
    b'{"prompt": "x"}': "has no field 'answer' (known: prompt): set the reader's `answer` to "
    "the field that holds it, or to null where judge and environment need no answer",
    b'{"prompt": 7, "answer": 1}': "field 'prompt' must be a text or a list of messages, got 7",
    b'{"prompt": [{"role": "boss"}], "answer": 1}': "field 'prompt', message 0.role: ",
    b'{"prompt": "  ", "answer": 1}': "field 'prompt' is empty",
    b'{"prompt": "x", "answer": NaN}': "has NaN, which is not JSON",
    b'{"prompt": "\xff", "answer": 1}': "is not UTF-8 (byte 12)",
    b"[" * 200_000: "is nested too deeply",
}


@pytest.mark.parametrize(("bad", "reason"), BAD.items(), ids=list(range(len(BAD))))
def test_a_malformed_line_is_refused_or_skipped_with_number_and_reason(lines, bad, reason):
    path = lines(GOOD, bad, {**GOOD, "prompt": "other"})
    with pytest.raises(DataError) as refused:
        read(path)
    assert f"{path}: 1 malformed line" in str(refused.value)
    assert f"line 2 {reason}" in str(refused.value)

    tasks = read(path, on_bad_line="skip")
    assert [task.id for task in tasks] == [f"{path}:1", f"{path}:3"]
    (skipped,) = tasks.skipped
    assert skipped.number == 2
    assert skipped.reason.startswith(reason)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "x", "ans', "Unterminated string starting at column 17"),
        (b'{"prompt": "x", "answer":\r', "Expecting value at column 26"),
        (b'{"prompt": "x"', "Expecting ',' delimiter at column 15"),
        (b'{"prompt": "\t"}', "Invalid control character at column 13"),
    ],
)
def test_a_line_that_is_cut_off_has_its_number_and_column(lines, line, reason):
    with pytest.raises(DataError) as refused:
        read(lines(GOOD, line))
    assert str(refused.value).endswith(f"line 2 is not JSON: {reason}")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
def test_another_encoding_is_told_once(tmp_path, encoding):
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n" * 9, encoding=encoding)
    with pytest.raises(DataError) as refused:
        read(str(path))
    name = encoding.upper()
    assert str(refused.value) == (
        f"{path} is in {name}, and has to be in UTF-8: `iconv -f {name} -t UTF-8 {path} > "
        "NEW_FILE` converts it"
    )


def test_many_bad_lines_are_counted_and_the_first_named(lines):
    path = lines(GOOD, *[b"x"] * 9)
    with pytest.raises(DataError, match=r"9 malformed lines .*line 2 .*line 6 .*; and 4 more$"):
        read(path)


def test_files_that_hold_nothing_usable(lines, tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        read(str(tmp_path / "absent.jsonl"))
    with pytest.raises(DataError, match="is a folder"):
        read(str(tmp_path))
    with pytest.raises(DataError, match=r"tasks.train gives no task$"):
        read(lines(b"", name="empty.jsonl"))
    with pytest.raises(DataError, match="all 1 lines are malformed"):
        read(lines(b"x", name="bad.jsonl"), on_bad_line="skip")


def test_duplicate_ids_are_refused(lines):
    path = lines({**GOOD, "id": "a"}, {**GOOD, "id": "b"}, {**GOOD, "id": "a"})
    with pytest.raises(DataError, match=r"1 ids belong to more than one task.*'a'"):
        read(path, id="id")


def test_wrong_arguments_are_refused_with_their_path(lines):
    with pytest.raises(ConfigError, match=r"tasks.train.args.pth is not an argument"):
        read_tasks(Spec(name="json", args={"pth": "x"}), "tasks.train")
    with pytest.raises(ConfigError, match=r"'jsn' is not a known reader \(did you mean json\?\)"):
        read_tasks(Spec(name="jsn"), "tasks.train")


@pytest.mark.parametrize("name", READERS.names())
def test_every_reader_documents_its_arguments(name):
    fields = READERS.arguments(name).model_fields
    assert fields
    assert all(field.description for field in fields.values())


def environment(**args):
    return read_tasks(Spec(name="env", args=args), "tasks.train", maker=Levels)


def test_env_tasks_walk_the_tiers_then_the_seeds():
    tasks = environment(num_tasks=5, first_seed=10)
    assert [t.id for t in tasks] == ["easy-10", "hard-10", "easy-11", "hard-11", "easy-12"]
    assert [t.id for t in environment(num_tasks=2, tiers=["hard"])] == ["hard-0", "hard-1"]


def test_tasks_that_are_taken_are_replaced_by_further_seeds_of_their_tier():
    def taken(task):
        return task.id in {"easy-1", "hard-1", "easy-2", "easy-4"}

    spec = Spec(name="env", args={"num_tasks": 6})
    tasks = read_tasks(spec, maker=Levels, taken=taken)
    assert [t.id for t in tasks] == ["easy-0", "hard-0", "easy-3", "hard-3", "easy-5", "hard-2"]
    with pytest.raises(DataError, match=r"tier easy: .* 1000 seeds in a row, 1 to 1000.* fewer"):
        read_tasks(Spec(name="env", args={"num_tasks": 1}), maker=Levels, taken=lambda _: True)


def test_an_environment_with_one_task_only_is_told():
    class One(Levels):
        @classmethod
        def task(cls, tier, seed):
            return Task(id=f"{tier}-{seed}", tier=tier, data={"size": 3})

    tasks = read_tasks(Spec(name="env", args={"num_tasks": 3}), maker=One)
    assert len(tasks) == 3
    with pytest.raises(DataError, match=r"One\.task\('easy', seed\) makes the same .* Task\.data"):
        read_tasks(Spec(name="env", args={"num_tasks": 1}), maker=One, taken=lambda _: True)


def test_a_method_that_makes_no_task_is_named():
    class Wrong(Levels):
        @classmethod
        def task(cls, tier, seed):
            return {"id": "1"}

    with pytest.raises(ConfigError, match=r"Wrong\.task\('easy', 0\) returned {'id': '1'}; it has"):
        read_tasks(Spec(name="env", args={"num_tasks": 2}), maker=Wrong)


def test_env_tasks_without_tiers_or_environment():
    class Plain(Levels):
        @classmethod
        def tiers(cls):
            return ()

    spec = Spec(name="env", args={"num_tasks": 2})
    assert [t.tier for t in read_tasks(spec, maker=Plain)] == [None, None]
    with pytest.raises(ConfigError, match="set the config's `env`"):
        read_tasks(spec)
    with pytest.raises(ConfigError, match=r"'esy' is not a tier of Levels \(did you mean easy\?\)"):
        environment(num_tasks=2, tiers=["esy"])
    with pytest.raises(ConfigError, match=r"tasks.train.args.num_tasks"):
        environment(num_tasks=0)


@pytest.fixture
def hf(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()

    def read(path, **args):
        on_bad_line = args.pop("on_bad_line", "refuse")
        spec = Spec(name="hf", args={"path": str(path), "prompt": "question", **args})
        return read_tasks(spec, "tasks.train", on_bad_line=on_bad_line)

    read.rows = datasets.Dataset.from_list(
        [{"question": f"{i} + {i}?", "answer": str(2 * i), "level": i % 2} for i in range(4)]
    )
    read.by_split = datasets.DatasetDict
    return read


def test_hf_reads_a_saved_data_set(hf, tmp_path):
    rows = hf.rows.add_column("has", [["a"], None, [], ["b"]])
    rows.save_to_disk(str(tmp_path / "one"))
    assert [t.tools for t in hf(tmp_path / "one", tools="has")] == [["a"], None, [], ["b"]]
    tasks = hf(tmp_path / "one", tier="level", limit=3)
    assert [(t.answer, t.tier) for t in tasks] == [("0", "0"), ("2", "1"), ("4", "0")]
    assert tasks[0].id == f"{tmp_path / 'one'}/train:1"

    hf.by_split(train=hf.rows, test=hf.rows.select([3])).save_to_disk(str(tmp_path / "two"))
    assert [t.answer for t in hf(tmp_path / "two", split="test")] == ["6"]
    with pytest.raises(DataError, match=r"has no split 'tst' \(did you mean test\?\)"):
        hf(tmp_path / "two", split="tst")


def test_hf_reads_a_file_and_a_folder(hf, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    hf.rows.to_parquet(str(folder / "train.parquet"))
    assert [t.answer for t in hf(folder / "train.parquet", split="train[1:3]")] == ["2", "4"]
    assert len(hf(folder)) == 4


def test_hf_names_what_is_wrong(hf, tmp_path):
    hf.rows.add_column("text", ["a", "", "b", "c"]).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match=r"has no column 'anser' \(did you mean answer\?\)"):
        hf(tmp_path / "saved", answer="anser")
    with pytest.raises(DataError, match=r"line 2 field 'text' is empty"):
        hf(tmp_path / "saved", prompt="text")
    assert len(hf(tmp_path / "saved", prompt="text", on_bad_line="skip").skipped) == 1
    with pytest.raises(DataError, match="cannot load the data set"):
        hf(tmp_path / "nothing" / "here")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DataError, match=r"must be one of \.jsonl"):
        hf(tmp_path / "notes.txt")


def test_a_lone_surrogate_is_a_malformed_line(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "\\uD800", "answer": "b"}\n')
    spec = Spec(name="json", args={"path": str(path)})
    with pytest.raises(DataError, match=r"line 2 has a lone surrogate, \\ud800"):
        read_tasks(spec, "tasks.train")
    tasks = read_tasks(spec, "tasks.train", on_bad_line="skip")
    assert [bad.number for bad in tasks.skipped] == [2]
    assert tasks.rows == {f"{path}:1": 1}
    path.write_text('{"prompt": "\\ud83d\\ude00", "answer": "a pair is a character"}\n')
    assert len(read_tasks(spec, "tasks.train")) == 1


@pytest.mark.parametrize(("name", "shown"), [("os:getcwd", "'/'"), ("builtins:print", "None")])
def test_what_gives_no_task_is_refused(name, shown, monkeypatch):
    monkeypatch.chdir("/")
    with pytest.raises(
        ConfigError, match=f"^tasks.train: '{name}' gives {shown}, not a task: name"
    ):
        read_tasks(Spec(name=name), "tasks.train")


def test_an_environment_that_cannot_make_a_task_is_told_with_its_line():
    said = (
        r"^tasks.train: \w+.task\(None, 0\) raised KeyError: 'level' \[faulty_envs.py, line \d+\]"
    )
    with pytest.raises(DataError, match=said):
        read_tasks(Spec(name="env", args={"num_tasks": 1}), "tasks.train", maker=NoSuchLevel())


def test_a_file_that_does_not_exist_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="needs the extra data")
    (tmp_path / "rev.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"no file .*rev\.json \(did you mean rev\.jsonl\?\)"):
        load_hf(str(tmp_path / "rev.json"), None, "train", None)
