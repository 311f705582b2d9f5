"""SGLang's native `/generate`."""

import pytest

from proxy.simulator.options import Options

SGLANG = Options(shape="sglang")
PATH = "/generate"


@pytest.fixture
async def sglang(start):
    """An engine with SGLang's API."""
    return await start(SGLANG)


def sampling(**more):
    return {"sampling_params": {"max_new_tokens": 20, "sampling_seed": 3, **more}}


async def test_a_response_has_text_ids_and_meta_info(sglang):
    """A response has text, ids and `meta_info`; the prompt's ids and logprobs are optional."""
    plain = await sglang(PATH, text="Return the", **sampling())
    full = await sglang(PATH, text="Return the", return_prompt_token_ids=True, return_logprob=True, **sampling())

    assert list(plain) == ["text", "output_ids", "meta_info"]
    assert list(full) == ["text", "output_ids", "prompt_token_ids", "meta_info"]
    assert "output_token_logprobs" not in plain["meta_info"]
    assert [pair[1:] for pair in full["meta_info"]["output_token_logprobs"]] == [[i, None] for i in full["output_ids"]]
    assert full["meta_info"]["input_token_logprobs"] == []
    assert full["meta_info"]["completion_tokens"] == len(full["output_ids"])


async def test_scoring_gives_the_logprobs_of_sampling(sglang):
    """Ids sampled at temperature 1, scored as a prompt, have exactly the logprobs of their sampling."""
    sampled = await sglang(PATH, text="Return the", return_logprob=True, return_prompt_token_ids=True, **sampling())
    count = len(sampled["prompt_token_ids"])
    ids = sampled["prompt_token_ids"] + sampled["output_ids"]
    scored = await sglang(
        PATH, input_ids=ids, return_logprob=True, logprob_start_len=count - 1, **sampling(max_new_tokens=1)
    )
    first, *entries = scored["meta_info"]["input_token_logprobs"]

    assert first == [None, ids[count - 1], None]
    assert entries == sampled["meta_info"]["output_token_logprobs"]


async def test_the_most_likely_tokens_of_a_prompt_are_beside_its_own(sglang):
    """The first position has none; the others have them the most likely first, and none is less likely than the own token."""
    body = {"input_ids": [350, 261, 70, 15], "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    meta = (await sglang(PATH, **body, **sampling(max_new_tokens=0)))["meta_info"]
    own, (first, *top) = meta["input_token_logprobs"], meta["input_top_logprobs"]

    assert (None, 3) == (first, len(top))
    for (logprob, token, _), likely in zip(own[1:], top, strict=True):
        assert likely == sorted(likely, reverse=True)
        assert 2 == len(likely)
        assert logprob <= likely[0][0]
        assert token not in {other for _, other, _ in likely} or [logprob, token, None] in likely


async def test_prompt_logprobs_ignore_the_temperature(sglang):
    """A prompt's logprobs are the model's at any temperature; a sampled token's logprob is after temperature."""
    body = {
        "input_ids": [350, 261, 70],
        "return_logprob": True,
        "logprob_start_len": 0,
        "return_text_in_logprobs": True,
    }
    full, half = [(await sglang(PATH, **body, **sampling(temperature=t)))["meta_info"] for t in (1.0, 0.5)]

    assert full["input_token_logprobs"] == half["input_token_logprobs"]
    assert full["input_token_logprobs"][0][0] is None
    assert all(text for _, _, text in full["input_token_logprobs"])
    assert full["output_token_logprobs"][0][0] != half["output_token_logprobs"][0][0]


@pytest.mark.parametrize("stream", [False, True])
async def test_0_new_tokens_score_the_prompt(sglang, stream):
    """With `max_new_tokens` 0 the prompt is scored, and the response has no sampled tokens."""
    body = {"input_ids": [350, 261], "return_logprob": True, "logprob_start_len": 0, **sampling(max_new_tokens=0)}
    response_body = (await sglang.stream(PATH, **body))[-1] if stream else await sglang(PATH, **body)
    meta = response_body["meta_info"]

    assert (response_body["text"], response_body["output_ids"], meta["output_token_logprobs"]) == ("", [], [])
    assert (meta["completion_tokens"], meta["weight_versions"]) == (0, [])
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert [token for _, token, _ in meta["input_token_logprobs"]] == [350, 261]


async def test_a_stream_is_cumulative(sglang):
    """Each event has all of its choice so far, and the last one equals the unstreamed response."""
    body = {"text": "Return the", "return_logprob": True, "top_logprobs_num": 2, **sampling()}
    complete, chunks = await sglang(PATH, **body), await sglang.stream(PATH, **body)

    assert [len(chunk["output_ids"]) for chunk in chunks] == list(range(1, len(chunks) + 1))
    assert chunks[0]["meta_info"]["finish_reason"] is None
    # Each call has its own id.
    assert {**complete, "meta_info": {**complete["meta_info"], "id": ""}} == {
        **chunks[-1],
        "meta_info": {**chunks[-1]["meta_info"], "id": ""},
    }


@pytest.mark.parametrize(
    ("body", "count"),
    [({"text": ["If"]}, 1), ({"input_ids": [[350], [261]]}, 2), ({"text": "If", **sampling(n=2)}, 2)],
)
async def test_a_batch_is_a_list(sglang, body, count):
    """A list of prompts, or several samples, give a list; events of a stream have the index of their choice."""
    body = {**sampling(), **body}
    responses, chunks = await sglang(PATH, **body), await sglang.stream(PATH, **body)

    assert len(responses) == count
    assert {chunk["index"] for chunk in chunks} == set(range(count))


@pytest.mark.parametrize(
    ("more", "finish"),
    [
        ({"max_new_tokens": 2}, {"type": "length", "length": 2}),
        ({"stop": " "}, {"type": "stop", "matched": " "}),
        ({"max_new_tokens": 200}, {"type": "stop", "matched": 2041}),
    ],
)
async def test_the_finish_reason_is_an_object(sglang, more, finish):
    """The finish reason is an object that names what ended the choice."""
    response_body = await sglang(PATH, text="Return the", **sampling(**more))
    if finish.get("matched") == 2041:
        finish = {**finish, "matched": response_body["output_ids"][-1]}

    assert response_body["meta_info"]["finish_reason"] == finish


async def test_experts_are_in_meta_info(start):
    """Requested experts are in `meta_info`, on engines that return them."""
    response_body = await (await start(Options(shape="sglang", routed_experts=True)))(
        PATH, text="If", return_routed_experts=True, **sampling()
    )

    assert response_body["meta_info"]["routed_experts"]


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
async def test_invalid_requests_are_errors(sglang, body):
    """Bodies without one kind of prompt, or with invalid values, are 400 errors in this endpoint's form."""
    async with sglang.client.post(PATH, json=body) as response:
        assert response.status == 400
        assert (await response.json())["error"]
