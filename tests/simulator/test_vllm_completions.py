"""vLLM's completions."""

from typing import Any

import pytest

from proxy.simulator.options import Options

TINY = Options(model="tiny", max_model_len=2048)


@pytest.mark.parametrize(
    "name",
    [
        "cmpl_plain",
        "cmpl_ids",
        "cmpl_lp1",
        "cmpl_ids_lp0",
        "cmpl_ids_lp1",
        "cmpl_ids_in",
        "cmpl_n3",
        "cmpl_multi_prompt",
        "cmpl_promptlp",
        "cmpl_echo",
        "cmpl_echo_mt0",
    ],
)
async def test_completions_have_the_recorded_shape(start, cassette, skeleton, name):
    """A completion has the keys, their order and the nulls of vLLM's completion for the same request."""
    recorded = cassette(name)
    completion = await (await start(TINY))(recorded.path, **recorded.body, ignore_eos=True)

    assert skeleton(recorded.payload) == skeleton(completion)
    assert len(recorded.payload["choices"]) == len(completion["choices"])


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("cmpl_plain", {"ignore_eos": True}),
        ("cmpl_ids", {"ignore_eos": True}),
        ("cmpl_ids_lp0", {"ignore_eos": True}),
        ("cmpl_ids_lp1", {"ignore_eos": True}),
        ("cmpl_n3", {"ignore_eos": True}),
        ("cmpl_multi_prompt", {"ignore_eos": True}),
        ("cmpl_echo", {"ignore_eos": True}),
        ("cmpl_eos", {}),
    ],
)
async def test_chunks_have_the_recorded_shapes(start, cassette, skeleton, name, more):
    """The chunks have the shapes of vLLM's chunks, and so do the first and the last one."""
    recorded = cassette(name + "_stream")
    chunks = await (await start(TINY)).stream(recorded.path, **recorded.body, **more)
    simulated_chunks, recorded_chunks = (
        [skeleton(chunk) for chunk in chunks],
        [skeleton(chunk) for chunk in recorded.chunks],
    )

    assert set(simulated_chunks) == set(recorded_chunks)
    assert (recorded_chunks[0], recorded_chunks[-1]) == (simulated_chunks[0], simulated_chunks[-1])


def accumulated(chunks: list[dict[str, Any]]) -> dict[int, list[Any]]:
    choices: dict[int, list[Any]] = {}
    for choice in [choice for chunk in chunks for choice in chunk["choices"]]:
        parts = choices.setdefault(choice["index"], ["", [], [], None, None, None])
        parts[0] += choice["text"]
        parts[1] += choice["token_ids"]
        parts[2] += list(zip(*choice["logprobs"].values(), strict=True))
        parts[3] = parts[3] or choice["prompt_token_ids"]
        parts[4:] = [choice["finish_reason"], choice["stop_reason"]]
    return choices


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 3},
        {"prompt": ["Return the", "If it"], "n": 2},
        {"prompt": [[350, 261], [70]], "echo": True},
        {"prompt": [350, 261], "logprobs": 3},
        {"stop": "e c"},
        {"stop_token_ids": [46]},
        {"echo": True},
        {"echo": True, "max_tokens": 0},
    ],
)
async def test_streamed_and_unstreamed_are_equal(engine, more):
    """Streamed or not, the same seed gives each choice the same ids, logprobs (bit by bit), text and reasons."""
    body = {
        "prompt": "Return the",
        "seed": 3,
        "max_tokens": 30,
        "return_token_ids": True,
        "logprobs": 1,
        **more,
    }
    completion = await engine("/v1/completions", **body)
    complete = {
        choice["index"]: [
            choice["text"],
            choice["token_ids"],
            list(zip(*choice["logprobs"].values(), strict=True)),
            choice["prompt_token_ids"],
            choice["finish_reason"],
            choice["stop_reason"],
        ]
        for choice in completion["choices"]
    }

    assert complete == accumulated(await engine.stream("/v1/completions", **body))


async def test_scoring_a_chat_gives_its_logprobs(engine, tools):
    """A chat's ids, sent as a prompt with prompt_logprobs, have exactly the logprobs of their sampling."""
    for more in (
        {},
        {"tools": tools},
        {"chat_template_kwargs": {"enable_thinking": True}, "temperature": 0.5},
    ):
        chat = await engine.chat(seed=9, return_token_ids=True, logprobs=True, **more)
        sampled = chat["choices"][0]["token_ids"]
        ids = chat["prompt_token_ids"] + sampled
        scored = await engine.completion(ids, max_tokens=1, prompt_logprobs=0)
        entries = scored["choices"][0]["prompt_logprobs"][-len(sampled) :]

        assert [entry["logprob"] for entry in chat["choices"][0]["logprobs"]["content"]] == [
            entry[str(token)]["logprob"] for token, entry in zip(sampled, entries, strict=True)
        ]


