"""The official SDK reads the dialect's output without a warning, and returns it as the sampled message."""

import httpx2
import openai
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from tests.support.anthropic_events import folded
from tests.support.responses_drawn import (
    BODY,
    IDENTITY,
    SEALED,
    TOOLS,
    as_chat,
    events_of,
    in_chunks,
    messages,
    response_of,
    sampled_calls,
    stream_of,
)

from proxy.errors import NotFound
from proxy.protocols.dialects.base import ResolvedReferences, TranslationOptions
from proxy.protocols.dialects.responses import RESPONSES

EVENT = TypeAdapter(ResponseStreamEvent)


class Sums(BaseModel):
    """The schema of a parsed response."""

    total: int


class Answering(httpx2.BaseTransport):
    """A server of one response that records its requests."""

    def __init__(self, message, chunks=None, reason="stop", error=None):
        self.message, self.chunks, self.reason, self.error = message, chunks, reason, error
        self.requests = []

    def handle_request(self, request):
        body = orjson.loads(request.read())
        self.requests.append(body)
        if self.error is not None:
            return httpx2.Response(404, content=self.error, headers={"Content-Type": "application/json"})
        RESPONSES.read(body, TranslationOptions())
        if body.get("stream"):
            text, kind = stream_of(body, self.chunks), "text/event-stream"
        else:
            text, kind = (
                orjson.dumps(RESPONSES.renderer(body, IDENTITY).whole(response_of(self.message, self.reason))),
                "application/json",
            )
        return httpx2.Response(200, content=text, headers={"Content-Type": kind})


def client_for(server):
    """The SDK, before this server."""
    return openai.OpenAI(
        api_key="k", base_url="http://x/v1", http_client=httpx2.Client(transport=server), max_retries=0
    )


@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(message=messages(), sealed=st.booleans(), reason=st.sampled_from(["stop", "length", "abort"]), data=st.data())
def test_each_event_and_each_response_validates_as_the_sdks_type(message, sealed, reason, data):
    """Validated, not only constructed: no field is missing or of another type."""
    body = SEALED if sealed else BODY
    for event in events_of(stream_of(body, data.draw(in_chunks(message, reason)))):
        EVENT.validate_python(event)
        if "response" in event:
            Response.model_validate(event["response"])
    Response.model_validate(RESPONSES.renderer(body, IDENTITY).whole(response_of(message, reason)))


def test_refusals_errors_and_logprobs_validate_as_the_sdks_types():
    entry = {
        "token": "a",
        "logprob": -1.0,
        "bytes": None,
        "top_logprobs": [{"token": "b", "logprob": -2.0, "bytes": [98]}],
    }
    refusal = {"choices": [{"index": 0, "delta": {"refusal": "no"}, "finish_reason": "stop"}]}
    text = {
        "choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": {"content": [entry]}, "finish_reason": "stop"}]
    }
    streams = [
        stream_of(SEALED, [refusal]),
        stream_of(SEALED, [text]),
        stream_of(SEALED, [text], "broke"),
        stream_of(BODY, [], "x"),
    ]
    kinds = {EVENT.validate_python(event).type for stream in streams for event in events_of(stream)}

    assert {"response.refusal.delta", "response.refusal.done", "response.output_text.delta", "response.failed"} <= kinds


@pytest.fixture(scope="module")
def connected():
    """A server and its only client, since clients are slow to construct. Tests replace the server's response."""
    server = Answering(None)
    return server, client_for(server)


@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(message=messages(), data=st.data())
def test_what_the_sdk_accumulates_and_returns_is_the_sampled_message(connected, message, data):
    """`responses.stream`, then its output items appended to the next request's input, as in the SDK's guide."""
    server, client = connected
    server.message, server.chunks = message, (chunks := data.draw(in_chunks(message)))
    server.requests.clear()
    with client.responses.stream(model="gpt-5", input="hi", tools=TOOLS) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    again = client.responses.create(
        model="gpt-5", input=[{"role": "user", "content": "hi"}, *final.output], tools=TOOLS
    )
    sampled = folded(chunks)["choices"][0]["message"]

    assert "".join(texts) == final.output_text == (sampled["content"] or "")
    assert IDENTITY.step_id in again.id
    chat = RESPONSES.read(server.requests[1], TranslationOptions(), ResolvedReferences(calls=sampled_calls(sampled)))
    assert [{"role": "user", "content": "hi"}, as_chat(sampled)] == chat["messages"]


def test_responses_are_parsed_by_a_schema():
    """`responses.parse` and a stream with `text_format`: the engine gets the schema, and the text is parsed."""
    message = {"role": "assistant", "content": '{"total": 4}'}
    server = Answering(message, [{"choices": [{"index": 0, "delta": message, "finish_reason": "stop"}]}])
    client = client_for(server)
    parsed = client.responses.parse(model="gpt-5", input="2+2", text_format=Sums)
    with client.responses.stream(model="gpt-5", input="2+2", text_format=Sums) as stream:
        list(stream)

    assert Sums(total=4) == parsed.output_parsed == stream.get_final_response().output_parsed
    form = RESPONSES.read(server.requests[0], TranslationOptions())["response_format"]
    assert (form["type"], form["json_schema"]["name"], form["json_schema"]["strict"]) == ("json_schema", "Sums", True)
    assert form["json_schema"]["schema"]["properties"].keys() == {"total"}


def test_a_parsed_tool_call_is_returned_with_its_sampled_arguments():
    """`pydantic_function_tool` in a loop of two turns."""
    call = {"id": "c1", "type": "function", "function": {"name": "Sums", "arguments": '{ "total" :4}'}}
    server = Answering({"role": "assistant", "content": None, "tool_calls": [call]})
    client = client_for(server)
    turn = client.responses.parse(model="gpt-5", input="go", tools=[openai.pydantic_function_tool(Sums)])
    (item,) = turn.output
    output = {"type": "function_call_output", "call_id": item.call_id, "output": "4"}
    client.responses.create(model="gpt-5", input=[{"role": "user", "content": "go"}, item, output])

    assert Sums(total=4) == item.parsed_arguments
    chat = RESPONSES.read(server.requests[1], TranslationOptions())["messages"]
    assert chat[1]["tool_calls"] == [call]
    assert chat[2] == {"role": "tool", "tool_call_id": "c1", "content": "4"}


def test_errors_raise_the_sdks_exceptions():
    """The proxy's errors and the engine's both do."""
    with pytest.raises(openai.NotFoundError, match="no such rollout") as own:
        client_for(Answering(None, error=RESPONSES.error(NotFound("no such rollout")))).responses.create(input="x")
    with pytest.raises(openai.NotFoundError, match="no model") as engines:
        body = RESPONSES.engine_error(404, '{"object": "error", "message": "no model", "code": 404}')
        client_for(Answering(None, error=body)).responses.create(input="x")

    assert (own.value.type, engines.value.type) == ("not_found_error", "not_found_error")


async def test_the_async_client_reads_a_stream():
    """As agents use it."""
    chunk = {"choices": [{"index": 0, "delta": {"content": "so"}, "finish_reason": "stop"}]}

    async def respond(request):
        return httpx2.Response(200, content=stream_of(BODY, [chunk]), headers={"Content-Type": "text/event-stream"})

    async with httpx2.AsyncClient(transport=httpx2.MockTransport(respond)) as http:
        client = openai.AsyncOpenAI(api_key="k", base_url="http://x/v1", http_client=http)
        kinds = [event.type async for event in await client.responses.create(model="m", input="x", stream=True)]

    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
