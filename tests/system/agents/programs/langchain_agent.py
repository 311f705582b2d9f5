"""LangChain's agent, with OpenAI's Chat Completions and Responses and with Anthropic's Messages."""

from langchain.agents import create_agent
from weather import DIALECT, MODEL, STREAMED, SYSTEM, TASK, report, weather


def model():
    """Return the model class of the dialect."""
    if DIALECT == "messages":
        from langchain_anthropic import ChatAnthropic

        return ChatAnthropic(model=MODEL)
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model=MODEL, use_responses_api=DIALECT == "responses")


agent = create_agent(model(), tools=[weather], system_prompt=SYSTEM)
prompt = {"messages": [{"role": "user", "content": TASK}]}
if STREAMED:
    states = [state for kind, state in agent.stream(prompt, stream_mode=["messages", "values"]) if kind == "values"]
    reply = states[-1]["messages"][-1]
else:
    reply = agent.invoke(prompt)["messages"][-1]
report(reply.text if isinstance(reply.text, str) else reply.text())
