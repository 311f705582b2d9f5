"""The official SDK against answers of ours, over its own HTTP client: every helper of it, with warnings as errors."""

import anthropic
import httpx2
import orjson
import pytest
from anthropic_events import atoms, chunks_of, response_of
from pydantic import BaseModel

from proxy import errors
from proxy.errors import ProxyError
from proxy.protocols.dialects.messages import MESSAGES
from proxy.protocols.dialects.messages.models_list import models
from proxy.protocols.dialects.messages.tool_arguments import unrestorable_calls
from proxy.protocols.dialects.translation import CallIdentity, ResolvedReferences, TranslationOptions

CALL = {"id": "chatcmpl-tool-1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Paris"}'}}
CALLING = {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [CALL]}
SAYING = {"role": "assistant", "content": "It is sunny."}
SPLITS = [2, 5, 1]


class Served:
    """A server of the dialect in front of an engine that samples these messages, one a call."""

    def __init__(self, *replies):
        self.replies = list(replies)
        self.bodies = []
        self.chats = []
        self.known = {}

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/v1/models":
            return httpx2.Response(200, json=models({"data": [{"id": "policy", "created": 1}]}))
        body = orjson.loads(request.content)
        self.bodies.append(body)
        try:
            chat = MESSAGES.read(body, TranslationOptions(), ResolvedReferences(items=self.known))
            reply = self.replies.pop(0)
            if isinstance(reply, ProxyError):
                raise reply
        except ProxyError as error:
            return httpx2.Response(MESSAGES.status(error), content=MESSAGES.error(error))
        self.chats.append(chat)
        step = f"s{len(self.chats)}"
        told = MESSAGES.renderer(body, CallIdentity(step, 1795229441, body["model"]))
        response = reply if "choices" in reply else response_of(reply)
        message = response["choices"][0]["message"]
        self.known |= unrestorable_calls(message, step)
        if not chat.get("stream"):
            return httpx2.Response(200, content=orjson.dumps(told.whole(response)))
        chunks = chunks_of(atoms(message), SPLITS, response, apart=True)
        if message.get("broke"):
            stream = b"".join(told.feed(chunk) for chunk in chunks) + told.finish(None, "the engine broke off")
        else:
            stream = b"".join(told.feed(chunk) for chunk in chunks) + told.finish(response)
        return httpx2.Response(200, content=stream, headers={"content-type": "text/event-stream; charset=utf-8"})


def client(served):
    transport = httpx2.MockTransport(served)
    return anthropic.Anthropic(
        api_key="k", base_url="http://proxy", max_retries=0, http_client=httpx2.Client(transport=transport)
    )


