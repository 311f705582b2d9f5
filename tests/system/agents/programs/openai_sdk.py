"""The official SDK with its streaming helpers or `parse`, in a loop written by hand."""

from json import loads

from openai import OpenAI
from weather import DIALECT, MODEL, SCHEMA, STREAMED, SYSTEM, TASK, report, weather

client = OpenAI()
FUNCTION = {"name": "weather", "parameters": SCHEMA, "strict": True}


def by_chat() -> str:
    """Append each reply and tool result to the messages."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]
    while True:
        request = {"model": MODEL, "messages": messages, "tools": [{"type": "function", "function": FUNCTION}]}
        if STREAMED:
            with client.chat.completions.stream(**request) as events:
                for _ in events:
                    pass
                message = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.parse(**request).choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message)
        for call in message.tool_calls:
            result = weather(**loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def by_responses() -> str:
    """Append each reply and tool result to the input items."""
    items = [{"role": "user", "content": TASK}]
    while True:
        request = {
            "model": MODEL,
            "input": items,
            "instructions": SYSTEM,
            "tools": [{"type": "function", **FUNCTION}],
            "store": False,
        }
        if STREAMED:
            with client.responses.stream(**request) as events:
                for _ in events:
                    pass
                response = events.get_final_response()
        else:
            response = client.responses.parse(**request)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        items += response.output
        for call in calls:
            result = weather(**loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


report({"chat": by_chat, "responses": by_responses}[DIALECT]())
