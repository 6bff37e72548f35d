"""A graph of LangGraph: the model, and a calculator.

    ludus train examples/agents/sums.yaml agent=examples/agents/langgraph_agent.py:run

Guide: docs/agents.md.
"""

from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from ludus import Model, Task
from ludus.tools.calculator import calculator as compute

SYSTEM = ("system", "Use the calculator. Answer with the number alone.")


def calculator(expression: str) -> str:
    """Compute the value of an arithmetic expression."""
    return compute(expression).content


async def run(task: Task, model: Model) -> None:
    chat = ChatOpenAI(model=model.name, base_url=model.base_url, api_key=model.api_key)
    with_tools = chat.bind_tools([calculator])

    async def ask(state: MessagesState) -> MessagesState:
        return {"messages": [await with_tools.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("tools", ToolNode([calculator]))
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", tools_condition)
    graph.add_edge("tools", "ask")
    question = ("user", task.prompt[0].content)
    await graph.compile().ainvoke({"messages": [SYSTEM, question]})  # scored by the judge
