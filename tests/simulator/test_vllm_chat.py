"""vLLM's chat completions."""

from typing import Any

import orjson
import pytest

from proxy.simulator.options import Options

TINY = Options(model="tiny", max_model_len=2048)
ALL_TOKENS = {"return_token_ids": True, "logprobs": True}


def accumulated(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The reply that a client accumulates from a stream with one choice."""
    reply: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "ids": [], "logprobs": []}
    for choice in [choice for chunk in chunks for choice in chunk["choices"]]:
        delta = choice["delta"]
        reply["content"] += delta.get("content") or ""
        reply["reasoning"] += delta.get("reasoning") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                reply["calls"].append([call["function"]["name"], ""])
            reply["calls"][call["index"]][1] += call["function"].get("arguments", "")
        reply["ids"] += choice.get("token_ids") or []
        reply["logprobs"] += (choice["logprobs"] or {}).get("content", [])
        reply["finish_reason"] = choice["finish_reason"]
    return reply


def unstreamed(completion: dict[str, Any]) -> dict[str, Any]:
    """The same of a completion that is not streamed."""
    choice = completion["choices"][0]
    message = choice["message"]
    return {
        "content": message["content"] or "",
        "reasoning": message["reasoning"] or "",
        "calls": [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls", ())],
        "ids": choice["token_ids"] or [],
        "logprobs": (choice["logprobs"] or {}).get("content", []),
        "finish_reason": choice["finish_reason"],
    }


@pytest.mark.parametrize(
    "name",
    [
        "chat_plain",
        "chat_ids",
        "chat_lp",
        "chat_ids_lp",
        "chat_ids_lp_top1",
        "chat_n3",
        "chat_promptlp",
        "chat_prompt_text",
        "tool_auto_text",
        "tool_auto_truncated",
        "tool_include_reasoning_false",
    ],
)
async def test_truncated_completions_have_the_recorded_shape(start, cassette, skeleton, name):
    """A completion that ends with length has the keys, their order and the nulls of vLLM's."""
    recorded = cassette(name)
    completion = await (await start(TINY))(recorded.path, **recorded.body, ignore_eos=True)

    assert skeleton(recorded.payload) == skeleton(completion)


@pytest.mark.parametrize(
    "name",
    [
        "chat_eos",
        "tool_auto_regex",
        "tool_auto_regex_noflags",
        "tool_auto_default",
        "tool_none_regex",
        "tool_named",
    ],
)
async def test_complete_completions_have_the_recorded_shape(start, cassette, skeleton, name):
    """A completion that ends its turn has the shape of vLLM's completion for the same request."""
    recorded = cassette(name)
    completion = await (await start(TINY))(recorded.path, **recorded.body)

    assert skeleton(recorded.payload) == skeleton(completion)
    assert recorded.payload["choices"][0]["finish_reason"] == completion["choices"][0]["finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_has_the_recorded_shape(start, cassette, skeleton, stream):
    """Reasoning and a tool call after it have the shape of vLLM's choices."""
    recorded = cassette("reasoning/r_regex_after" + "_stream" * stream)
    body = {**recorded.body, "chat_template_kwargs": {"enable_thinking": True}}
    engine = await start(TINY)
    if stream:
        recorded_chunks, simulated_chunks = recorded.chunks, await engine.stream(recorded.path, **body)
        assert {skeleton(chunk["choices"]) for chunk in recorded_chunks} == {
            skeleton(chunk["choices"]) for chunk in simulated_chunks
        }
    else:
        assert skeleton(recorded.payload["choices"]) == skeleton((await engine(recorded.path, **body))["choices"])


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("chat_plain", {"ignore_eos": True}),
        ("chat_ids", {"ignore_eos": True}),
        ("chat_lp", {"ignore_eos": True}),
        ("chat_ids_lp", {"ignore_eos": True}),
        ("chat_n3", {"ignore_eos": True}),
        ("chat_cont_usage", {"ignore_eos": True}),
        ("chat_prompt_text", {"ignore_eos": True}),
        ("tool_include_reasoning_false", {"ignore_eos": True, "tool_choice": "none"}),
        ("chat_eos", {}),
        ("tool_auto_regex", {}),
        ("tool_auto_regex_noflags", {}),
        ("tool_auto_ids_only", {}),
        ("tool_auto_lp_only", {}),
        ("tool_named", {}),
    ],
)
async def test_chunks_have_the_recorded_shapes(start, cassette, skeleton, name, more):
    """Each chunk has the shape of one of vLLM's; the first and the last have the shapes of vLLM's first and last."""
    recorded = cassette(name + "_stream")
    chunks = await (await start(TINY)).stream(recorded.path, **{**recorded.body, **more})
    simulated_chunks, recorded_chunks = (
        [skeleton(chunk) for chunk in chunks],
        [skeleton(chunk) for chunk in recorded.chunks],
    )

    assert set(simulated_chunks) <= set(recorded_chunks)
    assert (recorded_chunks[0], recorded_chunks[-1]) == (simulated_chunks[0], simulated_chunks[-1])


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"temperature": 0},
        {"tools": True},
        {"tools": True, "tool_choice": "required"},
        {"tools": True, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        {"tools": True, "chat_template_kwargs": {"enable_thinking": True}},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"stop": ["e c", "The end of all"]},
        {"max_tokens": 5},
        {"top_logprobs": 3},
    ],
)
async def test_streamed_and_unstreamed_are_equal(engine, tools, more):
    """Streamed or not, the same seed gives the same ids, logprobs (bit by bit), text and calls."""
    body = {"seed": 3, **ALL_TOKENS, **more}
    if "tools" in more:
        body["tools"] = tools

    assert unstreamed(await engine.chat(**body)) == accumulated(await engine.chat_stream(**body))


