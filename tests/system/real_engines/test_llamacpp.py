"""A real llama.cpp behind the proxy: its responses unchanged, its tokens exact or flagged."""

from itertools import pairwise

import aiohttp
import openai
import orjson
import pytest

from .through import through_proxy

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EOS = 2
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]
CONVERSATION = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "Hello <|im_end|>"},
    {"role": "assistant", "content": "Hi  there 🦙"},
    *QUESTION,
]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
TEXT = "<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\n"
_CHAT = {"model": "smollm2", "messages": QUESTION, "max_tokens": 40, "temperature": 0}
_TEXT = {"model": "smollm2", "prompt": TEXT, "max_tokens": 40, "temperature": 0}

# name -> (path, body, problems of which the step has one; none if it is exact)
CASES = {
    "chat": (CHAT, _CHAT, set()),
    "conversation": (CHAT, _CHAT | {"messages": CONVERSATION}, set()),
    "sampled": (CHAT, _CHAT | {"temperature": 0.8, "seed": 11}, set()),
    "length": (CHAT, _CHAT | {"max_tokens": 3}, set()),
    "tools": (CHAT, _CHAT | {"tools": [TOOL]}, set()),
    "structured": (CHAT, _CHAT | {"response_format": {"type": "json_object"}}, set()),
    "several tokens a character": (CHAT, _CHAT | {"grammar": 'root ::= "a🦙🎉"'}, {"logprob_count"}),
    "cut inside a character": (CHAT, _CHAT | {"grammar": 'root ::= "🦙"', "max_tokens": 2}, {"no_logprobs"}),
    "stop string": (CHAT, _CHAT | {"stop": [" of"]}, {"logprob_count"}),
    "stop in the first token": (CHAT, _CHAT | {"stop": ["he"]}, {"no_logprobs"}),
    "n=2": (CHAT, _CHAT | {"n": 2, "temperature": 1, "seed": 3}, {"uncounted"}),
    "no tokens": (CHAT, _CHAT | {"max_tokens": 0}, {"phantom_token"}),
    "completions": (COMPLETIONS, _TEXT, set()),
    "ids in": (COMPLETIONS, _TEXT | {"prompt": [504, 3575, 282], "max_tokens": 8}, set()),
    "completions stop": (COMPLETIONS, _TEXT | {"stop": [" I"]}, {"logprob_count"}),
    "completions over several": (COMPLETIONS, _TEXT | {"grammar": 'root ::= "a🦙🎉"'}, {"logprob_count"}),
    "two prompts": (COMPLETIONS, _TEXT | {"prompt": ["Once upon", "The quick brown fox"]}, {"uncounted"}),
}
# Streams of completions are live: they have entries for a stop string's tokens, but ids only where they have entries.
LIVE = {"completions stop": set(), "completions over several": {"completion_count"}}
# The engine's own stream drops an incomplete character; unstreamed, and so replayed, it is U+FFFD.
STREAMED_OTHERWISE = {"cut inside a character"}
ASKED = {
    "chat logprobs": (CHAT, _CHAT | {"logprobs": True, "top_logprobs": 2}),
    "chat verbose": (CHAT, _CHAT | {"verbose": True}),
    "completions logprobs": (COMPLETIONS, _TEXT | {"logprobs": 3}),
}


@pytest.fixture
async def http():
    async with aiohttp.ClientSession() as session:
        yield session


async def posted(http, url, body):
    async with http.post(url, json=body) as response:
        return response.status, await response.read()


def normal(response):
    """Return a response or event without what differs between any two runs: names, times, cache hits.

    Nor `__verbose`, which shows the request, including our flags.
    """
    response = {**response, "id": "", "created": 0, "timings": sorted(response.get("timings") or ())}
    if "usage" in response:
        response["usage"] = {**response["usage"], "prompt_tokens_details": None}
    if "__verbose" in response:
        response["__verbose"] = None
    return orjson.dumps(response)


def events(stream):
    """Return the payloads of a stream, which must end properly, without its comments."""
    payloads = [line.removeprefix(b"data: ") for line in stream.split(b"\n") if line.startswith(b"data: ")]
    assert payloads[-1] == b"[DONE]"
    return [event for payload in payloads[:-1] if (event := orjson.loads(payload)) is not None]


