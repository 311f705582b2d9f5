"""The texts of a step's tokens: recorded strings, the tokenizer's, the engine's, or none."""

from array import array

import pytest
from fakes import proxying
from forests import make_choice, make_step
from simulated_tokenizer import make_simulated_tokenizer

from proxy.api.control.token_texts import _decoded, recorded

ASKED = {"logprobs": True, "max_tokens": 12}


async def texts(proxy, step: str, query: str = "") -> dict:
    response = await proxy.get(f"/rollouts/r1/steps/{step}/texts{query}")
    assert 200 == response.status, response.text
    return response.json


async def test_texts_that_were_recorded_are_told(proxy):
    """A client that asked for logprobs had the engine write each token's string."""
    said = await proxy.chat("r1", **ASKED)
    told = await texts(proxy, said.step_id)
    step = (await proxy.get(f"/rollouts/r1/steps/{said.step_id}")).json
    given, sampled = len(step["prompt_ids"]), len(step["choices"][0]["ids"])
    alone = await texts(proxy, said.step_id, f"?start={given}")

    assert (["engine", "recorded"], given + sampled) == (told["sources"], told["total"])
    assert (["recorded"], told["texts"][given:]) == (alone["sources"], alone["texts"])
    assert "".join(filter(None, alone["texts"])).startswith(said.message["content"])


async def test_the_engine_is_asked_for_what_nobody_recorded(proxy):
    """Id by id, and its answer spells the reply."""
    said = await proxy.chat("r1", max_tokens=12)
    told = await texts(proxy, said.step_id)
    spelt = "".join(filter(None, told["texts"]))

    assert (["engine"], len(told["texts"])) == (told["sources"], told["total"])
    assert spelt.index("hi") < spelt.index(said.message["content"])


async def test_a_window_is_told(proxy):
    """Where it begins, and how many there are in all."""
    said = await proxy.chat("r1", max_tokens=12)
    whole = await texts(proxy, said.step_id)
    part = await texts(proxy, said.step_id, "?start=2&limit=3")

    assert (2, whole["total"], whole["texts"][2:5]) == (part["start"], part["total"], part["texts"])
    assert [] == (await texts(proxy, said.step_id, "?start=99999"))["texts"]


@pytest.mark.parametrize("query", ["choice=1", "choice=x", "start=-1", "limit=0", "limit=2001", "from=1"])
async def test_a_window_that_is_none_is_400(proxy, query):
    """As everywhere; a choice that is not there, too."""
    said = await proxy.chat("r1", max_tokens=1)

    assert 400 == (await proxy.get(f"/rollouts/r1/steps/{said.step_id}/texts?{query}")).status


async def test_a_step_that_is_not_there_is_404(proxy):
    """The sentence names it."""
    await proxy.chat("r1", max_tokens=1)
    response = await proxy.get("/rollouts/r1/steps/nothing/texts")

    assert (404, True) == (response.status, "nothing" in response.json["error"]["message"])


async def test_the_tokenizer_of_the_endpoint_comes_before_the_engine(proxy, store, http, tmp_path):
    """It is at hand, and costs the engine nothing: this one is away."""
    said = await proxy.chat("r1", max_tokens=12)
    step = (await proxy.get(f"/rollouts/r1/steps/{said.step_id}")).json
    by_engine = await texts(proxy, said.step_id)
    folder = str(make_simulated_tokenizer(tmp_path))
    endpoint = {"url": "http://127.0.0.1:9", "name": step["engine"]["name"], "kind": "vllm", "tokenizer": folder}
    async with proxying(None, store, engines={"endpoints": [endpoint]}) as served:
        by_tokenizer = await texts(type(proxy)(http, served.url), said.step_id)

    assert (["tokenizer"], by_engine["texts"]) == (by_tokenizer["sources"], by_tokenizer["texts"])


def test_an_id_that_the_vocabulary_has_not_is_no_text():
    """Whatever a tokenizer makes of it: nothing, an error, or part of a character."""

    def decode(ids):
        return {1: "a", 2: "", 3: "\ufffd"}[ids[0]]

    assert {1: "a", 2: None, 3: None} == _decoded(decode, array("i", [1, 2, 3, 4, -1]))


async def test_where_nobody_knows_a_text_there_is_none(proxy, store, http):
    """The engine that sampled is no longer there: null for each, and the source says so."""
    said = await proxy.chat("r1", max_tokens=3)
    async with proxying(None, store) as served:
        told = await texts(type(proxy)(http, served.url), said.step_id)

    assert (["none"], [None] * told["total"]) == (told["sources"], told["texts"])


async def test_each_of_several_prompts_is_told_with_its_own_choice(proxy):
    """So that nobody reads a choice after the wrong one."""
    body = {"model": "policy", "prompt": ["one", "and two"], "max_tokens": 2}
    await proxy.post("/rollouts/r1/v1/completions", body)
    (step,) = (await proxy.get("/rollouts/r1/steps")).json["steps"]
    told = [(await texts(proxy, step["step_id"], f"?choice={at}"))["texts"] for at in (0, 1)]

    assert ("one", "and two") == tuple("".join(row[:-2]) for row in told)


def told_of(entries: object, dialect: str = "chat", ids: tuple[int, ...] = (5, 6)) -> object:
    logprobs = {"content" if dialect == "chat" else "tokens": entries}
    response = {"choices": [{"index": 0, "logprobs": logprobs}]}
    choice = make_choice(0, list(ids))
    return recorded(make_step("a", [1], choice, response=response, dialect=dialect), choice, 0, 10)


@pytest.mark.parametrize(
    ("entries", "told"),
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
def test_recorded_strings_are_read_as_far_as_they_are_any(entries, told):
    """The bytes if they are text, else the string; as many as ids, or none; ids in place of strings are none."""
    assert told == told_of(entries)


def test_strings_of_completions_are_read_likewise():
    """There they are a list of strings."""
    assert ["a", None] == told_of(["a", "token_id:6"], "completions")
    assert None is told_of("ab", "completions")


@pytest.mark.parametrize("response", [None, {}, {"choices": {}}, {"choices": [None, {"index": 0, "logprobs": []}]}])
def test_an_answer_of_any_shape_tells_strings_or_none(response):
    """Answers are other people's."""
    choice = make_choice(0, [5], logprobs=array("d", [0.0]))

    assert None is recorded(make_step("a", [1], choice, response=response), choice, 0, 10)
