"""Answers of SGLang's own endpoint."""

import pytest

from proxy.simulator.options import Options

OURS = Options(shape="sglang")
PATH = "/generate"


@pytest.fixture
async def sglang(start):
    """An engine that speaks SGLang's protocol."""
    return await start(OURS)


def sampling(**more):
    return {"sampling_params": {"max_new_tokens": 20, "sampling_seed": 3, **more}}


async def test_an_answer_has_text_ids_and_meta_info(sglang):
    """An answer has its text and ids, those of the prompt if asked, and what stands behind it."""
    plain = await sglang(PATH, text="Return the", **sampling())
    told = await sglang(PATH, text="Return the", return_prompt_token_ids=True, return_logprob=True, **sampling())

    assert list(plain) == ["text", "output_ids", "meta_info"]
    assert list(told) == ["text", "output_ids", "prompt_token_ids", "meta_info"]
    assert "output_token_logprobs" not in plain["meta_info"]
    assert [pair[1:] for pair in told["meta_info"]["output_token_logprobs"]] == [[i, None] for i in told["output_ids"]]
    assert told["meta_info"]["input_token_logprobs"] == []
    assert told["meta_info"]["completion_tokens"] == len(told["output_ids"])


async def test_scoring_again_gives_the_recorded_logprobs(sglang):
    """What was sampled at temperature 1 has, as a prompt, bit by bit the logprobs of its sampling."""
    sampled = await sglang(PATH, text="Return the", return_logprob=True, return_prompt_token_ids=True, **sampling())
    count = len(sampled["prompt_token_ids"])
    ids = sampled["prompt_token_ids"] + sampled["output_ids"]
    scored = await sglang(
        PATH, input_ids=ids, return_logprob=True, logprob_start_len=count - 1, **sampling(max_new_tokens=1)
    )
    first, *entries = scored["meta_info"]["input_token_logprobs"]

    assert first == [None, ids[count - 1], None]
    assert entries == sampled["meta_info"]["output_token_logprobs"]


async def test_scores_of_a_prompt_know_no_temperature(sglang):
    """A prompt's logprobs are the model's own at any temperature; what is sampled is told after it."""
    body = {
        "input_ids": [350, 261, 70],
        "return_logprob": True,
        "logprob_start_len": 0,
        "return_text_in_logprobs": True,
    }
    one, half = [(await sglang(PATH, **body, **sampling(temperature=t)))["meta_info"] for t in (1.0, 0.5)]

    assert one["input_token_logprobs"] == half["input_token_logprobs"]
    assert one["input_token_logprobs"][0][0] is None
    assert all(text for _, _, text in one["input_token_logprobs"])
    assert one["output_token_logprobs"][0][0] != half["output_token_logprobs"][0][0]


@pytest.mark.parametrize("stream", [False, True])
async def test_no_new_tokens_only_score_the_prompt(sglang, stream):
    """With `max_new_tokens` 0 the prompt is read and scored, and nothing is told to be sampled."""
    body = {"input_ids": [350, 261], "return_logprob": True, "logprob_start_len": 0, **sampling(max_new_tokens=0)}
    answer = (await sglang.stream(PATH, **body))[-1] if stream else await sglang(PATH, **body)
    meta = answer["meta_info"]

    assert (answer["text"], answer["output_ids"], meta["output_token_logprobs"]) == ("", [], [])
    assert (meta["completion_tokens"], meta["weight_versions"]) == (0, [])
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert [token for _, token, _ in meta["input_token_logprobs"]] == [350, 261]


async def test_a_stream_is_cumulative(sglang):
    """Each event holds all of its choice so far, and the last one what the unstreamed call gives."""
    body = {"text": "Return the", "return_logprob": True, "top_logprobs_num": 2, **sampling()}
    whole, chunks = await sglang(PATH, **body), await sglang.stream(PATH, **body)

    assert [len(chunk["output_ids"]) for chunk in chunks] == list(range(1, len(chunks) + 1))
    assert chunks[0]["meta_info"]["finish_reason"] is None
    # Each call has a name of its own.
    assert {**whole, "meta_info": {**whole["meta_info"], "id": ""}} == {
        **chunks[-1],
        "meta_info": {**chunks[-1]["meta_info"], "id": ""},
    }


@pytest.mark.parametrize(
    ("body", "count"),
    [({"text": ["If"]}, 1), ({"input_ids": [[350], [261]]}, 2), ({"text": "If", **sampling(n=2)}, 2)],
)
async def test_a_batch_gives_a_list(sglang, body, count):
    """Several prompts, be they one, or several samples give a list; events of a stream say whose they are."""
    body = {**sampling(), **body}
    answers, chunks = await sglang(PATH, **body), await sglang.stream(PATH, **body)

    assert len(answers) == count
    assert {chunk["index"] for chunk in chunks} == set(range(count))


@pytest.mark.parametrize(
    ("more", "finish"),
    [
        ({"max_new_tokens": 2}, {"type": "length", "length": 2}),
        ({"stop": " "}, {"type": "stop", "matched": " "}),
        ({"max_new_tokens": 200}, {"type": "stop", "matched": 2041}),
    ],
)
async def test_the_finish_says_what_matched(sglang, more, finish):
    """The finish reason is an object that says what ended the choice."""
    answer = await sglang(PATH, text="Return the", **sampling(**more))
    if finish.get("matched") == 2041:
        finish = {**finish, "matched": answer["output_ids"][-1]}

    assert answer["meta_info"]["finish_reason"] == finish


async def test_experts_are_told_if_asked(start):
    """Experts stand in `meta_info`, on engines that have them."""
    answer = await (await start(Options(shape="sglang", routed_experts=True)))(
        PATH, text="If", return_routed_experts=True, **sampling()
    )

    assert answer["meta_info"]["routed_experts"]


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
async def test_what_cannot_be_answered_is_refused(sglang, body):
    """Bodies without one prompt, or with values that are not allowed, are a 400 in this endpoint's shape."""
    async with sglang.client.post(PATH, json=body) as response:
        assert response.status == 400
        assert (await response.json())["error"]
