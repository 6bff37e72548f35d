"""Changes of the recipe between two starts of a co-evolution.

A key may change as long as no stage that reads it has begun; keys that only the filter reads may
change before every filter. Else the files of the folder would be of two recipes.
"""

from __future__ import annotations

from collections.abc import Collection

from ludus.coevolve.storage import Storage
from ludus.config.coevolve import CoevolveConfig
from ludus.config.load import diff, lookup
from ludus.config.messages import show
from ludus.core.errors import ConfigError

ALL = frozenset({"start", "curriculum", "generate", "score", "filter", "executor", "evaluate"})

READ_BY = {
    "iterations": frozenset[str](),
    "storage": frozenset[str](),
    "questions.min_consistency": frozenset[str](),
    "questions.max_consistency": frozenset[str](),
    "questions.max_problems": frozenset[str](),
    "questions.ties": frozenset[str](),
    "questions.proposals": frozenset({"generate"}),
    "questions.chunk": frozenset({"generate", "score"}),
    "frontier": frozenset[str](),
    "answers": frozenset({"curriculum", "score"}),
    "reward": frozenset({"curriculum", "generate", "score"}),
    "start": frozenset({"start"}),
    "curriculum": frozenset({"curriculum", "generate"}),
    "executor.rl": frozenset({"executor"}),
    "executor": ALL - {"start", "generate"},
    "side_by_side": frozenset({"curriculum"}),
}
"""Keys, and the stages that may not have begun when they change; the first that fits counts. All
other keys: no stage."""


def check_changes(
    before: CoevolveConfig, after: CoevolveConfig, storage: Storage, begun: Collection[str]
) -> list[str]:
    """Returns a line for each changed key.

    Args:
        begun: labels of the stages that are complete, or have files.

    Errors: ConfigError where a stage that has begun reads a changed key.
    """
    lines, refused = [], []
    for key in diff(before, after):
        line = f"{key} was {show(lookup(before, key))}, is {show(lookup(after, key))}"
        readers = _readers(key)
        if used := [label for label in begun if label.rpartition("/")[2] in readers]:
            refused.append(f"{line}: {used[-1]} has begun with it")
        elif key != "storage":
            lines.append(line)
    if refused:
        more = f"; and {len(refused) - 5} keys more" if len(refused) > 5 else ""
        raise ConfigError(
            f"{storage.root} holds a co-evolution with another recipe: "
            f"{'; '.join(refused[:5])}{more}. Change it back, or give the new one another `name`"
        )
    return lines


def _readers(key: str) -> frozenset[str]:
    fitting = (found for prefix, found in READ_BY.items() if f"{key}.".startswith(f"{prefix}."))
    return next(fitting, ALL)
