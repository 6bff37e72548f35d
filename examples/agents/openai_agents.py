"""An agent of the OpenAI Agents SDK, with a calculator.

    ludus train examples/agents/sums.yaml agent=examples/agents/openai_agents.py:run

Guide: docs/agents.md.
"""

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled

from ludus import Model, Task
from ludus.tools.calculator import calculator as compute

set_tracing_disabled(True)  # else the SDK sends its traces to OpenAI


@function_tool
def calculator(expression: str) -> str:
    """Compute the value of an arithmetic expression."""
    return compute(expression).content


async def run(task: Task, model: Model) -> None:
    agent = Agent(
        name="sums",
        instructions="Use the calculator. Answer with the number alone.",
        model=OpenAIChatCompletionsModel(model=model.name, openai_client=model.openai()),
        tools=[calculator],
    )
    await Runner.run(agent, task.prompt[0].content)  # the judge scores the last message
