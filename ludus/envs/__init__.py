"""Environments: one file or folder each, and one row in this table."""

from ludus.config.registry import Registry, Row
from ludus.envs.base import Env, declaration_fault

ENVS: Registry[Env] = Registry(
    "env",
    {
        "agentjet": Row(
            "ludus.envs.agentjet:AgentJet",
            "remote",
            "an environment service of AgentJet's protocol",
        ),
        "alfworld": Row(
            "ludus.envs.alfworld.env:ALFWorld", "alfworld", "ALFWorld's household tasks, in text"
        ),
        "appworld": Row(
            "ludus.envs.appworld.env:AppWorld", "", "tasks in everyday apps, solved with code"
        ),
        "facts": Row("ludus.envs.synthetic.facts:Facts", "", "questions on invented persons"),
        "programs": Row("ludus.envs.synthetic.programs:Programs", "", "tiny Python functions"),
        "problems": Row(
            "ludus.envs.synthetic.problems:Problems", "", "arithmetic and small algebra to solve"
        ),
        "proposals": Row(
            "ludus.envs.synthetic.proposals:Proposals", "", "writing problems of that kind"
        ),
        "babyai": Row("ludus.envs.babyai.env:BabyAI", "envs", "minigrid's BabyAI levels, in text"),
        "cuda": Row("ludus.envs.cuda.env:Cuda", "kernels", "CUDA kernels to write"),
        "scienceworld": Row(
            "ludus.envs.java.scienceworld:ScienceWorld", "scienceworld", "30 science tasks, in text"
        ),
        "mixture": Row("ludus.envs.mixture:Mixture", "", "several environments in one run"),
        "remote": Row(
            "ludus.envs.remote.env:RemoteEnv", "remote", "an environment played by a service"
        ),
        "reasoning": Row(
            "ludus.envs.reasoning:Reasoning", "reasoning", "reasoning-gym's tasks and verifiers"
        ),
        "textcraft": Row("ludus.envs.textcraft.env:TextCraft", "", "crafting with a recipe table"),
        "textworldexpress": Row(
            "ludus.envs.java.textworldexpress:TextWorldExpress", "textworldexpress", "8 text games"
        ),
        "verifiers": Row(
            "ludus.envs.verifiers.env:Verifiers", "", "a taskset of verifiers, with its harness"
        ),
        "webshop": Row(
            "ludus.envs.webshop.env:WebShop", "webshop", "buying what an instruction asks for"
        ),
    },
    fault=declaration_fault,
)
