"""The official SDK, over its own HTTP client, reads the dialect's responses; warnings are errors."""

import httpx2
import pytest
from google import genai
from google.genai import types
from google.genai.errors import APIError, ClientError, ServerError
from pydantic import BaseModel
from tests.support.anthropic_events import Served, response_of

from proxy import errors
from proxy.protocols.dialects.gemini import GEMINI

CALLS = [
    {"id": f"chatcmpl-tool-{number}", "type": "function", "function": {"name": "weather", "arguments": text}}
    for number, text in enumerate(['{"city":"Paris"}', '{"city":"Oslo"}'])
]
TOOL_CALL_MESSAGE = {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": CALLS}
ANSWER = {"role": "assistant", "content": "It is sunny."}
BOTH = pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])


@pytest.fixture
def client():
    """A factory of clients, which are closed after the test."""
    opened = []

    def make(served):
        transport = httpx2.Client(transport=httpx2.MockTransport(served))
        made = genai.Client(
            api_key="k", http_options=types.HttpOptions(base_url="http://proxy", httpx_client=transport)
        )
        opened.append(made)
        return made

    yield make
    for made in opened:
        made.close()


def generate(client, streams, contents="How is it in Paris?", **config):
    """Return the text, the calls and the last response of a call."""
    fields = {"model": "policy", "contents": contents, "config": types.GenerateContentConfig(**config)}
    if not streams:
        responses = [client.models.generate_content(**fields)]
    else:
        responses = list(client.models.generate_content_stream(**fields))
    calls = [call for response in responses for call in response.function_calls or ()]
    return "".join(response.text or "" for response in responses), calls, responses[-1]


@BOTH
def test_text_and_thoughts_are_returned(client, streams):
    """`.text` is without thoughts, also if the client requests them."""
    served = Served(GEMINI, ANSWER | {"reasoning": "Hm."}, ANSWER | {"reasoning": "Hm."})
    agent = client(served)
    text, _, last = generate(agent, streams)
    shown, _, _ = generate(agent, streams, thinking_config=types.ThinkingConfig(include_thoughts=True))

    assert text == shown == "It is sunny."
    usage = last.usage_metadata
    counts = (usage.prompt_token_count, usage.candidates_token_count)
    assert (last.candidates[0].finish_reason, *counts) == ("STOP", 33, 5)


def weather(city: str) -> str:
    """Returns the weather.

    Args:
        city: Where.
    """
    return f"sunny in {city}"


@BOTH
def test_automatic_function_calling_calls_each_function_with_its_arguments(client, streams):
    """The SDK sends the results of two parallel calls of one function, without ids."""
    served = Served(GEMINI, TOOL_CALL_MESSAGE, ANSWER)
    text, _, _ = generate(client(served), streams, tools=[weather])

    assert text == "It is sunny."
    assert [
        TOOL_CALL_MESSAGE,
        *(
            {"role": "tool", "tool_call_id": call["id"], "content": f'{{"result": "sunny in {city}"}}'}
            for call, city in zip(CALLS, ("Paris", "Oslo"), strict=True)
        ),
    ] == served.chats[1]["messages"][1:]
    parameters = served.chats[0]["tools"][0]["function"]["parameters"]
    assert (parameters["type"], parameters["properties"]["city"]["type"]) == ("object", "string")


@BOTH
def test_a_chat_sends_back_what_was_sampled(client, streams):
    """Thoughts, which the client does not receive, ids and arguments, byte for byte."""
    served = Served(GEMINI, TOOL_CALL_MESSAGE, ANSWER | {"reasoning": "So."}, ANSWER)
    chat = client(served).chats.create(
        model="policy", config=types.GenerateContentConfig(tools=[weather], system_instruction="Be brief.")
    )
    for text in ("How is it?", "And now?"):
        if streams:
            list(chat.send_message_stream(text))
        else:
            chat.send_message(text)

    sent = served.chats[-1]["messages"]
    assert [message["role"] for message in sent] == ["system", "user", "assistant", "tool", "tool", "assistant", "user"]
    assert [one for one in sent if one["role"] == "assistant"] == [TOOL_CALL_MESSAGE, ANSWER | {"reasoning": "So."}]


