"""A run that stops at its budget, with a checkpoint, and goes on with another."""

from __future__ import annotations

from harness import BABYAI, Ludus

SHORT = [
    "rl.steps=6",
    "sft.steps=4",
    "checkpoint.every=100",
    "report=false",
    "tasks.heldout=null",
    "evaluate={}",
]


def test_it_stops_before_the_limit_and_goes_on(ludus: Ludus) -> None:
    limited = [*SHORT, "budget.max_tokens=4000", "budget.price_per_hour=2.5"]
    done = ludus("train", BABYAI, *limited).refused(
        3, "stopped before the next step: budget.max_tokens:", "ludus train --resume tiny-1",
        "budget.max_tokens=...", "cost 0.0",
    )  # fmt: skip
    assert "is complete" not in done.all
    lines = ludus.metrics()
    assert lines[-1]["budget/tokens"] <= 4000
    assert 0 < len(lines) < 10
    last = lines[-1]
    saved = f"{last['stage']}-{last['step'] + 1:06d}"
    assert (ludus.run() / "checkpoints" / saved).is_dir()
    with ludus.store() as store:
        assert store.run("tiny-1").status == "interrupted"

    ludus("train", "--resume", "tiny-1", "budget.max_tokens=100000000").ok()
    whole = ludus.metrics()
    assert [line["step"] for line in whole if line["stage"] == "rl"] == list(range(6))
    assert whole[: len(lines)] == lines
    assert whole[-1]["budget/tokens"] > 4000
