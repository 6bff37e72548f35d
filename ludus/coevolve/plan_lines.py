"""The plan of a co-evolution as text."""

from __future__ import annotations

from collections.abc import Sequence

from ludus.coevolve.flow import stages_of
from ludus.coevolve.plan import CoevolutionPlan, StagePlan
from ludus.coevolve.roles import Roles
from ludus.config.schema import RunConfig
from ludus.diagnostics.plan_lines import device_line, duration, size

WIDTH = 72


def lines(roles: Roles, plan: CoevolutionPlan) -> list[str]:
    """Returns the lines of a plan. Reads the folder's list of complete stages."""
    config = roles.config
    number = config.iterations
    each = "iteration 1" if number == 1 else f"each of the iterations 1 to {number}"
    text = [f"{config.name}: {_progress(roles)}", *plan.notes]
    shown = {f"{hardware.name}{device}": (device, hardware) for device, hardware in
             plan.hardware.items()}  # fmt: skip
    text += [f"{device}: {device_line(hardware)}" for device, hardware in shown.values()]
    text += ["", f"{'stage':14}{'work':{WIDTH}}{'time':>8}  memory"]
    text += [line for stage in plan.first for line in _row(stage)]
    text += [f"{each}:", *[line for stage in plan.each for line in _row(stage)]]
    if plan.pair is not None:
        text += ["side by side, from the first iteration to the last:", *_row(plan.pair)]
    text += [f"{'total':{14 + WIDTH}}{duration(plan.seconds):>8}"]
    text += _cost(roles.training("executor", 1), plan.seconds / 3600)
    text += [
        f"out of memory: {name} needs {size(count)} on {device}, which has "
        f"{size(plan.hardware[device].memory)}: `ludus config rollout`, `model` and `learner` have "
        "the settings that reduce it"
        for name, device, count in plan.too_large
    ]
    return text


def _row(stage: StagePlan) -> list[str]:
    memory = ", ".join(f"{device} {size(count)}" for device, count in stage.memory.items())
    words = _wrapped(stage.work)
    rows = [f"  {stage.name:12}{words[0]:{WIDTH}}{duration(stage.seconds):>8}  {memory}".rstrip()]
    rows += [f"{'':14}{line}" for line in words[1:]]
    if len(stage.parts) > 2:
        parts = ", ".join(f"{part} {duration(took)}" for part, took in stage.parts.items())
        rows.append(f"{'':14}({parts})")
    return rows


def _wrapped(work: str) -> Sequence[str]:
    """The work, a part a line where it is long."""
    if len(work) < WIDTH:
        return [work]
    first, _, rest = work.partition("; ")
    return [first, *_wrapped(rest)] if rest else [first]


def _progress(roles: Roles) -> str:
    stages, complete = stages_of(roles.config), roles.storage.complete()
    left = [stage.label for stage in stages if stage.label not in complete]
    text = f"{len(stages)} stages in {roles.storage.root}"
    if not complete:
        return text
    next_one = f"next: {left[0]}" if left else "nothing is left"
    return f"{text}; {len(stages) - len(left)} are complete, {next_one}"


def _cost(executor: RunConfig, hours: float) -> list[str]:
    budget = executor.budget
    if budget.price_per_hour is None:
        return []
    return [f"cost  {hours * budget.price_per_hour:,.2f} {budget.currency}"]