def contents_from(stream):
    """Return text and finish reason by choice, and the keys of choices and deltas."""
    contents = {}
    for event in events(stream):
        for choice in event["choices"]:
            text, keys, finish = contents.setdefault(choice["index"], ("", set(), None))
            delta = choice.get("delta", {})
            text += choice.get("text") or delta.get("content") or ""
            contents[choice["index"]] = (text, keys | choice.keys() | delta.keys(), choice["finish_reason"] or finish)
    return contents


async def tokenized(http, engine, text):
    body = {"content": text, "parse_special": True, "add_special": False}
    _, response = await posted(http, f"{engine.url}/tokenize", body)
    return orjson.loads(response)["tokens"]


async def call_and_read_steps(llamacpp, http, folder, path, *bodies):
    """Return the responses through the proxy, and the recorded steps."""
    async with through_proxy(llamacpp.url, folder) as proxy:
        responses = [await posted(http, f"{proxy.url}/rollouts/r1{path}", body) for body in bodies]
        return responses, await proxy.steps("r1")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("case", CASES)
async def test_calls_are_recorded_exactly_or_flagged(llamacpp, http, tmp_path, case, stream):
    """A step has every sampled id and its logprob, or a flag for what is missing, streamed and not."""
    path, body, problems = CASES[case]
    problems = LIVE.get(case, problems) if stream else problems
    _, own = await posted(http, llamacpp.url + path, body | {"verbose": True, "return_tokens": True})
    verbose = orjson.loads(own)["__verbose"]
    ((status, _),), (step,) = await call_and_read_steps(
        llamacpp, http, tmp_path, path, body | ({"stream": True} if stream else {})
    )
    choices, found = step["choices"], set(step["fidelity"]["problems"])

    assert status == 200
    assert (step["fidelity"]["exact"], problems <= found) == (not problems, True), step["fidelity"]
    if len(choices) == 1 and "completion_count" not in problems:
        assert choices[0]["ids"] == verbose["tokens"]
        assert (choices[0]["ids"][-1] == EOS) == (verbose["stop_type"] == "eos")
        assert step["prompt_ids"] == await tokenized(http, llamacpp, verbose["prompt"])
    if not problems:
        assert len(choices[0]["ids"]) == len(choices[0]["logprobs"]) > 0


async def test_the_prompt_is_the_rendered_template(llamacpp, http, tmp_path):
    """The prompt's ids are those of the template, also if a user's text looks like a special token."""
    _, rendered = await posted(http, f"{llamacpp.url}/apply-template", {"messages": CONVERSATION})
    expected = await tokenized(http, llamacpp, orjson.loads(rendered)["prompt"])

    _, (step,) = await call_and_read_steps(llamacpp, http, tmp_path, CHAT, _CHAT | {"messages": CONVERSATION})

    assert step["prompt_ids"] == expected
    assert len(expected) == step["usage"]["prompt_tokens"]


@pytest.mark.parametrize("case", CASES | ASKED)
async def test_an_unstreamed_response_is_unchanged(llamacpp, http, tmp_path, case):
    """The client gets what the engine alone answers: the same keys in the same order."""
    path, body = (CASES | ASKED)[case][:2]
    status, own = await posted(http, llamacpp.url + path, body)
    (shown,), _ = await call_and_read_steps(llamacpp, http, tmp_path, path, body)

    assert (status, normal(orjson.loads(own))) == (shown[0], normal(orjson.loads(shown[1])))


@pytest.mark.parametrize("case", [case for case in CASES if case not in STREAMED_OTHERWISE])
async def test_a_stream_has_the_contents_of_the_engines_own(llamacpp, http, tmp_path, case):
    """Text, finish reasons and keys are those of the engine's own stream, also if it is synthetic."""
    path, body, _ = CASES[case]
    _, own = await posted(http, llamacpp.url + path, body | {"stream": True})
    (shown,), (step,) = await call_and_read_steps(llamacpp, http, tmp_path, path, body | {"stream": True})
    expected, actual = events(own), events(shown[1])

    assert contents_from(own) == contents_from(shown[1])
    assert (expected[0].keys(), expected[-1].keys()) == (actual[0].keys(), actual[-1].keys())
    assert step["extra"]["streaming"] == ("replay" if path == CHAT else "live")


