import pytest

from ludus.core.errors import DataError
from ludus.core.types import Message, Spec, Task
from ludus.tasks.splits import check_disjoint, fingerprint


def tasks(numbers, prefix):
    return [Task(id=f"{prefix}-{n}", data={"seed": n}) for n in numbers]


def test_disjoint_splits_pass():
    check_disjoint(tasks(range(10), "train"), tasks(range(10, 20), "held"))
    check_disjoint(tasks(range(10), "train"), [])


def test_overlap_by_id():
    heldout = [Task(id=f"train-{n}", data={"seed": 100 + n}) for n in (3, 4)]
    with pytest.raises(DataError, match=r"^2 of 2 held-out .*: 2 by id \('train-3', 'train-4'\)\."):
        check_disjoint(tasks(range(10), "train"), heldout)


def test_overlap_by_content_under_another_id():
    with pytest.raises(
        DataError, match=r"^5 of 6 held-out .*5 by content \('held-5' is 'train-5', .*\.\.\.\)"
    ):
        check_disjoint(tasks(range(10), "train"), tasks(range(5, 11), "held"))


def test_the_fingerprint_is_of_what_is_asked():
    task = Task(id="a", prompt=[Message(role="user", content="q")], answer=1, data={"x": 1, "y": 2})
    same = task.model_copy(update={"id": "b", "tier": "t", "source": "s", "data": {"y": 2, "x": 1}})
    assert fingerprint(same) == fingerprint(task)
    for change in (
        {"prompt": []},
        {"answer": 2},
        {"answer": "1"},
        {"data": {"x": 1}},
        {"env": Spec(name="e")},
    ):
        assert fingerprint(task.model_copy(update=change)) != fingerprint(task)
