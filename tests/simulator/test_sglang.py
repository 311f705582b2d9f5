"""SGLang's routes from the clients' side; test_recorded.py has the shapes of their responses, and errors."""

import openai
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.json_bodies import BODIES, JSON
from tests.support.recorded import load
from tests.support.simulated import HELLO, chunks_from

from proxy.protocols.engines import PROBE_PATHS, identify_engine
from proxy.protocols.engines.base import ProbeResponse, Traits
from proxy.simulator.options import Options

NO_PARSER = Options(shape="sglang", has_parser=False)
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
IDS = {"return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True}
ALL_TOKENS = {"return_token_ids": True, "return_meta_info": True, "logprobs": True}
THINKS = {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.mark.parametrize("has_parser", [True, False])
async def test_it_is_detected(start, has_parser):
    """It is detected as SGLang, with or without parsers."""
    engine = await start(Options(shape="sglang", has_parser=has_parser))
    answers = {path: await engine.get(path) for path in PROBE_PATHS}
    seen = {
        path: ProbeResponse(status, "", orjson.loads(raw) if status == 200 and raw else None)
        for path, (status, raw) in answers.items()
    }

    assert Traits("sglang", "simulator-0.1", has_parser, model="simulated") == identify_engine(seen)


async def test_openais_client_chats(sglang):
    """OpenAI's client gets a chat completion, the same one as a stream, and completions."""
    url = str(sglang.client.make_url("/v1"))
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as agent:
        completion = await agent.chat.completions.create(model="any", messages=HELLO, seed=1, logprobs=True)
        stream = await agent.chat.completions.create(model="any", messages=HELLO, seed=1, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        completed = await agent.completions.create(model="any", prompt="Return the", seed=1)

    assert completion.choices[0].message.content == text
    assert completion.usage.completion_tokens == len(completion.choices[0].logprobs.content)
    assert completed.choices[0].text


@pytest.mark.parametrize("stream", [True, False])
async def test_an_overlong_prompt_is_the_recorded_error(start, stream):
    """A prompt that does not fit into the context window is a 400 with SGLang's message, streamed or not."""
    engine = await start(Options(shape="sglang", max_model_len=4000))
    body = {"messages": [{"role": "user", "content": " word" * 6000}], "stream": stream}
    status, raw = await engine.answer(CHAT, body)
    error, recorded = orjson.loads(raw), orjson.loads(load("recorded/err_overlong_n_plain", "sglang").response)
    count = error["message"].split("(")[1].split(" ")[0]
    message = recorded["message"].replace("2110", count).replace("2048", "4000")

    assert (400, {**recorded, "message": message}) == (status, error)


@pytest.mark.parametrize("flag", ["return_token_ids", "return_meta_info", "return_prompt_token_ids"])
async def test_an_older_server_ignores_the_flags(start, flag):
    """An older server responds as if the request had no flags for ids."""
    engine = await start(Options(shape="sglang", supports_ids_flags=False, seed=1))
    plain, flagged = await engine.chat(), await engine.chat(**{flag: True})
    chunks = await engine.chat_stream(**{flag: True})

    assert flagged["choices"] == plain["choices"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("aborts", [False, True])
async def test_the_version_can_change_during_a_call(start, aborts):
    """Tokens after an update of the label have the new version; by default the update aborts running calls."""
    engine = await start(Options(shape="sglang", token_delay_s=0.002))
    body = {"text": "If", "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}, "stream": True}
    async with engine.client.post(GENERATE, json=body) as response:
        first = await response.content.readuntil(b"\n\n")
        more = {} if aborts else {"abort_all_requests": False}
        updated = await engine("/update_weight_version", new_version="v2", **more)
        last = chunks_from(first + await response.read())[-1]["meta_info"]
    label = orjson.loads((await engine.get("/model_info"))[1])["weight_version"]
    first_span, second_span = last["weight_versions"]

    assert (updated["new_version"], label, last["weight_version"]) == ("v2", "v2", "v2")
    assert (first_span["version"], first_span["start"], second_span["version"]) == ("default", 0, "v2")
    assert (first_span["end"], second_span["end"]) == (second_span["start"], last["completion_tokens"])
    assert last["finish_reason"]["type"] == ("abort" if aborts else "length")


async def test_metadata_has_the_spans(start):
    """An unstreamed response always has the spans of its first choice."""
    completion = await (await start(Options(shape="sglang", weight_version="step-7"))).chat(seed=1)
    spans = [{"version": "step-7", "start": 0, "end": completion["usage"]["completion_tokens"]}]

    assert completion["metadata"] == {"weight_version": "step-7", "weight_versions": spans}


async def test_rid_is_the_id(sglang):
    """`rid` is the id of the response and of its `meta_info`."""
    completion = await sglang.chat(rid="ro-1:step-3", return_meta_info=True)

    assert completion["id"] == completion["choices"][0]["meta_info"]["id"] == "ro-1:step-3"


async def test_tokenize_and_detokenize(sglang):
    """Both paths of tokenize return the ids of a text, and detokenize returns the text."""
    tokenized = await sglang("/v1/tokenize", prompt="Return the")

    assert tokenized == await sglang("/tokenize", prompt="Return the")
    assert list(tokenized) == ["tokens", "count", "max_model_len"]
    assert await sglang("/v1/detokenize", tokens=tokenized["tokens"]) == {"text": "Return the"}


async def test_metrics_have_the_number_of_running_calls(sglang):
    assert b'sglang:num_running_reqs{model_name="simulated"} 0.0' in (await sglang.get("/metrics"))[1]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 2},
        {"temperature": 0.5},
        {"tools": True},
        {"tools": True, **THINKS},
        {"stop": ["e c", "The end of all"]},
        {"max_tokens": 5},
    ],
)
async def test_a_streamed_chat_equals_the_unstreamed_one(sglang, tools, more):
    """With a parser, a stream has the ids, logprobs, text, reasoning and calls of the same call unstreamed."""
    more = {**more, "tools": tools} if "tools" in more else more
    complete = await sglang.chat(seed=3, **ALL_TOKENS, **more)
    chunks = await sglang.chat_stream(seed=3, logprobs=True, **IDS, **more)
    (extension,) = [chunk["sglext"] for chunk in chunks if "sglext" in chunk]

    for choice in complete["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        deltas = [part["delta"] for part in parts]
        calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
        message = choice["message"]
        entries = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert entries == choice["logprobs"]["content"]
        assert extension["output_ids"][choice["index"]] == choice["response_token_ids"]
        assert "".join(delta.get("content") or "" for delta in deltas).strip() == message["content"].strip()
        assert "".join(delta["reasoning_content"] or "" for delta in deltas) == (message["reasoning_content"] or "")
        assert "".join(call["arguments"] for call in calls) == "".join(
            call["function"]["arguments"] for call in message.get("tool_calls", ())
        )
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        if choice["finish_reason"] != "tool_calls":  # only streams have the stop token then
            assert parts[-1]["matched_stop"] == choice["matched_stop"]
    assert extension["input_ids"] == complete["choices"][0]["prompt_token_ids"]


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"prompt": ["If", "Return the"]}, {"stop": "e c"}, {"echo": True}])
async def test_streamed_completions_equal_the_unstreamed_ones(sglang, more):
    """The same seed gives each choice the same ids, logprobs and text; an echo precedes the text."""
    body = {"prompt": "Return the", "seed": 3, "max_tokens": 30, "return_token_ids": True, "logprobs": 2, **more}
    whole, streamed = await sglang.both(COMPLETIONS, **body)

    assert whole["choices"] == streamed["choices"]
    assert "echo" not in more or whole["choices"][0]["text"].startswith("Return the")


