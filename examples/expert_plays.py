"""The expert plays one episode of TextCraft, the same way as for demonstrations."""

import asyncio

from ludus import Spec
from ludus.data.expert import run_expert
from ludus.envs import ENVS

env = ENVS.build(Spec(name="textcraft", args={"num_distractors": 1}))
demonstration = asyncio.run(run_expert(env, env.task("depth-2", seed=3)))
for message in demonstration.messages:
    print(f"{message.role}: {message.content}")
print(f"reward {demonstration.reward}")
