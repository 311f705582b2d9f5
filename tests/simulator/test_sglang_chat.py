"""SGLang's chat completions."""

from typing import Any

import orjson
import pytest
from tests.support.recorded import load

from proxy.simulator.options import Options

SGLANG = Options(model="smollm2", max_model_len=2048, shape="sglang")
NO_PARSER = Options(model="smollm2", max_model_len=2048, shape="sglang", has_parser=False)
IDS = {"return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True}
ALL_TOKENS = {"return_token_ids": True, "return_meta_info": True, "logprobs": True}


async def replay(engine, name: str, **more: Any) -> tuple[Any, bytes]:
    """A recorded exchange, and the simulator's response to the same request."""
    recorded = load(name, "sglang")
    async with engine.client.post(recorded.path, json={**recorded.body, **more}, headers=recorded.headers) as response:
        assert response.status == recorded.status
        return recorded, await response.read()


@pytest.mark.parametrize(
    "name",
    [
        "chat_short_n_plain",
        "chat_short_n_inj",
        "chat_token_ids_n_plain",
        "chat_prompt_token_ids_n_plain",
        "chat_sglext_n_plain",
        "chat_sglext_header_n_plain",
        "chat_rid_n_plain",
        "chat_top_logprobs_n_plain",
        "err_top_without_logprobs_n_plain",
        "err_unknown_field_n_plain",
    ],
)
async def test_completions_have_the_recorded_shape(start, skeleton, name):
    """A completion has the keys, their order and the nulls of SGLang's completion for the same request."""
    recorded, raw = await replay(await start(SGLANG), f"recorded/{name}", max_tokens=200)

    assert skeleton(orjson.loads(recorded.response)) == skeleton(orjson.loads(raw))


async def test_tool_calls_have_the_recorded_shape(start, skeleton):
    """A completion with a tool call has empty content, and `matched_stop` is null."""
    recorded, raw = await replay(await start(SGLANG), "recorded/chat_tool_call_n_inj", max_tokens=200)
    completion = orjson.loads(raw)

    assert skeleton(orjson.loads(recorded.response)) == skeleton(completion)
    assert (completion["choices"][0]["finish_reason"], completion["choices"][0]["matched_stop"]) == ("tool_calls", None)


@pytest.mark.parametrize("name", ["recorded/chat_thought_n_inj", "each_token/chat_thought_s_inj"])
async def test_reasoning_has_the_recorded_shape(start, skeleton, chunks_from, name):
    """Reasoning is reasoning_content; in a stream, its tokens without text have events, too."""
    more = {"chat_template_kwargs": {"enable_thinking": True}, "max_tokens": 200}
    recorded, raw = await replay(await start(SGLANG), name, **more)
    if "_s_" in name:
        simulated_chunks, recorded_chunks = chunks_from(raw), chunks_from(recorded.response.strip() + b"\n\n")
        assert {skeleton(chunk) for chunk in recorded_chunks} == {skeleton(chunk) for chunk in simulated_chunks}
    else:
        assert skeleton(orjson.loads(recorded.response)) == skeleton(orjson.loads(raw))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("unparsed/chat_short_s_plain", NO_PARSER),
        ("unparsed/chat_sglext_s_plain", NO_PARSER),
        ("unparsed/chat_short_s_inj", NO_PARSER),
        ("each_token/chat_short_s_inj", SGLANG),
        ("each_token/chat_tool_call_s_inj", SGLANG),
        ("each_token/chat_utf8_s_inj", SGLANG),
    ],
)
async def test_chunks_have_the_recorded_shapes(start, skeleton, chunks_from, name, options):
    """The chunks have the shapes of SGLang's chunks, and so do the first one and the last two."""
    recorded, raw = await replay(await start(options), name, max_tokens=200)
    simulated_chunks, recorded_chunks = [
        [skeleton(chunk) for chunk in chunks_from(stream.strip() + b"\n\n")] for stream in (raw, recorded.response)
    ]

    assert set(simulated_chunks) <= set(recorded_chunks)
    assert (simulated_chunks[0], simulated_chunks[-2:]) == (recorded_chunks[0], recorded_chunks[-2:])
    assert raw.count(b"event: sglext_ids\n") == recorded.response.count(b"event: sglext_ids\n")


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
async def test_streamed_and_unstreamed_are_equal(start, tools, more):
    """With a parser, a stream has the ids, logprobs, text, reasoning and calls of the same call unstreamed."""
    engine = await start(SGLANG)
    more = {**more, "tools": tools} if "tools" in more else more
    complete = await engine.chat(seed=3, **ALL_TOKENS, **more)
    chunks = await engine.chat_stream(seed=3, logprobs=True, **IDS, **more)
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