ASKED = {"model": "policy", "max_tokens": 64, "messages": [{"role": "user", "content": "How is it in Paris?"}]}
TOOL = {
    "name": "weather",
    "description": "Tells it.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def test_messages_create():
    """Thoughts and calls, by name and type."""
    message = client(Served(CALLING)).messages.create(**ASKED, tools=[TOOL])

    assert ["thinking", "tool_use"] == [block.type for block in message.content]
    assert ("weather", {"city": "Paris"}) == (message.content[1].name, message.content[1].input)
    assert ("tool_use", 33, 5, "msg_s1") == (
        message.stop_reason,
        message.usage.input_tokens,
        message.usage.output_tokens,
        message.id,
    )


def test_messages_stream():
    """Its helper gives the text as it comes, and the message that the unstreamed call gives."""
    message = SAYING | {"reasoning": "Hm.", "tool_calls": [CALL]}
    with client(Served(message)).messages.stream(**ASKED) as stream:
        events = list(stream)
    told = stream.get_final_message()

    assert "It is sunny." == "".join(event.text for event in events if event.type == "text")
    assert "Hm." == "".join(event.thinking for event in events if event.type == "thinking")
    assert '{"city":"Paris"}' == "".join(event.partial_json for event in events if event.type == "input_json")
    assert told.to_dict() == client(Served(message)).messages.create(**ASKED).to_dict()


def test_an_agent_that_sends_its_message_back_sends_what_was_sampled():
    """By the SDK's own `to_param`, streamed and whole: reasoning, id and arguments byte for byte."""
    for streams in (False, True):
        served = Served(CALLING, SAYING)
        agent = client(served)
        if streams:
            with agent.messages.stream(**ASKED, tools=[TOOL]) as stream:
                reply = stream.get_final_message()
        else:
            reply = agent.messages.create(**ASKED, tools=[TOOL])
        result = {"type": "tool_result", "tool_use_id": reply.content[1].id, "content": "sunny"}
        turns = [*ASKED["messages"], reply.to_param(), {"role": "user", "content": [result]}]
        agent.messages.create(**ASKED | {"messages": turns}, tools=[TOOL])

        expected = [
            ASKED["messages"][0],
            CALLING,
            {"role": "tool", "tool_call_id": "chatcmpl-tool-1", "content": "sunny"},
        ]
        assert expected == served.chats[1]["messages"]


@pytest.mark.parametrize("streams", [False, True])
def test_the_tool_runner(streams):
    """Two turns of the beta's loop; its tool is called with what was sampled.

    It asks for a thread, a conversation held by the server, and goes on without one when that is refused.
    """
    called = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Tells it.

        Args:
            city: Where.
        """
        called.append(city)
        return "sunny"

    served = Served(CALLING, SAYING)
    runner = client(served).beta.messages.tool_runner(**ASKED, tools=[weather], stream=streams)
    last = runner.until_done()

    assert (["Paris"], "It is sunny.", "end_turn") == (called, last.content[0].text, last.stop_reason)
    assert [CALLING, {"role": "tool", "tool_call_id": "chatcmpl-tool-1", "content": "sunny"}] == served.chats[1][
        "messages"
    ][1:]
    assert ["create", None, None] == [(body.get("thread") or {}).get("type") for body in served.bodies]
    assert "city" in served.chats[0]["tools"][0]["function"]["parameters"]["properties"]


def test_messages_parse():
    """A schema is asked of the engine, and its answer is read by it."""

    class Weather(BaseModel):
        sunny: bool

    served = Served({"content": '{"sunny": true}'})
    message = client(served).messages.parse(**ASKED, output_format=Weather)

    assert message.parsed_output == Weather(sunny=True)
    assert ["sunny"] == list(served.chats[0]["response_format"]["json_schema"]["schema"]["properties"])


def test_the_beta_stream_and_its_headers():
    """`?beta=true` and its fields are taken; unknown ones are not sent."""
    served = Served(SAYING)
    asked = {
        "betas": ["context-management-2025-06-27"],
        "context_management": {"edits": []},
        "metadata": {"user_id": "u"},
    }
    with client(served).beta.messages.stream(**ASKED, **asked) as stream:
        assert "It is sunny." == stream.get_final_text()

    assert {"model", "messages", "max_tokens", "stream", "stream_options"} == served.chats[0].keys()


async def test_the_async_client():
    """The same."""
    transport = httpx2.MockTransport(Served(SAYING, SAYING))
    agent = anthropic.AsyncAnthropic(
        api_key="k", base_url="http://proxy", http_client=httpx2.AsyncClient(transport=transport)
    )

    whole = await agent.messages.create(**ASKED)
    async with agent.messages.stream(**ASKED) as stream:
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
def test_each_way_to_end(choice, expected):
    """Whole and streamed."""
    response = response_of(SAYING, **choice)
    agent = client(Served(response, response))

    whole = agent.messages.create(**ASKED, stop_sequences=["END"])
    with agent.messages.stream(**ASKED, stop_sequences=["END"]) as stream:
        streamed = stream.get_final_message()

    assert expected == (whole.stop_reason, whole.stop_sequence) == (streamed.stop_reason, streamed.stop_sequence)


def test_a_call_that_was_cut_off_breaks_nobody():
    """The agent sees that the limit was reached, and what came whole of the call."""
    cut = CALL | {"function": {"name": "weather", "arguments": '{"days": 7, "city": "Par'}}
    response = response_of({"content": None, "tool_calls": [cut]}, "length")
    agent = client(Served(response, response))

    with agent.messages.stream(**ASKED, tools=[TOOL]) as stream:
        streamed = stream.get_final_message()

    assert ({"days": 7}, "max_tokens") == (streamed.content[0].input, streamed.stop_reason)
    assert streamed.to_dict() | {"id": ""} == agent.messages.create(**ASKED, tools=[TOOL]).to_dict() | {"id": ""}


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (errors.NotFound("no"), anthropic.NotFoundError),
        (errors.Unauthorized("no"), anthropic.AuthenticationError),
        (errors.LimitReached("no"), anthropic.RateLimitError),
        (errors.UnprocessableRequest("no"), anthropic.BadRequestError),
        (errors.EngineBusy("no"), anthropic.InternalServerError),
    ],
)
def test_failures_are_raised_as_what_they_are(error, raised):
    """By status and type."""
    with pytest.raises(raised) as caught:
        client(Served(error)).messages.create(**ASKED)
    assert "no" == caught.value.body["error"]["message"]


def test_a_tool_of_a_server_is_refused_with_400_by_name():
    """And nothing is asked of the engine."""
    served = Served(SAYING)

    with pytest.raises(anthropic.BadRequestError, match="web_search"):
        client(served).messages.create(**ASKED, tools=[{"type": "web_search_20250305", "name": "web_search"}])
    assert [] == served.chats


def test_a_stream_that_breaks_is_raised():
    """After what came of it."""
    texts = []
    broke = client(Served(SAYING | {"broke": True})).messages

    with pytest.raises(anthropic.APIStatusError, match="the engine broke off"), broke.stream(**ASKED) as stream:
        texts.extend(stream.text_stream)
    assert "It is sunny." == "".join(texts)


def test_models_are_listed():
    """By the SDK's pages."""
    assert ["policy"] == [model.id for model in client(Served()).models.list()]