async def test_without_a_parser_streams_lose_logprobs(start):
    """Without a parser, the stream has no logprobs of the end of the turn or of tokens that add no text."""
    chunks = await (await start(NO_PARSER)).chat_stream(seed=3, logprobs=True, **IDS)
    logprobs = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    entries = [entry["token"] for each in logprobs for entry in each["content"]]
    (ids,) = next(chunk["sglext"]["output_ids"] for chunk in chunks if "sglext" in chunk)

    assert len(entries) == len(ids) - 1
    assert "<|im_end|>" not in entries


async def test_without_a_parser_calls_and_reasoning_are_content(start, tools):
    message = (await (await start(NO_PARSER)).chat(tools=tools, **THINKS))["choices"][0]["message"]

    assert message["reasoning_content"] is None
    assert "tool_calls" not in message
    assert "</think>" in message["content"]
    assert "<tool_call>" in message["content"]


async def test_meta_info_has_ids_and_logprobs(sglang):
    """`output_token_logprobs` has the ids, texts and logprobs of its choice."""
    completion = await sglang.chat(seed=3, temperature=0.7, **ALL_TOKENS)
    (choice,) = completion["choices"]
    logprobs, ids, texts = zip(*choice["meta_info"]["output_token_logprobs"], strict=True)
    entries = [(entry["logprob"], entry["token"]) for entry in choice["logprobs"]["content"]]

    assert choice["response_token_ids"] == list(ids)
    assert entries == list(zip(logprobs, texts, strict=True))
    assert choice["meta_info"]["weight_versions"] == completion["metadata"]["weight_versions"]


