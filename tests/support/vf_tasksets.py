"""Small tasksets of verifiers, imported in its own environment only."""

import os
import time

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str = ""


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=0.75)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or "").split())

    @vf.reward(weight=0.25)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or "") < 4)

    @vf.metric
    async def num_chars(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class SumsConfig(vf.TasksetConfig):
    step: int = 1


class Sums(vf.Taskset[SumTask, SumsConfig]):
    """One turn: eight sums."""

    def load(self):
        print("a taskset may print")
        for number in range(8):
            answer = str(number + self.config.step)
            prompt = f"What is {number} + {self.config.step}?"
            yield SumTask(SumData(prompt=prompt, system_prompt="Be brief.", answer=answer))


class Endless(Sums):
    """Tasks without end."""

    INFINITE = True

    def load(self):
        number = 0
        while True:
            yield SumTask(SumData(prompt=f"Say {number}", answer=str(number)))
            number += 1


class CalculatorTools(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


class CalculatorTask(SumTask):
    @classmethod
    def toolsets(cls, config):
        return [CalculatorTools(vf.ToolsetConfig())]

    @vf.reward(weight=1.0)
    async def used(self, trace: vf.Trace) -> float:
        return float(any(message.role == "tool" for message in trace.messages))


class Calculator(vf.Taskset[CalculatorTask]):
    """A tool and an answer in words."""

    def load(self):
        for number in range(8):
            answer = str(number + 10)
            yield CalculatorTask(SumData(prompt=f"What is {number} + 10?", answer=answer))


class FaultyTask(vf.Task[SumData]):
    async def setup(self, trace: vf.Trace) -> None:
        if self.data.answer == "setup":
            raise RuntimeError("setup is broken")

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if self.data.answer == "hang":
            time.sleep(3600)
        if self.data.answer == "exit":
            os._exit(9)
        if self.data.answer == "nan":
            return float("nan")
        raise RuntimeError("the reward is broken")


class Faulty(vf.Taskset[FaultyTask]):
    """Tasks that fail in setup, in the reward, and with the whole process."""

    def load(self):
        for kind in ("setup", "reward", "nan", "exit", "hang"):
            yield FaultyTask(SumData(prompt=kind, answer=kind))


class Images(vf.Taskset[SumTask]):
    """A prompt with an image."""

    def load(self):
        url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
        message = vf.UserMessage(content=[{"type": "text", "text": "look"}, url])
        yield SumTask(SumData(prompt=[message], answer="x"))


class Unreadable(vf.Taskset[SumTask]):
    """Tasks that cannot be loaded."""

    def load(self):
        raise OSError("the data set is gone")


if __name__ == "__main__":
    CalculatorTools.run()
