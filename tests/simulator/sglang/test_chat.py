"""Chat answers, in SGLang's shapes."""

from typing import Any

import orjson
import pytest
from recorded import load_http

from proxy.simulator.options import Options

OURS = Options(model="smollm2", max_model_len=2048, shape="sglang")
BARE = Options(model="smollm2", max_model_len=2048, shape="sglang", has_parser=False)
IDS = {"return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True}
TOLD = {"return_token_ids": True, "return_meta_info": True, "logprobs": True}


async def play(engine, name: str, **more: Any) -> tuple[Any, bytes]:
    """A recorded exchange, and the simulator's answer to the same request."""
    recorded = load_http("sglang", name)
    async with engine.client.post(recorded.path, json={**recorded.body, **more}, headers=recorded.headers) as response:
        assert response.status == recorded.status
        return recorded, await response.read()


@pytest.mark.parametrize(
    "name",
    [
        "chat_plain",
        "chat_return_token_ids",
        "chat_return_prompt_token_ids",
        "chat_return_meta_info",
        "chat_sglext",
        "chat_sglext_header",
        "chat_toplogprobs2",
        "chat_top_without_logprobs",
        "chat_unknown_field",
    ],
)
async def test_answers_have_the_recorded_shape(start, skeleton, name):
    """An answer has the keys, their order, and the nulls of SGLang's answer to the same request."""
    recorded, raw = await play(await start(OURS), name, max_tokens=200)

    assert skeleton(orjson.loads(recorded.answer)) == skeleton(orjson.loads(raw))


async def test_tool_calls_have_the_recorded_shape(start, skeleton):
    """A tool call is told beside an empty content, and hides what matched."""
    recorded, raw = await play(await start(OURS), "chat_tools", max_tokens=200)
    answer = orjson.loads(raw)

    assert skeleton(orjson.loads(recorded.answer)) == skeleton(answer)
    assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["matched_stop"]) == ("tool_calls", None)


@pytest.mark.parametrize("name", ["chat_reasoning", "chat_stream_reasoning"])
async def test_thoughts_have_the_recorded_shape(start, skeleton, chunks_of, name):
    """A thought is reasoning_content; in a stream its tokens of no text have events of their own."""
    more = {"chat_template_kwargs": {"enable_thinking": True}, "max_tokens": 200}
    recorded, raw = await play(await start(OURS), name, **more)
    if "stream" in name:
        ours, theirs = chunks_of(raw), chunks_of(recorded.answer.strip() + b"\n\n")
        assert {skeleton(chunk) for chunk in theirs} == {skeleton(chunk) for chunk in ours}
    else:
        assert skeleton(orjson.loads(recorded.answer)) == skeleton(orjson.loads(raw))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("chat_stream_plain", BARE),
        ("chat_stream_sglext", BARE),
        ("chat_stream_sglext_framed", BARE),
        ("chat_stream_tools", OURS),
        ("chat_stream_emoji_toolparser_notools", OURS),
    ],
)
async def test_chunks_have_the_recorded_shapes(start, skeleton, chunks_of, name, options):
    """The chunks are of the shapes of SGLang's chunks, the first and the last two in their order."""
    recorded, raw = await play(await start(options), name, max_tokens=200)
    ours, theirs = [[skeleton(chunk) for chunk in chunks_of(each.strip() + b"\n\n")] for each in (raw, recorded.answer)]

    assert set(ours) <= set(theirs)
    assert (ours[0], ours[-2:]) == (theirs[0], theirs[-2:])
    assert raw.count(b"event: sglext_ids\n") == recorded.answer.count(b"event: sglext_ids\n")


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 2},
        {"temperature": 0.5},
        {"tools": True},
        {"tools": True, "chat_template_kwargs": {"enable_thinking": True}},
        {"stop": ["e c", "The end of all"]},
        {"max_tokens": 5},
    ],
)
async def test_streamed_and_unstreamed_are_twins(start, tools, more):
    """With a parser, ids, logprobs, text, thoughts and calls of a stream are those of the same call unstreamed."""
    engine = await start(OURS)
    more = {**more, "tools": tools} if "tools" in more else more
    whole = await engine.chat(seed=3, **TOLD, **more)
    chunks = await engine.chat_stream(seed=3, logprobs=True, **IDS, **more)
    (extension,) = [chunk["sglext"] for chunk in chunks if "sglext" in chunk]

    for choice in whole["choices"]:
        told = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        deltas = [each["delta"] for each in told]
        calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
        message = choice["message"]
        entries = [entry for each in told if each["logprobs"] for entry in each["logprobs"]["content"]]
        assert entries == choice["logprobs"]["content"]
        assert extension["output_ids"][choice["index"]] == choice["response_token_ids"]
        assert "".join(delta.get("content") or "" for delta in deltas).strip() == message["content"].strip()
        assert "".join(delta["reasoning_content"] or "" for delta in deltas) == (message["reasoning_content"] or "")
        assert "".join(call["arguments"] for call in calls) == "".join(
            call["function"]["arguments"] for call in message.get("tool_calls", ())
        )
        assert (told[-1]["finish_reason"], told[-1]["matched_stop"]) == (
            choice["finish_reason"],
            choice["matched_stop"],
        )
    assert extension["input_ids"] == whole["choices"][0]["prompt_token_ids"]