async def test_without_a_parser_streams_lose_logprobs(start):
    """Without a parser, the stream has no logprobs of the end of the turn or of tokens that add no text."""
    engine = await start(NO_PARSER)
    chunks = await engine.chat_stream(seed=3, logprobs=True, **IDS)
    entries = [
        entry["token"]
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    (ids,) = next(chunk["sglext"]["output_ids"] for chunk in chunks if "sglext" in chunk)

    assert len(entries) == len(ids) - 1
    assert "<|im_end|>" not in entries


async def test_without_a_parser_calls_and_reasoning_are_content(start, tools):
    """Without a parser, reasoning and calls are content."""
    more = {"tools": tools, "chat_template_kwargs": {"enable_thinking": True}}
    message = (await (await start(NO_PARSER)).chat(**more))["choices"][0]["message"]

    assert message["reasoning_content"] is None
    assert "tool_calls" not in message
    assert "</think>" in message["content"]
    assert "<tool_call>" in message["content"]


async def test_meta_info_has_ids_and_logprobs(start):
    """`output_token_logprobs` has the ids, texts and logprobs of its choice."""
    completion = await (await start(SGLANG)).chat(seed=3, temperature=0.7, **ALL_TOKENS)
    (choice,) = completion["choices"]
    logprobs, ids, texts = zip(*choice["meta_info"]["output_token_logprobs"], strict=True)

    assert list(ids) == choice["response_token_ids"]
    assert [(entry["logprob"], entry["token"]) for entry in choice["logprobs"]["content"]] == list(
        zip(logprobs, texts, strict=True)
    )
    assert choice["meta_info"]["weight_versions"] == completion["metadata"]["weight_versions"]


async def test_logprobs_are_after_temperature(start):
    """A lower temperature raises the logprob of the most likely token; greedy calls have the model's own logprobs."""
    engine = await start(SGLANG)

    async def first(temperature: float) -> float:
        completion = await engine.chat(temperature=temperature, logprobs=True, top_logprobs=1, max_tokens=1)
        return completion["choices"][0]["logprobs"]["content"][0]["top_logprobs"][0]["logprob"]

    assert await first(0.5) > await first(1.0) == await first(0.0)


async def test_input_ids_replace_the_messages(start):
    """With `input_ids` the prompt is these ids; the messages are ignored."""
    completion = await (await start(SGLANG)).chat(input_ids=[350, 261], return_token_ids=True)

    assert completion["choices"][0]["prompt_token_ids"] == [350, 261]
    assert completion["usage"]["prompt_tokens"] == 2


async def test_experts_are_in_meta_info_or_sglext(start):
    """Requested experts are in `meta_info` if that is requested, too, and otherwise in `sglext`."""
    engine = await start(Options(shape="sglang", routed_experts=True))
    fields = {"seed": 3, "return_routed_experts": True}
    in_sglext = await engine.chat(**fields)
    in_meta_info = await engine.chat(**fields, return_meta_info=True)

    assert in_sglext["sglext"]["routed_experts"] == in_meta_info["choices"][0]["meta_info"]["routed_experts"]
    assert "sglext" not in in_meta_info
    assert "sglext" not in await engine.chat()


async def test_usage_can_be_in_each_chunk(start):
    """With continuous_usage_stats each chunk but the last has the number of tokens of its choice so far."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await (await start(SGLANG)).chat_stream(seed=3, max_tokens=3, ignore_eos=True, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")]

    assert counts == sorted(counts)
    assert set(counts) == {1, 2, 3}
