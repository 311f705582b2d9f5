"""The official SDK, over its own HTTP client, reads the dialect's responses; warnings are errors."""

import anthropic
import httpx2
import pytest
from pydantic import BaseModel
from tests.support.anthropic_events import Served, response_of

from proxy import errors
from proxy.protocols.dialects.messages import MESSAGES

CALL = {"id": "chatcmpl-tool-1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Paris"}'}}
TOOL_CALL_MESSAGE = {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "chatcmpl-tool-1", "content": "sunny"}
ANSWER = {"role": "assistant", "content": "It is sunny."}


def client(served):
    transport = httpx2.MockTransport(served)
    return anthropic.Anthropic(
        api_key="k", base_url="http://proxy", max_retries=0, http_client=httpx2.Client(transport=transport)
    )


REQUEST = {"model": "policy", "max_tokens": 64, "messages": [{"role": "user", "content": "How is it in Paris?"}]}
TOOL = {
    "name": "weather",
    "description": "Returns the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def test_messages_create_returns_thinking_and_tool_calls():
    message = client(Served(MESSAGES, TOOL_CALL_MESSAGE)).messages.create(**REQUEST, tools=[TOOL])

    assert [block.type for block in message.content] == ["thinking", "tool_use"]
    assert (message.content[1].name, message.content[1].input) == ("weather", {"city": "Paris"})
    assert (message.stop_reason, message.id) == ("tool_use", "msg_s1")
    assert (message.usage.input_tokens, message.usage.output_tokens) == (33, 5)


def test_messages_stream_returns_deltas_and_the_unstreamed_message():
    message = ANSWER | {"reasoning": "Hm.", "tool_calls": [CALL]}
    with client(Served(MESSAGES, message)).messages.stream(**REQUEST) as stream:
        events = list(stream)
    final = stream.get_final_message()

    assert "".join(event.text for event in events if event.type == "text") == "It is sunny."
    assert "".join(event.thinking for event in events if event.type == "thinking") == "Hm."
    assert "".join(event.partial_json for event in events if event.type == "input_json") == '{"city":"Paris"}'
    assert final.to_dict() == client(Served(MESSAGES, message)).messages.create(**REQUEST).to_dict()


def test_a_returned_message_is_read_as_the_sampled_message():
    """By the SDK's `to_param`, streamed or not: reasoning, ids and arguments byte for byte."""
    for streams in (False, True):
        served = Served(MESSAGES, TOOL_CALL_MESSAGE, ANSWER)
        agent = client(served)
        if streams:
            with agent.messages.stream(**REQUEST, tools=[TOOL]) as stream:
                reply = stream.get_final_message()
        else:
            reply = agent.messages.create(**REQUEST, tools=[TOOL])
        result = {"type": "tool_result", "tool_use_id": reply.content[1].id, "content": "sunny"}
        turns = [*REQUEST["messages"], reply.to_param(), {"role": "user", "content": [result]}]
        agent.messages.create(**REQUEST | {"messages": turns}, tools=[TOOL])

        assert [*REQUEST["messages"], TOOL_CALL_MESSAGE, RESULT] == served.chats[1]["messages"]


@pytest.mark.parametrize("streams", [False, True])
def test_the_tool_runner_calls_its_tool_with_the_sampled_arguments(streams):
    """Two turns of the beta's loop.

    It first requests a thread, a conversation stored by the server, and continues without one when that is rejected.
    """
    called = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Returns the weather.

        Args:
            city: Where.
        """
        called.append(city)
        return "sunny"

    served = Served(MESSAGES, TOOL_CALL_MESSAGE, ANSWER)
    runner = client(served).beta.messages.tool_runner(**REQUEST, tools=[weather], stream=streams)
    last = runner.until_done()

    assert (called, last.content[0].text, last.stop_reason) == (["Paris"], "It is sunny.", "end_turn")
    assert served.chats[1]["messages"][1:] == [TOOL_CALL_MESSAGE, RESULT]
    assert [(body.get("thread") or {}).get("type") for body in served.bodies] == ["create", None, None]
    assert "city" in served.chats[0]["tools"][0]["function"]["parameters"]["properties"]


def test_messages_parse_sends_a_schema_and_reads_the_response_by_it():

    class Weather(BaseModel):
        sunny: bool

    served = Served(MESSAGES, {"content": '{"sunny": true}'})
    message = client(served).messages.parse(**REQUEST, output_format=Weather)

    assert message.parsed_output == Weather(sunny=True)
    assert list(served.chats[0]["response_format"]["json_schema"]["schema"]["properties"]) == ["sunny"]


def test_the_beta_stream_and_its_headers():
    """`?beta=true` and known fields are accepted; unknown ones are not sent."""
    served = Served(MESSAGES, ANSWER)
    fields = {
        "betas": ["context-management-2025-06-27"],
        "context_management": {"edits": []},
        "metadata": {"user_id": "u"},
    }
    with client(served).beta.messages.stream(**REQUEST, **fields) as stream:
        assert stream.get_final_text() == "It is sunny."

    assert served.chats[0].keys() == {"model", "messages", "max_tokens", "stream", "stream_options"}


async def test_the_async_client():
    """Streamed and unstreamed."""
    transport = httpx2.MockTransport(Served(MESSAGES, ANSWER, ANSWER))
    agent = anthropic.AsyncAnthropic(
        api_key="k", base_url="http://proxy", http_client=httpx2.AsyncClient(transport=transport)
    )

    whole = await agent.messages.create(**REQUEST)
    async with agent.messages.stream(**REQUEST) as stream:
        texts = [text async for text in stream.text_stream]

    assert whole.content[0].text == "".join(texts) == "It is sunny."


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"finish_reason": "length"}, ("max_tokens", None)),
        ({"finish_reason": "stop", "stop_reason": "END"}, ("stop_sequence", "END")),
        ({"finish_reason": "stop", "matched_stop": "END"}, ("stop_sequence", "END")),
        ({"finish_reason": "content_filter"}, ("refusal", None)),
        ({"finish_reason": "abort"}, ("pause_turn", None)),
    ],
)
def test_the_sdk_reads_every_stop_reason(choice, expected):
    """Streamed and unstreamed."""
    response = response_of(ANSWER, **choice)
    agent = client(Served(MESSAGES, response, response))

    whole = agent.messages.create(**REQUEST, stop_sequences=["END"])
    with agent.messages.stream(**REQUEST, stop_sequences=["END"]) as stream:
        streamed = stream.get_final_message()

    assert (whole.stop_reason, whole.stop_sequence) == (streamed.stop_reason, streamed.stop_sequence) == expected


def test_a_truncated_tool_call_does_not_break_the_sdk():
    """The message has stop reason `max_tokens` and the complete arguments."""
    cut = CALL | {"function": {"name": "weather", "arguments": '{"days": 7, "city": "Par'}}
    response = response_of({"content": None, "tool_calls": [cut]}, "length")
    agent = client(Served(MESSAGES, response, response))

    with agent.messages.stream(**REQUEST, tools=[TOOL]) as stream:
        streamed = stream.get_final_message()

    assert (streamed.content[0].input, streamed.stop_reason) == ({"days": 7}, "max_tokens")
    assert streamed.to_dict() | {"id": ""} == agent.messages.create(**REQUEST, tools=[TOOL]).to_dict() | {"id": ""}


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (errors.NotFound("no"), anthropic.NotFoundError),
        (errors.Unauthorized("no"), anthropic.AuthenticationError),
        (errors.LimitReached("no"), anthropic.RateLimitError),
        (errors.InvalidValue("no"), anthropic.BadRequestError),
        (errors.RolloutClosed("no"), anthropic.ConflictError),
        (errors.EngineBusy("no"), anthropic.RateLimitError),
        (errors.StoreUnavailable("no"), anthropic.InternalServerError),
    ],
)
def test_errors_raise_the_sdks_exceptions(error, raised):
    """By status and type."""
    with pytest.raises(raised) as caught:
        client(Served(MESSAGES, error)).messages.create(**REQUEST)
    assert caught.value.body["error"]["message"] == "no"


def test_a_hosted_tool_is_rejected_by_name():
    """The engine gets no request."""
    served = Served(MESSAGES, ANSWER)

    with pytest.raises(anthropic.BadRequestError, match="web_search"):
        client(served).messages.create(**REQUEST, tools=[{"type": "web_search_20250305", "name": "web_search"}])
    assert served.chats == []


def test_an_interrupted_stream_raises_after_its_text():
    texts = []
    broke = client(Served(MESSAGES, ANSWER | {"broke": True})).messages

    with pytest.raises(anthropic.APIStatusError, match="the engine broke off"), broke.stream(**REQUEST) as stream:
        texts.extend(stream.text_stream)
    assert "".join(texts) == "It is sunny."


def test_models_are_listed():
    assert [model.id for model in client(Served(MESSAGES)).models.list()] == ["policy"]