async def test_without_a_parser_streams_lose_logprobs(start):
    """Without any parser the end of the turn has no logprob, nor has any token that adds no text."""
    engine = await start(BARE)
    chunks = await engine.chat_stream(seed=3, logprobs=True, **IDS)
    entries = [
        entry["token"]
        for c in chunks
        for each in c["choices"]
        if each["logprobs"]
        for entry in each["logprobs"]["content"]
    ]
    (ids,) = next(chunk["sglext"]["output_ids"] for chunk in chunks if "sglext" in chunk)

    assert len(entries) == len(ids) - 1
    assert "<|im_end|>" not in entries


async def test_without_a_parser_calls_and_thoughts_stay_text(start, tools):
    """Without any parser a thought and a call are content like any other."""
    more = {"tools": tools, "chat_template_kwargs": {"enable_thinking": True}}
    message = (await (await start(BARE)).chat(**more))["choices"][0]["message"]

    assert message["reasoning_content"] is None
    assert "tool_calls" not in message
    assert "</think>" in message["content"]
    assert "<tool_call>" in message["content"]


async def test_meta_info_pairs_ids_and_logprobs(start):
    """`output_token_logprobs` has the ids, the texts and the very logprobs of the choice beside it."""
    answer = await (await start(OURS)).chat(seed=3, temperature=0.7, **TOLD)
    (choice,) = answer["choices"]
    logprobs, ids, texts = zip(*choice["meta_info"]["output_token_logprobs"], strict=True)

    assert list(ids) == choice["response_token_ids"]
    assert [(entry["logprob"], entry["token"]) for entry in choice["logprobs"]["content"]] == list(
        zip(logprobs, texts, strict=True)
    )
    assert choice["meta_info"]["weight_versions"] == answer["metadata"]["weight_versions"]


async def test_logprobs_are_after_temperature(start):
    """A lower temperature raises the logprob of the likeliest token; greedy calls are told the model's own."""
    engine = await start(OURS)

    async def first(temperature: float) -> float:
        answer = await engine.chat(temperature=temperature, logprobs=True, top_logprobs=1, max_tokens=1)
        return answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"][0]["logprob"]

    assert await first(0.5) > await first(1.0) == await first(0.0)


async def test_ids_stand_in_for_the_messages(start):
    """With `input_ids` the prompt is these ids, whatever the messages say."""
    answer = await (await start(OURS)).chat(input_ids=[350, 261], return_token_ids=True)

    assert answer["choices"][0]["prompt_token_ids"] == [350, 261]
    assert answer["usage"]["prompt_tokens"] == 2


async def test_experts_are_told_where_they_were_asked(start):
    """Experts stand in `meta_info` if that was asked for, in `sglext` otherwise, and nowhere if nobody asked."""
    engine = await start(Options(shape="sglang", routed_experts=True))
    asked = {"seed": 3, "return_routed_experts": True}
    beside = await engine.chat(**asked)
    inside = await engine.chat(**asked, return_meta_info=True)

    assert beside["sglext"]["routed_experts"] == inside["choices"][0]["meta_info"]["routed_experts"]
    assert "sglext" not in inside
    assert "sglext" not in await engine.chat()


async def test_usage_can_stand_on_each_chunk(start):
    """With continuous_usage_stats each chunk but the finish counts the tokens of its choice so far."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await (await start(OURS)).chat_stream(seed=3, max_tokens=3, ignore_eos=True, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")]

    assert counts == sorted(counts)
    assert set(counts) == {1, 2, 3}
