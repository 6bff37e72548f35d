"""Where tasks come from, and in which order they are visited."""

from ludus.core.registry import Registry, Row
from ludus.core.types import Task

READERS: Registry[list[Task]] = Registry(
    "reader",
    {
        "env": Row("ludus.tasks.readers:read_env", "", "tasks that the environment makes"),
        "hf": Row("ludus.tasks.readers:read_hf", "data", "a Hugging Face data set, local or hub"),
        "json": Row("ludus.tasks.readers:read_json", "", "a file of JSON lines"),
    },
    context=frozenset({"env_class", "on_bad_line"}),
)
"""A reader is a function from a config's arguments to a list of tasks."""
