"""Token text and token ids added to the choices of whole responses, by the engine's ids alone."""

import orjson
import pytest
from tests.support.recorded import load

from proxy.protocols.engines import ENGINES
from proxy.protocols.engines.base import Sampled, Tokens
from proxy.protocols.token_annotations import TokenAnnotations

NAMED = orjson.loads(load("chat_ids_lp_asids").response)  # top_logprobs: 1, by ids
PLAIN = orjson.loads(load("chat_ids_lp").response)


def pieces(ids):
    return [f"<{token}>" for token in ids]


def annotated(response, annotations):
    before = orjson.dumps(response)
    annotated_response = annotations.annotate(response, ENGINES["vllm"].tokens("chat", {}, response))
    assert before == orjson.dumps(response), "annotate() changed its argument"
    return annotated_response


def test_each_logprob_entry_has_the_text_of_its_token_id():
    """The engine's logprobs and bytes are unchanged."""
    (choice,) = annotated(PLAIN, TokenAnnotations(pieces))["choices"]
    (plain,) = PLAIN["choices"]

    assert pieces(plain["token_ids"]) == [entry["token"] for entry in choice["logprobs"]["content"]]
    for entry, before in zip(choice["logprobs"]["content"], plain["logprobs"]["content"], strict=True):
        assert before == entry | {"token": before["token"]}


def test_alternatives_have_the_text_of_their_token_ids():
    """The engine returns them as `token_id:N`; the bytes of these names become null."""
    (choice,) = annotated(NAMED, TokenAnnotations(pieces))["choices"]
    others = [entry["top_logprobs"] for entry in choice["logprobs"]["content"]]
    before = [entry["top_logprobs"] for entry in NAMED["choices"][0]["logprobs"]["content"]]

    assert before != others
    assert [
        [entry | {"token": f"<{entry['token'].removeprefix('token_id:')}>", "bytes": None} for entry in entries]
        for entries in before
    ] == others


@pytest.mark.parametrize("top_logprobs", [None, 0, 2])
def test_alternatives_are_requested_as_token_ids(top_logprobs):
    """Only if the request has alternatives and the token text is to be added."""
    fields = {"return_tokens_as_token_ids": True} if top_logprobs else {}

    assert fields == TokenAnnotations(pieces).fields({"top_logprobs": top_logprobs})
    assert TokenAnnotations(ids=True).fields({"top_logprobs": top_logprobs}) == {}


@pytest.mark.parametrize(
    ("ids", "entry"),
    [
        pytest.param(
            [7], {"token": "a", "top_logprobs": [{"token": "b", "logprob": -1.0}]}, id="a nameless alternative"
        ),
        pytest.param([8], {"token": "a"}, id="no such id in the vocabulary"),
        pytest.param([7, 7], {"token": "a"}, id="more ids than entries"),
        pytest.param(None, {"token": "a"}, id="no ids"),
    ],
)
def test_logprobs_are_null_if_a_token_has_no_text(ids, entry):
    """The engine's text could belong to another token."""
    choice = {"index": 0, "logprobs": {"content": [entry]}}
    tokens = Tokens([1], (Sampled(0, None, ids, None, "stop", None),))
    annotations = TokenAnnotations(lambda ids: ["<7>" if token == 7 else None for token in ids])

    assert annotations.annotate({"choices": [choice]}, tokens)["choices"] == [{"index": 0, "logprobs": None}]


def test_choices_have_response_and_prompt_token_ids():
    """By the names that Marin reads, whether the prompt belongs to the choice or to all choices."""
    own = Sampled(1, [3], [4], None, "stop", None)
    shared = Sampled(0, None, [5], None, "stop", None)
    annotated_response = TokenAnnotations(ids=True).annotate(
        {"choices": [{"index": 0}, {"index": 1}]}, Tokens([1, 2], (shared, own))
    )

    assert annotated_response["choices"] == [
        {"index": 0, "prompt_token_ids": [1, 2], "response_token_ids": [5]},
        {"index": 1, "prompt_token_ids": [3], "response_token_ids": [4]},
    ]


def test_unknown_ids_are_omitted():
    """Not null: clients check whether the key exists."""
    annotated_response = TokenAnnotations(ids=True).annotate(
        {"choices": [{"index": 0}]}, Tokens(None, (Sampled(0, None, [4], None, None, None),))
    )

    assert annotated_response["choices"] == [{"index": 0}]


def test_a_response_without_logprobs_gets_no_token_text():
    choice = {"index": 0, "logprobs": None}
    tokens = Tokens([1], (Sampled(0, None, [4], None, None, None),))

    assert TokenAnnotations(pieces).annotate({"choices": [choice]}, tokens)["choices"] == [choice]
