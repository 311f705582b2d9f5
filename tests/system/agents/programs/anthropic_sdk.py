"""The official SDK with its own tool runner."""

from anthropic import Anthropic, beta_tool
from weather import MODEL, STREAMED, SYSTEM, TASK, report, weather

runner = Anthropic().beta.messages.tool_runner(
    model=MODEL,
    max_tokens=1000,
    system=SYSTEM,
    tools=[beta_tool(weather)],
    messages=[{"role": "user", "content": TASK}],
    stream=STREAMED,
)
if STREAMED:
    for events in runner:
        for _ in events:
            pass
        message = events.get_final_message()
else:
    message = runner.until_done()
report("".join(block.text for block in message.content if block.type == "text"))
