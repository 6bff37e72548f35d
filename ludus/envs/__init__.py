"""Environments: one file each, and one row in this table."""

from ludus.core.registry import Registry, Row
from ludus.envs.base import Env

ENVS: Registry[Env] = Registry(
    "env",
    {
        "babyai": Row("ludus.envs.babyai:BabyAI", "envs", "minigrid's BabyAI levels, in text"),
        "textcraft": Row("ludus.envs.textcraft:TextCraft", "", "crafting with a recipe table"),
    },
)
