"""Environments: one file each, and one row in this table."""

from ludus.core.registry import Registry, Row
from ludus.envs.base import Env

ENVS: Registry[Env] = Registry(
    "env",
    {
        "alfworld": Row(
            "ludus.envs.alfworld:ALFWorld", "alfworld", "ALFWorld's household tasks, in text"
        ),
        "babyai": Row("ludus.envs.babyai:BabyAI", "envs", "minigrid's BabyAI levels, in text"),
        "scienceworld": Row(
            "ludus.envs.scienceworld:ScienceWorld", "scienceworld", "30 science tasks, in text"
        ),
        "mixture": Row("ludus.envs.mixture:Mixture", "", "several environments in one run"),
        "remote": Row(
            "ludus.envs.remote:RemoteEnv", "remote", "an environment that a service plays"
        ),
        "reasoning": Row(
            "ludus.envs.reasoning:Reasoning", "reasoning", "reasoning-gym's tasks and verifiers"
        ),
        "textcraft": Row("ludus.envs.textcraft:TextCraft", "", "crafting with a recipe table"),
        "textworldexpress": Row(
            "ludus.envs.textworldexpress:TextWorldExpress", "textworldexpress", "8 text games"
        ),
        "webshop": Row(
            "ludus.envs.webshop:WebShop", "webshop", "buying what an instruction asks for"
        ),
    },
)