def test_a_schema_is_sent_and_its_response_is_parsed(client):

    class Weather(BaseModel):
        sunny: bool

    served = Served(GEMINI, {"content": '{"sunny": true}'})
    _, _, response = generate(
        client(served), streams=False, response_mime_type="application/json", response_schema=Weather
    )

    assert Weather(sunny=True) == response.parsed
    schema = served.chats[0]["response_format"]["json_schema"]["schema"]
    assert (schema["type"], schema["properties"]["sunny"]["type"]) == ("object", "boolean")


@BOTH
def test_forced_functions_and_every_config_field_of_the_sdk(client, streams):
    served = Served(GEMINI, TOOL_CALL_MESSAGE)
    declaration = types.FunctionDeclaration(name="weather", parameters_json_schema={"type": "object"})
    calling = types.FunctionCallingConfig(mode="ANY", allowed_function_names=["weather"])
    _, calls, _ = generate(
        client(served), streams, temperature=0.5, top_p=0.9, top_k=40, max_output_tokens=9, stop_sequences=["END"], seed=7,
        candidate_count=1, presence_penalty=1, frequency_penalty=1, response_logprobs=True, logprobs=2,
        safety_settings=[types.SafetySetting(category="HARM_CATEGORY_HARASSMENT", threshold="BLOCK_NONE")],
        tools=[types.Tool(function_declarations=[declaration])], labels=None,
        tool_config=types.ToolConfig(function_calling_config=calling),
        thinking_config=types.ThinkingConfig(thinking_level="LOW"),
    )  # fmt: skip

    assert [(call.name, call.args) for call in calls] == [("weather", {"city": "Paris"}), ("weather", {"city": "Oslo"})]
    chat = served.chats[0]
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    names = {
        "reasoning_effort": "low",
        "temperature": 0.5,
        "top_k": 40,
        "max_tokens": 9,
        "stop": ["END"],
        "seed": 7,
        "n": 1,
        "top_logprobs": 2,
    }
    assert names == {name: chat[name] for name in names}


@BOTH
def test_a_truncated_call_has_its_complete_arguments(client, streams):
    cut = CALLS[0] | {"function": {"name": "weather", "arguments": '{"days": 7, "city": "Par'}}
    _, calls, last = generate(
        client(Served(GEMINI, response_of({"content": None, "tool_calls": [cut]}, "length"))), streams
    )

    assert (calls[0].args, last.candidates[0].finish_reason) == ({"days": 7}, "MAX_TOKENS")


@BOTH
@pytest.mark.parametrize(
    ("error", "raised", "code", "status"),
    [
        (errors.NotFound("no"), ClientError, 404, "NOT_FOUND"),
        (errors.Unauthorized("no"), ClientError, 401, "UNAUTHENTICATED"),
        (errors.LimitReached("no"), ClientError, 429, "RESOURCE_EXHAUSTED"),
        (errors.InvalidValue("no"), ClientError, 400, "INVALID_ARGUMENT"),
        (errors.RolloutClosed("no"), ClientError, 409, "ABORTED"),
        (errors.EngineBusy("no"), ClientError, 429, "RESOURCE_EXHAUSTED"),
        (errors.StoreUnavailable("no"), ServerError, 503, "UNAVAILABLE"),
    ],
)
def test_errors_raise_the_sdks_exceptions(client, streams, error, raised, code, status):
    with pytest.raises(raised) as caught:
        generate(client(Served(GEMINI, error)), streams)

    assert (caught.value.code, caught.value.status, caught.value.message) == (code, status, "no")


def test_a_hosted_tool_is_rejected_by_name(client):
    """The engine gets no request."""
    served = Served(GEMINI, ANSWER)

    with pytest.raises(ClientError, match="googleSearch: is a tool that Google runs"):
        generate(client(served), streams=False, tools=[types.Tool(google_search=types.GoogleSearch())])
    assert served.chats == []


def test_an_interrupted_stream_raises_after_its_text(client):
    texts, models = [], client(Served(GEMINI, ANSWER | {"broke": True})).models

    with pytest.raises(APIError, match="the engine broke off"):
        texts.extend(chunk.text for chunk in models.generate_content_stream(model="policy", contents="Hi"))
    assert "".join(texts) == "It is sunny."


def test_models_are_listed(client):
    (model,) = client(Served(GEMINI)).models.list()

    assert (model.name, model.input_token_limit) == ("models/policy", 4096)
    assert model.supported_actions == ["generateContent", "countTokens"]
