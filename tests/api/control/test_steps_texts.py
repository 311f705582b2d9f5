"""The texts of a step's tokens: recorded strings, texts from the tokenizer or the engine, or none."""

import re
from array import array

import pytest
from tests.support.fakes import proxying
from tests.support.forests import make_choice, make_step
from tests.support.simulated_tokenizer import make_simulated_tokenizer

from proxy.api.control.steps import _decoded, recorded

WITH_LOGPROBS = {"logprobs": True, "max_tokens": 12}


async def texts(proxy, step: str, query: str = "") -> dict:
    response = await proxy.get(f"/rollouts/r1/steps/{step}/texts{query}")
    assert response.status == 200, response.text
    return response.json


async def test_recorded_token_strings_are_returned(proxy):
    """A response with logprobs contains each token's string."""
    reply = await proxy.chat("r1", **WITH_LOGPROBS)
    result = await texts(proxy, reply.step_id)
    step = (await proxy.get(f"/rollouts/r1/steps/{reply.step_id}")).json
    prompt, sampled = len(step["prompt_ids"]), len(step["choices"][0]["ids"])
    alone = await texts(proxy, reply.step_id, f"?start={prompt}")

    assert (result["sources"], result["total"]) == (["engine", "recorded"], prompt + sampled)
    assert (["recorded"], result["texts"][prompt:]) == (alone["sources"], alone["texts"])
    assert "".join(filter(None, alone["texts"])).startswith(reply.message["content"])


async def test_missing_token_strings_are_requested_from_the_engine(proxy):
    reply = await proxy.chat("r1", max_tokens=12)
    result = await texts(proxy, reply.step_id)
    text = "".join(filter(None, result["texts"]))

    assert (["engine"], len(result["texts"])) == (result["sources"], result["total"])
    assert text.index("hi") < text.index(reply.message["content"])


async def test_the_memory_for_texts_and_for_prepared_calls_is_a_setting_and_a_metric(proxy, store, http):
    """With 0, nothing is kept and all is returned."""
    reply = await proxy.chat("r1", max_tokens=1)
    engine = (await proxy.get(f"/rollouts/r1/steps/{reply.step_id}")).json["engine"]
    found = []
    for limits in ({}, {"text_cache_bytes": 0, "plan_cache_bytes": 0}):
        async with proxying(engine["url"], store, engines=limits) as served:
            one = type(proxy)(http, served.url)
            shown = await texts(one, (await one.chat("r1", max_tokens=12)).step_id)
            metrics = (await one.get("/metrics")).text
            found.append(re.findall(rb"^tokentape_(?:text|plan)_cache_bytes (\S+)$", metrics, re.MULTILINE))
        assert "".join(filter(None, shown["texts"]))

    assert found[1] == [b"0.0", b"0.0"]
    assert not {*found[0]} & {*found[1]}


async def test_a_window_of_token_texts_has_its_start_and_the_total(proxy):
    reply = await proxy.chat("r1", max_tokens=12)
    whole = await texts(proxy, reply.step_id)
    part = await texts(proxy, reply.step_id, "?start=2&limit=3")

    assert (2, whole["total"], whole["texts"][2:5]) == (part["start"], part["total"], part["texts"])
    assert (await texts(proxy, reply.step_id, "?start=99999"))["texts"] == []


@pytest.mark.parametrize("query", ["choice=1", "choice=x", "start=-1", "limit=0", "limit=2001", "from=1"])
async def test_an_invalid_window_or_choice_is_400(proxy, query):
    reply = await proxy.chat("r1", max_tokens=1)

    assert (await proxy.get(f"/rollouts/r1/steps/{reply.step_id}/texts?{query}")).status == 400


async def test_the_texts_of_an_unknown_step_are_404(proxy):
    await proxy.chat("r1", max_tokens=1)
    response = await proxy.get("/rollouts/r1/steps/nothing/texts")

    assert (response.status, "nothing" in response.json["error"]["message"]) == (404, True)


