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
    text += _devices(plan)
    text += ["", f"{'stage':15}{'work':{WIDTH}}{'time':>8}  memory"]
    text += [line for stage in plan.first for line in _row(stage)]
    text += [f"{each}:", *[line for stage in plan.each for line in _row(stage)]]
    if plan.pair is not None:
        text += ["side by side, from the first iteration to the last:", *_row(plan.pair)]
    text += [f"{'total':{15 + WIDTH}}{duration(plan.seconds):>8}"]
    text += _cost(roles.training("executor", 1), plan.seconds / 3600)
    for device, (name, count) in _largest(plan).items():
        text.append(
            f"out of memory: {name} needs {size(count)} on {device}, which has "
            f"{size(plan.hardware[device].memory)}: lower rollout.concurrency, "
            "model.context_length or rl.tokens_per_batch, or give the roles devices of their own"
        )
    return text


def _devices(plan: CoevolutionPlan) -> list[str]:
    """A line for each kind of hardware, with the devices that have it."""
    shown: dict[str, list[str]] = {}
    for device, hardware in sorted(plan.hardware.items()):
        shown.setdefault(device_line(hardware), []).append(device)
    return [f"{', '.join(devices)} {line}" for line, devices in shown.items()]


def _largest(plan: CoevolutionPlan) -> dict[str, tuple[str, float]]:
    """The stage that exceeds a device's memory by most, by device."""
    found: dict[str, tuple[str, float]] = {}
    for name, device, count in plan.too_large:
        if count > found.get(device, ("", 0.0))[1]:
            found[device] = name, count
    return found


def _row(stage: StagePlan) -> list[str]:
    memory = ", ".join(f"{device} {size(count)}" for device, count in stage.memory.items())
    words = _wrapped(stage.work)
    rows = [f"  {stage.name:13}{words[0]:{WIDTH}}{duration(stage.seconds):>8}  {memory}".rstrip()]
    rows += [f"{'':15}{line}" for line in words[1:]]
    if len(stage.parts) > 2:
        parts = ", ".join(f"{part} {duration(took)}" for part, took in stage.parts.items())
        rows.append(f"{'':15}({parts})")
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
