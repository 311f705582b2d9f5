"""Steps of a chat as the turns of a rollout, for tests of continuation."""

from array import array

from tests.support.forests import make_choice, make_step

from proxy.continuation.turns import Turns

USER = {"role": "user", "content": "Hello"}
STOP = 99


def chat_step(step_id, messages, reply, prompt, sampled, *, index=None, finish="stop", **facts):
    """Return a complete chat step with one choice."""
    body = {"model": "policy", "messages": messages, **facts.pop("body", {})}
    choice = make_choice(0, sampled, finish_reason=finish, stop_reason=facts.pop("stop_reason", None))
    response = {"choices": [{"index": 0, "message": reply, "finish_reason": finish}]}
    return make_step(step_id, prompt, choice, request=body, response=response, index=index, **{"extra": {}, **facts})


def text_step(step_id, prompt_text, text, prompt, sampled, *, index=None, **facts):
    """Return a complete completions step with one choice."""
    response = {"choices": [{"index": 0, "text": text, "finish_reason": "stop"}]}
    request = {"model": "policy", "prompt": prompt_text}
    place = {"dialect": "completions", "endpoint": "/v1/completions"}
    return make_step(
        step_id, prompt, sampled, request=request, response=response, index=index, extra={}, **place, **facts
    )


def turns_of(*steps):
    """Return the turns of these steps."""
    turns = Turns()
    for step in steps:
        turns.add(step)
    return turns


def assistant(content, **fields):
    """Return an assistant message."""
    return {"role": "assistant", "content": content, **fields}


def tool_call(arguments, name="add", call_id="call-1"):
    """Return a tool call with these arguments as JSON text."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def ids(*values):
    """Return token ids."""
    return array("i", values)
