"""Checks of the evaluations: what SFT reached, and what RL added to it."""

from __future__ import annotations

from ludus.config.schema import RunConfig
from ludus.report.diagnosis.findings import (
    CEILING,
    REACHED,
    SFT_STEPS,
    START_STEPS,
    WINDOW,
    Found,
    History,
    level_of,
    longer_sft,
    percent,
    rate_of,
    sentence,
)

NEWEST, FELL = 5, 0.15
"""Steps whose success, so much below that of the last WINDOW, tells that RL destroys the policy:
the WINDOW's is then above that of held-out tasks too."""

TRAINED = "rl/success"
"""Success of the training episodes of the last WINDOW steps, beside an evaluation's metrics."""

SHORT = (0.5, 0.9)
"""Missing share of `sft.until.success` at the end of SFT."""

BY_HEART = (0.25, 0.5)
"""Success of training episodes, sampled, above that of held-out tasks. In runs whose tasks do not
repeat, the two differ by less than 0.1."""


def short_of_target(history: History, config: RunConfig) -> Found | None:
    """SFT ended far below the success at which it was to end."""
    reached, steps = history.last(REACHED, 1), history.last(SFT_STEPS, 1)
    if config.sft is None or config.sft.until is None or not reached or not steps:
        return None
    if _proves_nothing(config):
        return None
    target = config.sft.until.success
    if not (level := level_of(1 - reached[0] / target, SHORT)):
        return None
    if steps[0] < config.sft.steps:  # `until.patience`
        more = ""
    else:
        more = f"give SFT more steps (`sft.steps`, now {config.sft.steps:,}), "
    shown = "demonstrations.num_episodes" if config.demonstrations else "sft.data"
    return Found(
        level,
        f"SFT ended where {percent(reached[0])} of the sampled episodes succeed, of "
        f"{percent(target)} that `sft.until.success` asks"
        + (": RL has few successes to raise" if config.rl else ""),
        sentence(f"{more}show more demonstrations (`{shown}`), or begin with easier tasks")
        + longer_sft(history, config),
    )


def no_gain(history: History, config: RunConfig) -> Found | None:
    """An evaluation is not above that before RL."""
    if config.rl is None or _proves_nothing(config):
        return None
    names = ("gain", "gain_low", "gain_high")
    found = [history.last(f"evaluate/{name}", 1) for name in names]
    if not all(found):
        return None
    gain, low, high = (100 * values[0] for values in found)
    if low > 0:
        return None
    start = history.last("evaluate/gain_from", 1)  # of runs since it is recorded
    end = round(start[0] + gain / 100, 6) if start else 0.0
    gain = round(gain, 1) + 0.0  # without the sign of a zero
    told = f"{gain:+.1f} points ({100 * config.evaluate.confidence:g} % interval {low:+.1f} to "
    told += f"{high:+.1f})"
    if start and start[0] >= CEILING and high >= 0:
        return Found(
            1,
            f"RL had nothing to raise: {percent(start[0])} of the held-out tasks succeeded before "
            f"it, and success changed by {told}",
            "Train on harder tasks (`tasks.train`), or with SFT alone (leave out `rl`)",
        )
    if start:
        told += f", from {100 * start[0]:.1f} to {100 * end + 0.0:.1f} % of the same tasks"
    if high < 0:
        slower = f"lower `rl.optimizer.lr` (now {rate_of(config)})"
        if config.rl is not None and (target := config.rl.optimizer.target_kl) is not None:
            slower = f"lower `rl.optimizer.target_kl` (now {target:g})"
        return Found(
            2,
            f"success on held-out tasks is below its start: {told}",
            "Use the checkpoint that `ludus checkpoint list RUN` marks as best; for RL that raises "
            f"success, {slower}, or give a step more episodes (`rl.groups_per_step`)",
        )
    return Found(
        1,
        f"success on held-out tasks is not significantly above its start: {told}",
        "Train longer (`rl.steps`, or a recipe of `ludus init --minutes`); to tell a smaller gain, "
        + _more_heldout(config)
        + longer_sft(history, config),
    )


def _proves_nothing(config: RunConfig) -> bool:
    """True for `--quick-test`."""
    rl = config.rl
    return rl is not None and rl.steps < START_STEPS and not rl.steps_per_unused_sft_step


def _more_heldout(config: RunConfig) -> str:
    """Advice to evaluate more tasks: more of the held-out ones, where not all are evaluated."""
    number, heldout = config.evaluate.num_tasks, config.tasks.heldout
    args = heldout.args if heldout else {}
    most = args.get("num_tasks", args.get("limit"))
    if number is None or (isinstance(most, int) and number >= most):
        return "hold out more tasks (`tasks.heldout.args`), of which evaluations take all are"
    return "evaluate more tasks (`evaluate.num_tasks`)"


def by_heart(history: History, config: RunConfig) -> Found | None:
    """Training tasks succeed, held-out ones do not; before RL, training tasks that SFT did not show
    and that `sft.until` measured."""
    trained, heldout = history.last(TRAINED, 1), history.last("evaluate/success", 1)
    of = f"of the training episodes of the last {WINDOW} steps"
    if not trained:
        trained, of = history.last(REACHED, 1), "of sampled episodes of training tasks"
    if not trained or not heldout:
        return None
    if not (level := level_of(trained[0] - heldout[0], BY_HEART)):
        return None
    return Found(
        level,
        f"{of} {percent(trained[0])} succeed, of the held-out tasks {percent(heldout[0])}: the "
        "policy learns its training tasks by heart, or the held-out ones are harder",
        "Train on more different tasks: more rows, seeds or tiers in `tasks.train`; more RL steps "
        "do not help",
    )


def loses(history: History, config: RunConfig) -> Found | None:
    """An evaluation during RL is below that before RL."""
    found = no_gain(history, config)
    return found if found is not None and found.level == 2 else None
