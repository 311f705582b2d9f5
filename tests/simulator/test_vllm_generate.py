"""vLLM's generate endpoint."""

from base64 import b64decode
from typing import Any

import pytest

from proxy.simulator.options import Options

TINY = Options(model="tiny", max_model_len=2048)
PATH = "/inference/v1/generate"
PROMPT = [350, 261]


def adapted(body: dict[str, Any]) -> dict[str, Any]:
    """A recorded body with ids of the simulator's vocabulary, and a reply of the recorded length."""
    sampling = {**body["sampling_params"], "ignore_eos": True}
    return {**body, "token_ids": [i % 2_000 for i in body["token_ids"]], "sampling_params": sampling}


@pytest.mark.parametrize(
    "name",
    [
        "scale_out/generate",
        "scale_out/generate_text",
        "scale_out/generate_from_render",
        "scale_out/generate_weightversion",
        "processed/kvtp_cmp_gen",
    ],
)
async def test_responses_have_the_recorded_shape(start, cassette, skeleton, name):
    """A response has the keys, their order and the nulls of vLLM's response to the same request."""
    recorded = cassette(name)
    response_body = await (await start(TINY))(PATH, **adapted(recorded.body))

    assert skeleton(recorded.payload) == skeleton(response_body)
    assert recorded.payload["usage"] == response_body["usage"]
    assert response_body["choices"][0]["weight_versions"][0]["end"] == response_body["usage"]["completion_tokens"]


async def test_chunks_have_the_recorded_shapes(start, cassette, skeleton):
    """The chunks have the shapes of vLLM's chunks, in order."""
    recorded = cassette("scale_out/generate_stream")
    chunks = await (await start(TINY)).stream(PATH, **adapted(recorded.body))

    assert [skeleton(chunk) for chunk in recorded.chunks] == [skeleton(chunk) for chunk in chunks]


@pytest.mark.parametrize("mode", ["tokens", "text"])
async def test_streamed_and_unstreamed_are_equal(start, mode):
    """Streamed or not, the same seed gives each choice the same ids, logprobs, masks, experts and versions."""
    engine = await start(Options(sampling_mask=True, routed_experts=True))
    body = {
        "token_ids": PROMPT,
        "sampling_params": {"seed": 3, "max_tokens": 30, "n": 2, "logprobs": 2},
        "output_mode": mode,
        "stream_options": {"include_usage": True},
    }
    complete = await engine(PATH, **{**body, "stream_options": None})
    chunks = await engine.stream(PATH, **body)
    accumulated: dict[int, dict[str, Any]] = {}
    for choice in [choice for chunk in chunks for choice in chunk["choices"]]:
        parts = accumulated.setdefault(
            choice["index"], {"token_ids": [], "content": [], "sampling_mask": [], "text": ""}
        )
        parts["token_ids"] += choice["token_ids"]
        parts["content"] += choice["logprobs"]["content"]
        parts["sampling_mask"] += choice["sampling_mask"]
        parts["text"] += choice.get("text", "")
        parts["last"] = {key: choice[key] for key in ("finish_reason", "routed_experts", "weight_versions")}

    for choice in complete["choices"]:
        parts = accumulated[choice["index"]]
        assert choice["logprobs"]["content"] == parts.pop("content")
        assert choice.get("text", "") == parts.pop("text")
        last = parts.pop("last")
        assert parts | last == {key: choice[key] for key in parts | last}
    assert chunks[-1]["usage"]["completion_tokens"] == complete["usage"]["completion_tokens"]


async def test_generate_equals_completions(engine):
    """The same ids and seed give the same tokens and logprobs as `/v1/completions`."""
    generated = await engine(
        PATH, token_ids=PROMPT, sampling_params={"seed": 3, "max_tokens": 12, "logprobs": 0, "temperature": 0.7}
    )
    body = {"seed": 3, "max_tokens": 12, "logprobs": 0, "temperature": 0.7, "return_token_ids": True}
    completed = await engine.completion(PROMPT, **body)
    generated_choice, completed_choice = generated["choices"][0], completed["choices"][0]

    assert generated_choice["token_ids"] == completed_choice["token_ids"]
    assert [entry["logprob"] for entry in generated_choice["logprobs"]["content"]] == completed_choice["logprobs"][
        "token_logprobs"
    ]


async def test_masks_and_experts_are_optional(start):
    """If enabled, masks contain the sampled ids, and experts cover all tokens but the last; otherwise both are null."""
    body = {"token_ids": PROMPT, "sampling_params": {"seed": 3, "max_tokens": 5, "ignore_eos": True}}
    plain = (await (await start(Options()))(PATH, **body))["choices"][0]
    enabled = (await (await start(Options(sampling_mask=True, routed_experts=True)))(PATH, **body))["choices"][0]

    assert (plain["sampling_mask"], plain["routed_experts"]) == (None, None)
    assert all(token in mask for token, mask in zip(enabled["token_ids"], enabled["sampling_mask"], strict=True))
    assert b"'shape': (6, 2, 2)" in b64decode(enabled["routed_experts"])


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"token_ids": [1]},
        {"token_ids": [], "sampling_params": {}},
        {"token_ids": [-1], "sampling_params": {}},
        {"token_ids": [99_999], "sampling_params": {}},
        {"token_ids": [1], "sampling_params": {"temperature": -1}},
        {"token_ids": [1], "sampling_params": {"logprobs": 99}},
        {"token_ids": [1], "sampling_params": {}, "output_mode": "song"},
        {"token_ids": [1], "sampling_params": {"prompt_logprobs": 1}, "stream": True},
    ],
)
async def test_invalid_requests_are_errors(engine, body):
    """Bodies without ids or sampling parameters, or with invalid values, are 400 errors with a message."""
    async with engine.client.post(PATH, json=body) as response:
        assert response.status == 400
        assert (await response.json())["error"]["message"]


async def test_usage_can_be_in_each_chunk(start):
    """With continuous_usage_stats each chunk has the number of tokens of its choice so far."""
    engine = await start(TINY)
    options = {"include_usage": True, "continuous_usage_stats": True}
    sampling = {"max_tokens": 3, "seed": 1, "ignore_eos": True}
    chunks = await engine.stream(PATH, token_ids=PROMPT, sampling_params=sampling, stream_options=options)

    assert [1, 2, 3, 3] == [chunk["usage"]["completion_tokens"] for chunk in chunks]
