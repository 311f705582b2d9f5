"""A graph of LangGraph: a node for the model and one that runs its tool calls in parallel, of which one asks another graph."""

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from weather import MODEL, SYSTEM, TASK, report, weather

model = ChatOpenAI(model=MODEL)


def graph(instructions, *tools):
    """Return a graph that loops until the model calls no tool."""

    def call(state):
        """Call the model with the messages so far."""
        return {"messages": [model.bind_tools(tools).invoke([SystemMessage(instructions), *state["messages"]])]}

    building = StateGraph(MessagesState)
    building.add_node("model", call)
    building.add_node("tools", ToolNode(tools))
    building.add_edge(START, "model")
    building.add_conditional_edges("model", tools_condition)
    building.add_edge("tools", "model")
    return building.compile()


expert = graph("You know the weather.", weather)


def ask(question: str) -> str:
    """Ask the expert."""
    return expert.invoke({"messages": [HumanMessage(question)]})["messages"][-1].content


agent = graph(SYSTEM, weather, ask)
report(agent.invoke({"messages": [HumanMessage(TASK)]})["messages"][-1].content)