@pytest.mark.parametrize(("path", "body"), [(CHAT, _CHAT), (COMPLETIONS, _TEXT)], ids=["chat", "completions"])
async def test_usage_is_in_the_event_where_the_engine_sends_it(llamacpp, http, tmp_path, path, body):
    """On request it is in a separate event in chat, and always in the last event of completions."""
    with_usage = body | {"stream": True, "stream_options": {"include_usage": True}}
    _, own = await posted(http, llamacpp.url + path, with_usage)
    (shown,), _ = await call_and_read_steps(llamacpp, http, tmp_path, path, with_usage)
    expected, actual = events(own)[-1], events(shown[1])[-1]

    assert expected.keys() == actual.keys()
    assert normal(expected) == normal({key: actual[key] for key in expected})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, _CHAT | {"tools": [TOOL], "stream": True, "logprobs": True, "top_logprobs": 1}),
        (CHAT, _CHAT | {"top_logprobs": 2}),
        (CHAT, _CHAT | {"n": 3}),
        (CHAT, _CHAT | {"temperature": "warm", "stream": True}),
        (CHAT, {"model": "smollm2", "stream": True}),
        (COMPLETIONS, _TEXT | {"prompt": [10**8]}),
    ],
    ids=["tools, stream and logprobs", "top_logprobs alone", "more choices than slots", "type", "no messages", "ids"],
)
async def test_an_error_is_unchanged(llamacpp, http, tmp_path, path, body):
    """What the engine rejects is rejected through the proxy, byte for byte the same."""
    own = await posted(http, llamacpp.url + path, body)
    (shown,), _ = await call_and_read_steps(llamacpp, http, tmp_path, path, body)

    assert own[0] == 400
    assert own == shown


async def test_an_agent_with_the_official_client_is_recorded_exactly(llamacpp, tmp_path):
    """With turns streamed and not, with tools and without: each prompt starts with the previous ids."""
    messages = list(QUESTION)
    async with through_proxy(llamacpp.url, tmp_path) as proxy, proxy.agent("r1") as agent:
        for stream, tools in ((False, openai.omit), (True, openai.omit), (True, [TOOL])):
            reply = await agent.chat.completions.create(
                model="smollm2", messages=messages, temperature=0, max_tokens=30, stream=stream, tools=tools
            )
            text = reply.choices[0].message.content if not stream else ""
            if stream:
                text = "".join([chunk.choices[0].delta.content or "" async for chunk in reply])
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
        steps = await proxy.steps("r1")

    assert [True, True, True] == [step["fidelity"]["exact"] for step in steps], [step["fidelity"] for step in steps]
    for before, after in pairwise(steps):
        whole = before["prompt_ids"] + before["choices"][0]["ids"]
        assert after["prompt_ids"][: len(whole)] == whole or before["choices"][0]["finish_reason"] == "length"


async def test_the_engine_type_is_detected(llamacpp, tmp_path):
    """Without configuration."""
    async with through_proxy(llamacpp.url, tmp_path) as proxy, proxy.agent("r1") as agent:
        await agent.completions.create(model="smollm2", prompt="Once", max_tokens=1)
        (engine,) = (await proxy.get("/engines"))["engines"]

    assert (engine["kind"], engine["streams"]) == ("llamacpp", {"chat": "replay", "completions": "live"})


async def test_recorded_logprobs_are_the_models_own(llamacpp, http, tmp_path):
    """The same at any temperature, and under a grammar."""
    bodies = [_CHAT | {"max_tokens": 1, "grammar": 'root ::= "The"', "temperature": heat} for heat in (0, 0.8, 1.5)]
    _, steps = await call_and_read_steps(llamacpp, http, tmp_path, CHAT, *bodies)

    assert 1 == len({step["choices"][0]["logprobs"][0] for step in steps})
    assert {"raw_logprobs"} == {step["sampling"]["logprobs_mode"] for step in steps}
