"""The settings that a run was started with, read from its folder."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ludus.config.load import load_config
from ludus.config.schema import RunConfig
from ludus.core.errors import ConfigError
from ludus.core.files import read_regular
from ludus.store.folders import RunFolder

LAST_KEY = next(reversed(RunConfig.model_fields))
"""The last key of the file that a run's settings are written to."""


def run_config(folder: RunFolder, overrides: Sequence[str] = ()) -> RunConfig:
    """Returns the settings of a run, with overrides applied (`load_config`).

    Errors: ConfigError, also for a file that was cut off: the keys that it lacks would take
    defaults.
    """
    try:
        text = read_regular(folder.config).decode("utf-8", errors="replace")
    except OSError:
        return load_config(folder.config, overrides)  # which tells why it cannot be read
    if not re.search(rf"^{LAST_KEY}:.*\n", text, re.MULTILINE):
        raise ConfigError(
            f"{folder.config}: it was cut off after {text.count(chr(10))} lines: the settings "
            f"of a run end with `{LAST_KEY}`; restore the file"
        )
    return load_config(folder.config, overrides)
