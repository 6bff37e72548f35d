"""A ToolCallingAgent of smolagents, with a calculator. It blocks, and scores its own answer.

    ludus train examples/agents/sums.yaml agent=examples/agents/smolagents_tools.py:run

It sends earlier calls and results as text, so each of its calls is a row of its own. Guide:
docs/agents.md.
"""

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

from ludus import Model, Outcome, Task
from ludus.tools.calculator import calculator as compute


@tool
def calculator(expression: str) -> str:
    """Compute the value of an arithmetic expression.

    Args:
        expression: for example (3 + 4) * 2
    """
    return compute(expression).content


def run(task: Task, model: Model) -> Outcome:
    chat = OpenAIModel(model.name, api_base=model.base_url, api_key=model.api_key)
    agent = ToolCallingAgent([calculator], chat, max_steps=4, verbosity_level=LogLevel.OFF)
    agent.prompt_templates["system_prompt"] = "Use the calculator, then final_answer."
    answer = agent.run(task.prompt[0].content)  # the argument of a call, which no judge reads
    return Outcome(reward=float(str(answer).strip() == task.answer))