async def test_logprobs_are_after_temperature(sglang):
    """A lower temperature raises the logprob of the most likely token; greedy calls have the model's own logprobs."""

    async def first(temperature: float) -> float:
        completion = await sglang.chat(temperature=temperature, logprobs=True, top_logprobs=1, max_tokens=1)
        return completion["choices"][0]["logprobs"]["content"][0]["top_logprobs"][0]["logprob"]

    assert await first(0.5) > await first(1.0) == await first(0.0)


async def test_experts_are_in_meta_info_or_sglext(start):
    """Requested experts are in `meta_info` if that is requested, too, or always there, and otherwise in `sglext`."""
    engine = await start(Options(shape="sglang", routed_experts=True))
    fields = {"seed": 3, "return_routed_experts": True}
    in_sglext = await engine.chat(**fields)
    in_meta_info = await engine.chat(**fields, return_meta_info=True)

    assert in_sglext["sglext"]["routed_experts"] == in_meta_info["choices"][0]["meta_info"]["routed_experts"]
    assert "sglext" not in in_meta_info
    assert "sglext" not in await engine.chat()
    assert (await engine(GENERATE, text="If", return_routed_experts=True))["meta_info"]["routed_experts"]


async def test_usage_can_be_in_each_chunk(sglang):
    """With continuous_usage_stats each chunk but the last has the number of tokens of its choice so far."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await sglang.chat_stream(seed=3, max_tokens=3, ignore_eos=True, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")]

    assert counts == sorted(counts)
    assert set(counts) == {1, 2, 3}


def sampling(**more):
    return {"sampling_params": {"max_new_tokens": 20, "sampling_seed": 3, **more}}


async def test_a_response_of_generate_has_text_ids_and_meta_info(sglang):
    """The prompt's ids and logprobs are optional."""
    plain = await sglang(GENERATE, text="Return the", **sampling())
    full = await sglang(GENERATE, text="Return the", return_prompt_token_ids=True, return_logprob=True, **sampling())
    meta = full["meta_info"]

    assert list(plain) == ["text", "output_ids", "meta_info"]
    assert list(full) == ["text", "output_ids", "prompt_token_ids", "meta_info"]
    assert "output_token_logprobs" not in plain["meta_info"]
    assert [pair[1:] for pair in meta["output_token_logprobs"]] == [[i, None] for i in full["output_ids"]]
    assert (meta["input_token_logprobs"], meta["completion_tokens"]) == ([], len(full["output_ids"]))


async def test_scoring_gives_the_logprobs_of_sampling(sglang):
    """Ids sampled at temperature 1, scored as a prompt, have exactly the logprobs of their sampling."""
    fields = {"return_logprob": True, "return_prompt_token_ids": True}
    sampled = await sglang(GENERATE, text="Return the", **fields, **sampling())
    start = len(sampled["prompt_token_ids"]) - 1
    ids = sampled["prompt_token_ids"] + sampled["output_ids"]
    body = {"input_ids": ids, "return_logprob": True, "logprob_start_len": start, **sampling(max_new_tokens=1)}
    first, *entries = (await sglang(GENERATE, **body))["meta_info"]["input_token_logprobs"]

    assert first == [None, ids[start], None]
    assert entries == sampled["meta_info"]["output_token_logprobs"]