async def test_the_tokenizer_of_the_endpoint_precedes_the_engine(proxy, store, http, tmp_path):
    """The engine is unreachable here."""
    reply = await proxy.chat("r1", max_tokens=12)
    step = (await proxy.get(f"/rollouts/r1/steps/{reply.step_id}")).json
    by_engine = await texts(proxy, reply.step_id)
    folder = str(make_simulated_tokenizer(tmp_path))
    endpoint = {"url": "http://127.0.0.1:9", "name": step["engine"]["name"], "kind": "vllm", "tokenizer": folder}
    async with proxying(None, store, engines={"endpoints": [endpoint]}) as served:
        by_tokenizer = await texts(type(proxy)(http, served.url), reply.step_id)

    assert (["tokenizer"], by_engine["texts"]) == (by_tokenizer["sources"], by_tokenizer["texts"])


def test_an_id_outside_the_vocabulary_has_no_text():
    """The tokenizer may return an empty string, raise, or return part of a character."""

    def decode(ids):
        return {1: "a", 2: "", 3: "\ufffd"}[ids[0]]

    assert _decoded(decode, array("i", [1, 2, 3, 4, -1])) == {1: "a", 2: None, 3: None}


async def test_without_any_source_token_texts_are_null(proxy, store, http):
    reply = await proxy.chat("r1", max_tokens=3)
    async with proxying(None, store) as served:
        result = await texts(type(proxy)(http, served.url), reply.step_id)

    assert (["none"], [None] * result["total"]) == (result["sources"], result["texts"])


async def test_the_texts_of_a_choice_begin_with_its_own_prompt(proxy):
    body = {"model": "policy", "prompt": ["one", "and two"], "max_tokens": 2}
    await proxy.post("/rollouts/r1/v1/completions", body)
    (step,) = await proxy.steps("r1")
    results = [(await texts(proxy, step["step_id"], f"?choice={index}"))["texts"] for index in (0, 1)]

    assert tuple("".join(row[:-2]) for row in results) == ("one", "and two")


def recorded_texts(entries: object, dialect: str = "chat", ids: tuple[int, ...] = (5, 6)) -> object:
    logprobs = {"content" if dialect == "chat" else "tokens": entries}
    response = {"choices": [{"index": 0, "logprobs": logprobs}]}
    choice = make_choice(0, list(ids))
    return recorded(make_step("a", [1], choice, response=response, dialect=dialect), choice, 0, 10)


@pytest.mark.parametrize(
    ("entries", "texts"),
    [
        ([{"token": " a", "bytes": [32, 97]}, {"token": "b"}], [" a", "b"]),
        ([{"token": "token_id:5", "bytes": [97]}, {"token": "token_id:6", "bytes": None}], ["a", None]),
        ([{"token": "\ufffd", "bytes": [240, 159]}, {"token": "b"}], [None, "b"]),
        ([{"token": "a", "bytes": ["x"]}, {"token": "b", "bytes": [999]}], ["a", "b"]),
        ([{"token": 7, "bytes": {}}, {"token": "b"}], [None, "b"]),
        ([{"token": "", "bytes": []}, {"token": ""}], None),
        ([{"token": "a"}], None),
        ([None, 5], None),
        (None, None),
    ],
)
def test_recorded_token_strings_are_read_from_logprobs_entries(entries, texts):
    """`bytes` precede the string; entries that do not match the ids, or that are ids, are ignored."""
    assert texts == recorded_texts(entries)


def test_recorded_token_strings_of_completions_are_a_list():
    assert recorded_texts(["a", "token_id:6"], "completions") == ["a", None]
    assert None is recorded_texts("ab", "completions")


@pytest.mark.parametrize("response", [None, {}, {"choices": {}}, {"choices": [None, {"index": 0, "logprobs": []}]}])
def test_a_response_of_any_shape_has_token_strings_or_none(response):
    choice = make_choice(0, [5], logprobs=array("d", [0.0]))

    assert None is recorded(make_step("a", [1], choice, response=response), choice, 0, 10)