@pytest.mark.parametrize("more", [{}, {"temperature": 0}, {"temperature": 0.6}, {"prompt": [350, 261]}])
async def test_scoring_a_completion_gives_its_logprobs(engine, more):
    """A completion's ids, sent after its prompt's ids as a prompt, have exactly the logprobs of their sampling."""
    body = {"prompt": "Return the", "seed": 5, "max_tokens": 40, "logprobs": 0, "return_token_ids": True, **more}
    (sampled,) = (await engine("/v1/completions", **body))["choices"]
    ids = sampled["prompt_token_ids"] + sampled["token_ids"]
    (scored,) = (await engine.completion(ids, max_tokens=1, prompt_logprobs=0))["choices"]
    entries = scored["prompt_logprobs"][-len(sampled["token_ids"]) :]

    assert sampled["logprobs"]["token_logprobs"] == [
        entry[str(token)]["logprob"] for token, entry in zip(sampled["token_ids"], entries, strict=True)
    ]
    assert len(scored["prompt_logprobs"]) == len(ids)
    assert scored["prompt_logprobs"][0] is None


async def test_a_stream_has_no_prompt_logprobs(engine, cassette):
    """Prompt logprobs with a stream are the recorded error."""
    async with engine.client.post(
        "/v1/completions", json={"prompt": "If", "prompt_logprobs": 1, "stream": True}
    ) as response:
        assert response.status == 400
        assert await response.read() == cassette("chat_promptlp_stream").raw


async def test_choices_are_ordered_by_prompt(engine):
    """Choice `i` is sample `i % n` of prompt `i // n`, and sample `k` equals the only sample of seed + `k`."""
    both = await engine.completion(["Return the", "If it is"], n=2, seed=4)
    alone = await engine.completion("If it is", seed=5)

    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert both["choices"][3]["text"] == alone["choices"][0]["text"]


async def test_text_and_ids_are_the_same_prompt(engine):
    """A prompt of ids gives the same completion as its text."""
    text = await engine.completion("Return the", seed=4, return_token_ids=True)
    ids = text["choices"][0]["prompt_token_ids"]

    assert text["choices"][0]["text"] == (await engine.completion(ids, seed=4))["choices"][0]["text"]


@pytest.mark.parametrize(("more", "text"), [({}, "Return the"), ({"return_token_ids": True}, "")])
async def test_an_echo_is_missing_with_ids(engine, more, text):
    """An echoed prompt precedes the text; with return_token_ids it is missing, as in vLLM."""
    body = {"seed": 4, "max_tokens": 0, "echo": True, **more}
    chunks = await engine.stream("/v1/completions", prompt="Return the", **body)

    assert text == (await engine.completion("Return the", **body))["choices"][0]["text"]
    assert text == chunks[0]["choices"][0]["text"]
    assert chunks[0]["choices"][0]["prompt_token_ids"]


async def test_usage_can_be_in_each_chunk(engine):
    """With continuous_usage_stats each chunk has the number of tokens of its choice so far."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await engine.stream("/v1/completions", prompt="If", seed=1, max_tokens=3, stream_options=options)

    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]


async def test_sixteen_tokens_are_the_default(engine):
    """Without max_tokens a completion has at most 16 tokens."""
    completion = await engine.completion("If", seed=1, ignore_eos=True)

    assert completion["usage"]["completion_tokens"] == 16


def named_by_id(choice) -> bool:
    """Whether the logprobs of a choice name ids, with text offsets that count the names."""
    logprobs = choice["logprobs"]
    names = [*logprobs["tokens"], *(name for entry in logprobs["top_logprobs"] for name in entry or ())]
    ends = [offset + len(name) for offset, name in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)]
    return (
        [f"token_id:{token}" for token in choice["token_ids"]] == logprobs["tokens"][-len(choice["token_ids"]) :]
        and all(name.removeprefix("token_id:").isdigit() for name in names)
        and logprobs["text_offset"][1:] == ends[:-1]
    )


@pytest.mark.parametrize("more", [{}, {"logprobs": 3}, {"echo": True}])
async def test_tokens_can_be_named_by_id(start, cassette, skeleton, more):
    """With return_tokens_as_token_ids logprobs name ids as in vLLM, in an echoed prompt, too."""
    recorded = cassette("cmpl_asids")
    completion = await (await start(TINY))(recorded.path, **{**recorded.body, **more}, ignore_eos=True)

    assert named_by_id(recorded.payload["choices"][0])
    assert named_by_id(completion["choices"][0])
    assert more or skeleton(recorded.payload) == skeleton(completion)


async def test_streamed_tokens_can_be_named_by_id(engine):
    """With return_tokens_as_token_ids the logprobs of each chunk name ids."""
    fields = {"prompt": "Hi", "max_tokens": 6, "logprobs": 2, "return_token_ids": True}
    chunks = await engine.stream("/v1/completions", **fields, return_tokens_as_token_ids=True)

    assert all(named_by_id(choice) for chunk in chunks for choice in chunk["choices"])