@pytest.mark.parametrize("more", [{}, {"tools": True}, {"stop": ["e c", "The end of all"]}, {"n": 2}])
async def test_ids_and_logprobs_can_be_stripped(engine, tools, more):
    """Requesting ids and logprobs only fills null values and adds chunks with an empty delta."""
    body = {"seed": 3, "stream_options": {"include_usage": True}, **more}
    if "tools" in more:
        body["tools"] = tools
    plain = await engine.chat_stream(**body)
    stripped = []
    for chunk in await engine.chat_stream(**body, **ALL_TOKENS):
        choice = (chunk["choices"] or [{"delta": None}])[0]
        if choice["delta"] != {} or choice["finish_reason"] is not None:
            stripped.append(chunk)
        for fields in (chunk, choice):
            fields.update({key: None for key in ("prompt_token_ids", "token_ids", "logprobs") if key in fields})

    def comparable(chunk: dict[str, Any]) -> bytes:
        calls = [call for choice in chunk["choices"] for call in choice["delta"].get("tool_calls", ())]
        for call in calls:
            call.pop("id", None)
        return orjson.dumps({**chunk, "id": "", "created": 0})

    assert [comparable(chunk) for chunk in plain] == [comparable(chunk) for chunk in stripped]


async def test_a_tool_is_called_after_a_user_message(engine, tools):
    """After a user's message the reply is a valid tool call with arguments that fit the schema."""
    choice = (await engine.chat(tools=tools, seed=1))["choices"][0]
    function = choice["message"]["tool_calls"][0]["function"]
    arguments = orjson.loads(function["arguments"])

    assert choice["finish_reason"] == "tool_calls"
    assert function["name"] == "get_weather"
    assert list(arguments) == ["city", "days"]
    assert isinstance(arguments["city"], str)
    assert isinstance(arguments["days"], int)


async def test_calls_of_several_choices_differ(engine, tools):
    """The choices of one request have different tool calls."""
    completion = await engine.chat(tools=tools, seed=1, n=6)
    calls = {c["message"]["tool_calls"][0]["function"]["arguments"] for c in completion["choices"]}

    assert len(calls) > 1


