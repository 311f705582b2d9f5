"""The simulated engine, the routes that both kinds have, and what responses share."""

import ast
from base64 import b64decode
from struct import unpack

import orjson
import pytest

from proxy.simulator.engine import (
    EXPERTS_PER_TOKEN,
    LAYERS,
    WeightVersions,
    event,
    experts_as_int32,
    experts_as_npy,
    usage,
)
from proxy.simulator.options import Options

PROMPT = "Return the"


async def test_the_engines_seed_is_used_without_a_requests_seed(start):
    """Requests without a seed give the same ids on an engine with a seed, and different ids on one without."""
    seeded, free = await start(Options(seed=3)), await start(Options())
    body = {"max_tokens": 30, "return_token_ids": True}
    same = [(await seeded.completion(PROMPT, **body))["choices"][0]["token_ids"] for _ in range(3)]
    different = [(await free.completion(PROMPT, **body))["choices"][0]["token_ids"] for _ in range(3)]

    assert same[0] == same[1] == same[2]
    assert len(set(map(tuple, different))) > 1


@pytest.fixture(params=["vllm", "sglang"])
async def served(request, start):
    """An engine of each shape, and its shape."""
    return request.param, await start(Options(shape=request.param, model="tiny", max_model_len=99))


async def test_the_model_is_listed(served):
    """The model list has one model with its name, owner and context window."""
    shape, engine = served
    (model,) = orjson.loads((await engine.get("/v1/models"))[1])["data"]

    assert (model["id"], model["max_model_len"]) == ("tiny", 99)
    assert model["owned_by"] == {"vllm": "tokentape-simulator", "sglang": "sglang"}[shape]
    assert ("permission" in model) == (shape == "vllm")


async def test_ids_become_text(served):
    """`/detokenize` returns the text of ids under the engine's own key."""
    shape, engine = served
    ids = (await engine("/tokenize", prompt="Return the"))["tokens"]

    assert await engine("/detokenize", tokens=ids) == {{"vllm": "prompt", "sglang": "text"}[shape]: "Return the"}


async def test_the_engine_is_healthy(served):
    """`/health` returns 200 with an empty body."""
    _, engine = served
    assert await engine.get("/health") == (200, b"")


def test_a_chunk_is_one_event():
    """A chunk is one data line, compact and unescaped, and a blank line."""
    assert event({"a": "é"}) == 'data: {"a":"é"}\n\n'.encode()


def test_usage_counts_prompt_and_completion():
    """Usage has the prompt tokens, the total and the completion tokens, then the details of some responses."""
    assert list(usage(2, 3, more=None).items()) == [
        ("prompt_tokens", 2),
        ("total_tokens", 5),
        ("completion_tokens", 3),
        ("more", None),
    ]


IDS = [5, 6, 7]


def test_a_span_ends_where_the_next_begins():
    """Spans cover a choice without gaps."""
    versions = WeightVersions()
    for position, version in ((0, "a"), (2, "b"), (3, "a")):
        versions.record(position, version)

    assert versions.spans(4) == [
        {"version": "a", "start": 0, "end": 2},
        {"version": "b", "start": 2, "end": 3},
        {"version": "a", "start": 3, "end": 4},
    ]


def test_spans_end_with_the_choice():
    """A choice has no spans after its end, and an empty choice has none."""
    versions = WeightVersions()
    versions.record(0, "a")
    versions.record(3, "b")

    assert versions.spans(3) == [{"version": "a", "start": 0, "end": 3}]
    assert versions.spans(0) == []


def test_vllms_experts_are_an_npy_array():
    """vLLM's form is a .npy file: a header with type and shape, padded to 64 bytes, then the numbers."""
    raw = b64decode(experts_as_npy(IDS))
    (size,) = unpack("<H", raw[8:10])
    header = ast.literal_eval(raw[10 : 10 + size].decode())

    assert raw[:8] == b"\x93NUMPY\x01\x00"
    assert (10 + size) % 64 == 0
    assert header == {"descr": "<i4", "fortran_order": False, "shape": (2, LAYERS, EXPERTS_PER_TOKEN)}
    assert raw[10 + size :] == b64decode(experts_as_int32(IDS))


def test_the_last_token_has_no_experts():
    """Every token but the last has experts, which depend on the tokens before it."""
    size = 4 * LAYERS * EXPERTS_PER_TOKEN
    raw = b64decode(experts_as_int32(IDS))

    assert len(raw) == 2 * size
    assert raw[:size] == b64decode(experts_as_int32([5, 9]))
    assert experts_as_int32([]) == experts_as_int32([5]) == ""
