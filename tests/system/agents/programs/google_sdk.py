"""The official SDK with automatic function calling in a chat."""

from google import genai
from google.genai import types
from weather import MODEL, STREAMED, SYSTEM, TASK, report, weather

retries = types.HttpRetryOptions(attempts=3, initial_delay=0.1, max_delay=0.1)  # by default it does not retry
client = genai.Client(http_options=types.HttpOptions(retry_options=retries))
config = types.GenerateContentConfig(system_instruction=SYSTEM, tools=[weather])
chat = client.chats.create(model=MODEL, config=config)
if STREAMED:
    text = ""
    for chunk in chat.send_message_stream(TASK):
        text = "" if chunk.function_calls else text + (chunk.text or "")
else:
    text = chat.send_message(TASK).text
report(text)
