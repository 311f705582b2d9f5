"""Tokens in, tokens out: errors, rollouts, rules and versions of `/inference/v1/generate`; test_certified.py has its shapes."""

import asyncio
from functools import partial

import aiohttp
import orjson
import pytest

from .through import through_proxy

GENERATE = "/inference/v1/generate"
SAMPLING = {"seed": 7, "max_tokens": 24}
BODY = {"model": "tiny", "token_ids": [46, 77, 306, 1020], "sampling_params": SAMPLING}
CHANGING = ("request_id", "created")


@pytest.fixture
async def http():
    async with aiohttp.ClientSession() as session:
        yield session


async def post(http, url, body, *, stream=False):
    """Return the status, and the response or the chunks, without the fields that differ between any two runs."""
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    async with http.post(url, json=body | more) as response:
        text = await response.read()
    whole = response.content_type == "application/json"
    events = [text] if whole else [event.removeprefix(b"data: ") for event in text.split(b"\n\n") if event]
    assert whole or events.pop() == b"[DONE]"
    payloads = [orjson.loads(event) for event in events]
    return response.status, [
        {key: 0 if key in CHANGING else value for key, value in payload.items()} for payload in payloads
    ]


def contents_from(responses):
    """Return keys and values, independent of how the engine grouped tokens into chunks."""
    keys, heads, choices = set(), [], {}
    for response in responses:
        keys.add(tuple(response))
        heads += [head for head in [{**response, "choices": None}] if head not in heads]
        for choice in response["choices"]:
            keys.add(tuple(choice))
            kept = choices.setdefault(choice["index"], {})
            for key, value in choice.items():
                joined = value["content"] if isinstance(value, dict) else value
                joins = isinstance(kept.get(key), str | list) and joined is not None
                kept[key] = kept[key] + joined if joins else joined if joined is not None else kept.get(key)
    return keys, heads, choices


@pytest.mark.parametrize(
    "wrong",
    [
        {"token_ids": []},
        {"token_ids": [999_999]},
        {"sampling_params": None},
        {"sampling_params": {"temperature": -1}},
        {"sampling_params": {"n": 0}},
        {"model": "unknown"},
    ],
)
async def test_an_error_is_the_engines_own(vllm, http, tmp_path, wrong):
    """Status and body, as without the proxy."""
    async with through_proxy(vllm.url, tmp_path) as proxy:
        direct = await post(http, vllm.url + GENERATE, BODY | wrong)
        shown = await post(http, f"{proxy.url}/rollouts/r1{GENERATE}", BODY | wrong)

    assert direct == shown
    assert direct[0] in (400, 404)


async def test_sampled_ids_that_are_sent_back_extend_the_sequence(vllm, http, tmp_path):
    """No template and no tokenizer is involved, so turns always join."""
    async with through_proxy(vllm.url, tmp_path) as proxy:
        url, prompt = f"{proxy.url}/rollouts/r1{GENERATE}", BODY["token_ids"]
        for stream in (False, True, False):
            _, responses = await post(http, url, BODY | {"token_ids": prompt}, stream=stream)
            prompt = prompt + contents_from(responses)[2][0]["token_ids"] + [198, 50]
        (row,) = await proxy.rows("r1")

    assert prompt[:-2] == row["token_ids"]
    assert sum(row["mask"]) == 72


async def test_rules_of_a_rollout_apply_to_the_sampling_parameters(vllm, http, tmp_path):
    """Where this endpoint has them, and by its only name for the token limit."""
    rules = {"override": {"temperature": 0.5}, "cap": {"max_completion_tokens": 3}}
    async with through_proxy(vllm.url, tmp_path) as proxy:
        async with http.post(f"{proxy.url}/rollouts", json={"rollout_id": "r1", "sampling": rules}) as opened:
            assert opened.status == 201
        await post(http, f"{proxy.url}/rollouts/r1{GENERATE}", BODY)
        (step,) = await proxy.steps("r1")

    assert (step["sampling"]["temperature"], step["sampling"]["max_tokens"]) == (0.5, 3)
    assert len(step["choices"][0]["ids"]) == 3


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_weights_that_change_in_flight_have_different_versions(vllm, http, tmp_path, stream):
    """Each sampled token has the version that sampled it, in the step and in the row."""
    sampled = partial(vllm.metric, "sampled")
    body = BODY | {"sampling_params": {"seed": 3, "max_tokens": 1500, "ignore_eos": True}}
    try:
        async with through_proxy(vllm.url, tmp_path) as proxy:
            before = await sampled()
            calling = asyncio.ensure_future(post(http, f"{proxy.url}/rollouts/r1{GENERATE}", body, stream=stream))
            while await sampled() < before + 20:  # an unstreamed response has no event for it
                assert not calling.done()
            await change_weights(http, vllm, "v2")
            await calling
            (step,) = await proxy.steps("r1")
            (row,) = await proxy.rows("r1")
    finally:
        await change_weights(http, vllm, "default")

    first, second = step["choices"][0]["spans"]
    assert (first["policy_version"], second["policy_version"]) == ("default", "v2")
    assert (0, second["start"], 1500) == (first["start"], first["end"], second["end"])
    assert [span["policy_version"] for span in row["spans"]] == ["default", "v2"]
    assert step["fidelity"]["exact"]


async def change_weights(http, vllm, version):
    """Set the engine's weight version; its weights do not change."""
    async with http.post(f"{vllm.url}/update_weight_version", json={"new_version": version}) as response:
        assert response.status == 200
