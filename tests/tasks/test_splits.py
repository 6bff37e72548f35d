import pytest

from ludus.core.errors import DataError
from ludus.core.types import Message, Spec, Task
from ludus.tasks.splits import check_disjoint, fingerprint, task_key


def tasks(numbers, prefix):
    return [Task(id=f"{prefix}-{n}", data={"seed": n}) for n in numbers]


def test_disjoint_splits_pass():
    check_disjoint(tasks(range(10), "train"), tasks(range(10, 20), "held"))
    check_disjoint(tasks(range(10), "train"), [])


def test_overlap_by_id():
    heldout = [Task(id=f"train-{n}", data={"seed": 100 + n}) for n in (3, 4)]
    with pytest.raises(
        DataError, match=r"^2 of 2 held-out .*: 'train-3' has the id of 'train-3'; 'train-4' has"
    ):
        check_disjoint(tasks(range(10), "train"), heldout)


def test_overlap_by_content_under_another_id():
    with pytest.raises(
        DataError, match=r"^5 of 6 held-out .* 'held-5' has the content of 'train-5'; .* and 2 more"
    ):
        check_disjoint(tasks(range(10), "train"), tasks(range(5, 11), "held"))


def asked(id, prompt, answer=None, **data):
    return Task(id=id, prompt=[Message(role="user", content=prompt)], answer=answer, data=data)


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (asked("b", "1 + 1?", 2), True),
        (asked("b", " 1 +  1?\n", 2), True),
        (asked("b", "1 + 1?", 2, row=9, difficulty="low"), True),
        (asked("b", "1 + 1?", 3), False),
        (asked("b", "1 + 2?", 2), False),
    ],
)
def test_tasks_from_files_are_compared_by_prompt_and_answer(other, same):
    train = [asked("a", "1 + 1?", 2, row=1)]
    if not same:
        check_disjoint(train, [other])
        return
    with pytest.raises(DataError, match=r"^1 of 1 held-out"):
        check_disjoint(train, [other])


def test_a_key_is_of_the_world_where_it_is_known():
    one, two = Task(id="a", data={"seed": 1}), Task(id="b", data={"seed": 2})
    assert task_key(one) != task_key(two)
    assert task_key(one, "red ball") == task_key(two, "red ball") != task_key(two, "red box")
    told = asked("c", "be brief")
    assert task_key(told, "red ball") != task_key(one, "red ball")
    # A prompt alone does not tell tasks of an environment apart: they have data.
    assert task_key(asked("d", "play", seed=1), has_env=True) != task_key(
        asked("e", "play", seed=2), has_env=True
    )


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