async def test_turns_of_a_conversation_extend_each_other(engine, tools):
    """Each prompt of a conversation begins with the earlier prompt and the ids sampled after it."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "How will it be?"}]
    known: list[int] = []
    for result in ("sunny", None, "rain", None):
        completion = await engine.chat(messages, tools=tools, return_token_ids=True, seed=5)
        choice = completion["choices"][0]
        prompt = completion["prompt_token_ids"]
        assert known == prompt[: len(known)]
        known = prompt + choice["token_ids"]
        messages.append({k: v for k, v in choice["message"].items() if v is not None})
        if result is None:
            assert choice["message"]["content"]
            messages.append({"role": "user", "content": "And then?"})
        else:
            call = choice["message"]["tool_calls"][0]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


async def test_reasoning_comes_first_if_enabled(engine):
    """With `enable_thinking` the reply has reasoning, and usage counts its tokens."""
    completion = await engine.chat(seed=2, chat_template_kwargs={"enable_thinking": True})
    message = completion["choices"][0]["message"]

    assert message["reasoning"]
    assert message["content"]
    assert completion["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize("more", [{}, {"chat_template_kwargs": {"enable_thinking": True}}])
async def test_hidden_reasoning_hides_ids_and_logprobs(engine, more):
    """With include_reasoning false, reasoning, ids and logprobs are absent; the prompt's ids are present."""
    body = {"seed": 2, "include_reasoning": False, **ALL_TOKENS, **more}
    completion, chunks = await engine.chat(**body), await engine.chat_stream(**body)

    assert unstreamed(completion) == accumulated(chunks)
    assert unstreamed(completion)["ids"] == unstreamed(completion)["logprobs"] == []
    assert completion["choices"][0]["message"]["reasoning"] is None
    assert completion["prompt_token_ids"] == chunks[0]["prompt_token_ids"]


async def test_a_message_can_be_continued(engine):
    """With continue_final_message the prompt ends inside the last message of the assistant."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Return the"}]
    body = {"add_generation_prompt": False, "continue_final_message": True, "return_prompt_text": True}

    assert (await engine.chat(messages, **body))["prompt_text"].endswith("assistant\nReturn the")


@pytest.mark.parametrize("more", [{"max_completion_tokens": 3}, {"max_tokens": 3}])
async def test_a_reply_has_a_maximum_length(engine, more):
    """max_completion_tokens and max_tokens both limit the reply."""
    completion = await engine.chat(seed=1, **more)

    assert completion["usage"]["completion_tokens"] == 3
    assert completion["choices"][0]["finish_reason"] == "length"


def named_by_id(choices) -> bool:
    """Return whether all logprob entries name ids; `bytes` is the token's text, or in alternatives the name."""
    entries = [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content", ())]
    ids = [token for choice in choices for token in choice.get("token_ids") or ()]
    alternatives = [other for entry in entries for other in entry["top_logprobs"]]
    own = b"".join(bytes(entry["bytes"]) for entry in entries)
    return (
        len(entries) > 0
        and (not ids or [f"token_id:{token}" for token in ids] == [entry["token"] for entry in entries])
        and all(entry["token"].removeprefix("token_id:").isdigit() for entry in [*entries, *alternatives])
        and all(bytes(other["bytes"]).decode() == other["token"] for other in alternatives)
        and b"token_id:" not in own
    )


async def test_tokens_can_be_named_by_id(start, cassette, skeleton):
    """With return_tokens_as_token_ids logprobs name ids as in vLLM, streamed or not."""
    complete, streamed = cassette("chat_ids_lp_asids"), cassette("chat_asids_only_stream")
    engine = await start(TINY)
    completion = await engine(complete.path, **complete.body, ignore_eos=True)
    chunks = await engine.stream(streamed.path, **streamed.body, ignore_eos=True)
    simulated_chunks, recorded_chunks = (
        [choice for chunk in stream for choice in chunk["choices"]] for stream in (chunks, streamed.chunks)
    )

    assert skeleton(complete.payload) == skeleton(completion)
    assert {skeleton(chunk) for chunk in streamed.chunks} >= {skeleton(chunk) for chunk in chunks}
    assert all(
        map(named_by_id, (complete.payload["choices"], completion["choices"], recorded_chunks, simulated_chunks))
    )


async def test_alternatives_can_be_named_by_id(engine):
    """Alternatives are the same with and without return_tokens_as_token_ids, with the same logprobs."""
    fields = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "seed": 1, "logprobs": True}
    strings, named = [
        await engine("/v1/chat/completions", **fields, top_logprobs=3, return_tokens_as_token_ids=flag)
        for flag in (False, True)
    ]
    (by_string,), (by_id,) = (
        [choice["logprobs"]["content"] for choice in completion["choices"]] for completion in (strings, named)
    )

    assert named_by_id(named["choices"])
    assert not named_by_id(strings["choices"])
    assert [[other["logprob"] for other in entry["top_logprobs"]] for entry in by_string] == [
        [other["logprob"] for other in entry["top_logprobs"]] for entry in by_id
    ]