async def test_the_most_likely_tokens_of_a_prompt_are_beside_its_own(sglang):
    """The first position has none; the others have them the most likely first, and none is less likely than the own token."""
    body = {"input_ids": [350, 261, 70, 15], "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    meta = (await sglang(GENERATE, **body, **sampling(max_new_tokens=0)))["meta_info"]
    own, (first, *top) = meta["input_token_logprobs"], meta["input_top_logprobs"]

    assert (first, len(top)) == (None, 3)
    for (logprob, token, _), likely in zip(own[1:], top, strict=True):
        assert likely == sorted(likely, reverse=True)
        assert len(likely) == 2
        assert logprob <= likely[0][0]
        assert token not in {other for _, other, _ in likely} or [logprob, token, None] in likely


async def test_prompt_logprobs_ignore_the_temperature(sglang):
    """A prompt's logprobs are the model's at any temperature; a sampled token's logprob is after temperature."""
    flags = {"return_logprob": True, "logprob_start_len": 0, "return_text_in_logprobs": True}
    body = {"input_ids": [350, 261, 70], **flags}
    full, half = [(await sglang(GENERATE, **body, **sampling(temperature=t)))["meta_info"] for t in (1.0, 0.5)]

    assert full["input_token_logprobs"] == half["input_token_logprobs"]
    assert full["input_token_logprobs"][0][0] is None
    assert all(text for _, _, text in full["input_token_logprobs"])
    assert full["output_token_logprobs"][0][0] != half["output_token_logprobs"][0][0]


@pytest.mark.parametrize("stream", [False, True])
async def test_0_new_tokens_score_the_prompt(sglang, stream):
    """With `max_new_tokens` 0 the prompt is scored, and the response has no sampled tokens."""
    body = {"input_ids": [350, 261], "return_logprob": True, "logprob_start_len": 0, **sampling(max_new_tokens=0)}
    answer = (await sglang.stream(GENERATE, **body))[-1] if stream else await sglang(GENERATE, **body)
    meta = answer["meta_info"]

    assert (answer["text"], answer["output_ids"], meta["output_token_logprobs"]) == ("", [], [])
    assert (meta["completion_tokens"], meta["weight_versions"]) == (0, [])
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert [token for _, token, _ in meta["input_token_logprobs"]] == [350, 261]


async def test_a_stream_of_generate_is_cumulative(sglang):
    """Each event has all of its choice so far, and the last one equals the unstreamed response, except for the id."""
    body = {"text": "Return the", "return_logprob": True, "top_logprobs_num": 2, **sampling()}
    complete, chunks = await sglang(GENERATE, **body), await sglang.stream(GENERATE, **body)
    counts, first = [len(chunk["output_ids"]) for chunk in chunks], chunks[0]["meta_info"]["finish_reason"]
    for answer in (complete, chunks[-1]):
        answer["meta_info"]["id"] = ""

    assert (list(range(1, len(chunks) + 1)), None) == (counts, first)
    assert complete == chunks[-1]


@pytest.mark.parametrize(
    ("body", "count"),
    [({"text": ["If"]}, 1), ({"input_ids": [[350], [261]]}, 2), ({"text": "If", **sampling(n=2)}, 2)],
)
async def test_a_batch_is_a_list(sglang, body, count):
    """A list of prompts, or several samples, give a list; events of a stream have the index of their choice."""
    body = {**sampling(), **body}
    responses, chunks = await sglang(GENERATE, **body), await sglang.stream(GENERATE, **body)

    assert len(responses) == count
    assert {chunk["index"] for chunk in chunks} == set(range(count))


@pytest.mark.parametrize(
    ("more", "finish"),
    [
        ({"max_new_tokens": 2}, {"type": "length", "length": 2}),
        ({"stop": " "}, {"type": "stop", "matched": " "}),
        ({"max_new_tokens": 200}, {"type": "stop", "matched": "the last id"}),
    ],
)
async def test_the_finish_reason_of_generate_is_an_object(sglang, more, finish):
    """It names what ended the choice."""
    answer = await sglang(GENERATE, text="Return the", **sampling(**more))
    if finish.get("matched") == "the last id":
        finish = {**finish, "matched": answer["output_ids"][-1]}

    assert answer["meta_info"]["finish_reason"] == finish


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"text": "a", "input_ids": [1]},
        {"text": ""},
        {"text": []},
        {"input_ids": []},
        {"input_ids": [99_999]},
        {"input_ids": "a"},
        {"text": "a", "sampling_params": 3},
        {"text": "a", "sampling_params": {"temperature": -1}},
        {"text": "a", "sampling_params": {"max_new_tokens": -1}},
        {"text": "a", "sampling_params": {"max_new_tokens": 99_999_999}},
    ],
)
async def test_invalid_requests_of_generate_are_errors(sglang, body):
    """Bodies without one kind of prompt, or with invalid values, are 400 errors in this endpoint's form."""
    status, raw = await sglang.answer(GENERATE, body)

    assert status == 400
    assert orjson.loads(raw)["error"]


FLAGS = st.fixed_dictionaries(
    {},
    optional={
        "return_token_ids": st.booleans() | JSON,
        "return_meta_info": st.booleans(),
        "return_output_ids_in_sglext": st.booleans(),
        "return_logprob": st.booleans() | JSON,
        "logprob_start_len": st.integers(-2, 4) | JSON,
        "input_ids": st.lists(st.integers(-1, 3_000), max_size=3) | JSON,
        "text": st.text(max_size=3) | JSON,
        "sampling_params": st.fixed_dictionaries({"max_new_tokens": st.integers(0, 4)}) | JSON,
        "rid": JSON,
    },
)


@given(path=st.sampled_from([CHAT, COMPLETIONS, GENERATE, "/v1/tokenize"]), body=BODIES, flags=FLAGS)
async def test_every_body_gets_a_response(sglang, path, body, flags):
    """Any JSON body gets a 200 or a 400 with a body."""
    headers = {"Content-Type": "application/json"}
    status, raw = await sglang.answer(path, data=orjson.dumps(body | flags), headers=headers)

    assert status == 200 or (status == 400 and raw)
