"""Tokens told as pieces and as ids on each choice: of whole responses, and by the engine's ids alone."""

import orjson
import pytest
from recorded import load

from proxy.protocols.engines import ENGINES, Sampled, Tokens
from proxy.protocols.token_annotations import TokenAnnotations

NAMED = orjson.loads(load("chat_ids_lp_asids").response)  # top_logprobs: 1, by ids
PLAIN = orjson.loads(load("chat_ids_lp").response)


def pieces(ids):
    return [f"<{token}>" for token in ids]


def told(response, reply):
    before = orjson.dumps(response)
    shown = reply.annotate(response, ENGINES["vllm"].tokens("chat", {}, response))
    assert before == orjson.dumps(response), "what was given is changed"
    return shown


def test_every_token_is_its_piece():
    """By the ids of the choice; the engine's logprobs and bytes stay."""
    (choice,) = told(PLAIN, TokenAnnotations(pieces))["choices"]
    (plain,) = PLAIN["choices"]

    assert pieces(plain["token_ids"]) == [entry["token"] for entry in choice["logprobs"]["content"]]
    for entry, before in zip(choice["logprobs"]["content"], plain["logprobs"]["content"], strict=True):
        assert before == entry | {"token": before["token"]}


def test_alternatives_are_pieces_too():
    """By the ids that the engine named them by; bytes that were of those names are null."""
    (choice,) = told(NAMED, TokenAnnotations(pieces))["choices"]
    others = [entry["top_logprobs"] for entry in choice["logprobs"]["content"]]
    before = [entry["top_logprobs"] for entry in NAMED["choices"][0]["logprobs"]["content"]]

    assert before != others
    assert [
        [each | {"token": f"<{each['token'].removeprefix('token_id:')}>", "bytes": None} for each in one]
        for one in before
    ] == others


@pytest.mark.parametrize("asked", [None, 0, 2])
def test_alternatives_are_asked_for_by_their_ids(asked):
    """Only where there are to be some, and pieces are wanted."""
    fields = {"return_tokens_as_token_ids": True} if asked else {}

    assert fields == TokenAnnotations(pieces).fields({"top_logprobs": asked})
    assert {} == TokenAnnotations(ids=True).fields({"top_logprobs": asked})


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
def test_what_has_no_piece_is_not_told_in_text(ids, entry):
    """The logprobs of that choice are null: text in the place of a piece may be another token's piece."""
    choice = {"index": 0, "logprobs": {"content": [entry]}}
    tokens = Tokens([1], (Sampled(0, None, ids, None, "stop", None),))
    reply = TokenAnnotations(lambda ids: ["<7>" if token == 7 else None for token in ids])

    assert [{"index": 0, "logprobs": None}] == reply.annotate({"choices": [choice]}, tokens)["choices"]


def test_each_choice_has_its_ids_and_its_prompt():
    """By the names that Marin reads, whether the prompt is the choice's own or of all choices."""
    own = Sampled(1, [3], [4], None, "stop", None)
    shared = Sampled(0, None, [5], None, "stop", None)
    shown = TokenAnnotations(ids=True).annotate(
        {"choices": [{"index": 0}, {"index": 1}]}, Tokens([1, 2], (shared, own))
    )

    assert [
        {"index": 0, "prompt_token_ids": [1, 2], "response_token_ids": [5]},
        {"index": 1, "prompt_token_ids": [3], "response_token_ids": [4]},
    ] == shown["choices"]


def test_ids_that_are_not_known_are_absent():
    """Not null: clients ask whether a key is there."""
    shown = TokenAnnotations(ids=True).annotate(
        {"choices": [{"index": 0}]}, Tokens(None, (Sampled(0, None, [4], None, None, None),))
    )

    assert [{"index": 0}] == shown["choices"]


def test_a_reply_without_logprobs_has_no_pieces():
    """Nothing is told that the client did not ask for."""
    choice = {"index": 0, "logprobs": None}
    tokens = Tokens([1], (Sampled(0, None, [4], None, None, None),))

    assert [choice] == TokenAnnotations(pieces).annotate({"choices": [choice]}, tokens)["choices"]
