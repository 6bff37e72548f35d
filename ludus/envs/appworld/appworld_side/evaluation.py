"""Tests of a generated task, for AppWorld's evaluator, in whose process this file is loaded.

The state after the episode has to differ from the state before it by the expected rows, and by no
others: `private_data["changes"]` is, by table, what has to be added, updated or removed.
"""

import json
from typing import Any


def evaluate(
    test: Any,
    public_data: Any,
    private_data: Any,
    main_user: Any,
    models: Any,
    ground_truth_answer: Any,
) -> None:
    """The tests of a generated task, as AppWorld calls them."""
    changes = json.loads(json.dumps(private_data["changes"]))
    with test("the answer is right, or missing where the task asks for none"):
        given = json.loads(models.end.supervisor.Task.first().answer)
        test.answer(None if given == "<<NOT_GIVEN>>" else given, ground_truth_answer)
    with test("no other table has changed"):
        test.case(models.changed_model_names(), "==", set(changes))
    for table, wanted in changes.items():
        found = dict(
            zip(("added", "updated", "removed"), models.changed_records(table), strict=True)
        )
        for how in ("added", "updated", "removed"):
            rows = [row.to_dict(keep_computed=False, humanize=False) for row in found[how]]
            specs = wanted.get(how, [])
            if not rows and not specs:
                continue
            with test(f"{table}: exactly the rows that had to be {how} were"):
                test.case(len(rows), "==", len(specs))
                for spec in specs:
                    fits = [row for row in rows if _fits(row, spec["row"])]
                    test.case(bool(fits), "==", True)
                    rows.remove(fits[0])
                    if how == "updated":
                        fields = models.changed_field_names(table, fits[0]["id"])
                        test.case(fields, "==", set(spec["fields"]))


def _fits(row: Any, wanted: Any) -> bool:
    for name, value in wanted.items():
        if isinstance(value, float):
            if abs(row[name] - value) > 0.005:
                return False
        elif row[name] != value:
            return False
    return True
