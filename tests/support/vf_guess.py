"""A taskset of verifiers with an environment of its own: several turns, a user in Python."""

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    secret: int = 0


class GuessTask(vf.Task[GuessData]):
    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == str(self.data.secret))


class Guess(vf.Taskset[GuessTask]):
    def load(self):
        for secret in range(8):
            yield GuessTask(GuessData(prompt="Guess a number from 0 to 7.", secret=secret))


class GuessConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as player:
            segment = await player.turn()
            while not segment.terminated:
                told = segment.last_reply.strip()
                if told == str(task.data.secret):
                    return
                higher = told.isdigit() and int(told) < task.data.secret
                segment = await player.turn("higher" if higher else "lower")
