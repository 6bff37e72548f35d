"""An agent with OpenAI's client: a loop of calls, and a calculator.

    ludus train examples/agents/sums.yaml agent=examples/agents/plain_openai.py:run

Guide: docs/agents.md.
"""

import json

from ludus import Model, Task
from ludus.tools.calculator import calculator

SYSTEM = {"role": "system", "content": "Use the calculator. Answer with the number alone."}
PARAMETERS = {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
}
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": PARAMETERS}}


async def run(task: Task, model: Model) -> None:
    client = model.openai()
    messages = [SYSTEM, {"role": "user", "content": task.prompt[0].content}]
    while True:
        reply = await client.chat.completions.create(
            model=model.name, messages=messages, tools=[TOOL]
        )
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return  # the judge of the configuration scores the last message
        for call in message.tool_calls:
            result = calculator(json.loads(call.function.arguments)["expression"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result.content})
