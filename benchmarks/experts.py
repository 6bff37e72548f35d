"""Success of an environment's expert: tasks of every tier, played to the end.

python benchmarks/experts.py textcraft --tasks 100
python benchmarks/experts.py babyai actions=macro --turns 200
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter

from ludus.core.types import Message, Spec
from ludus.envs import ENVS
from ludus.envs.base import NoExpert


async def play(spec: Spec, tier: str | None, seed: int, max_turns: int) -> str:
    """Returns won, lost, unfinished or no expert."""
    env = ENVS.build(spec, "env")
    try:
        task = type(env).task(tier, seed)
        await env.reset(task)
        reward = 0.0
        for _ in range(max_turns):
            result = await env.step(Message(role="assistant", content=env.expert_action()))
            reward += result.reward or 0.0
            if result.done:
                return "won" if reward >= env.success_of(task) else "lost"
    except NoExpert:
        return "no expert"
    finally:
        await env.close()
    return "unfinished"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("env")
    parser.add_argument("args", nargs="*", help="arguments of the environment, as name=value")
    parser.add_argument("--tasks", type=int, default=3, help="of each tier, seeds 0, 1, ...")
    parser.add_argument("--turns", type=int, default=200)
    given = parser.parse_args()
    spec = Spec(name=given.env, args=dict(text.split("=", 1) for text in given.args))
    outcomes: Counter[str] = Counter()
    tiers: list[str | None] = [*type(ENVS.build(spec, "env")).tiers()]
    for tier in tiers or [None]:
        found = Counter(
            asyncio.run(play(spec, tier, seed, given.turns)) for seed in range(given.tasks)
        )
        outcomes += found
        if found["won"] < given.tasks:
            print(f"{tier}: {dict(found)}", flush=True)
    print(f"{spec.name}: {outcomes['won']} of {outcomes.total()} won, {dict(outcomes)}")


if __name__ == "__main__":
    main()
