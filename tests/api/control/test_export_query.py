"""Export options, parsed from a query and from a claim."""

from dataclasses import replace
from types import SimpleNamespace

import orjson
import pytest
from aiohttp.test_utils import make_mocked_request
from policies import policies_of

from proxy.api.context import CONTEXT
from proxy.api.control.export_query import IN_GROUP, export_query_from, export_query_from_claim
from proxy.api.control.schemas import ClaimBatch, read_as
from proxy.errors import BadRequest, UnprocessableRequest
from proxy.rollouts.scoring.rescoring import Rescorers
from proxy.trajectory.advantages import SoftPenalty
from proxy.trajectory.sequence import Options
from proxy.trajectory.thread_rules import ThreadOptions

SERVICES = SimpleNamespace(
    policies=policies_of(),
    threads=ThreadOptions(),
    rescorers=Rescorers({"policy": None, "teacher": None}, cache=None, read_text=None),
)


def request_for(method, path, **named):
    """Return a request to a proxy without named policies."""
    return make_mocked_request(method, path, app={CONTEXT: SERVICES}, **named)


OPTIONS = [
    {},
    {"format": "verl", "branches": "last", "include": "flagged", "overlong": "drop", "max_len": 7},
    {
        "format": "tinker",
        "advantage": "grpo",
        "prompt_logprob": 0.5,
        "pad_id": 3,
        "prompt_length": 4,
        "response_length": 5,
    },
    {"format": "scored_data", "advantage": "dr_grpo", "discount": 0.5},
    {"advantage": "step", "overlong": "penalize", "max_len": 9, "overlong_buffer": 4},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_claim_and_a_query_have_the_same_options(options):
    query = "&".join(f"{name}={value}" for name, value in options.items())
    by_query = export_query_from(request_for("GET", f"/groups/g/export?{query}"), IN_GROUP)

    assert by_query == export_query_from_claim(
        read_as(ClaimBatch, orjson.dumps({"consumer": "c", **options})), SERVICES
    )


def test_a_claim_and_a_query_have_the_same_scores():
    """The format has the columns of the scores, and is otherwise the same."""
    options = {"format": "verl_dataproto", "rescore": "policy"}
    claim = read_as(ClaimBatch, orjson.dumps({"consumer": "c", **options}))
    claimed = export_query_from_claim(claim, SERVICES)
    exported = export_query_from(request_for("GET", "/export?format=verl_dataproto&rescore=policy"))

    assert claimed.form.columns == exported.form.columns
    assert "old_log_probs" in claimed.form.columns
    assert replace(claimed, form=exported.form) == exported
    assert ("policy", 0, "proximal") == (claimed.rescore, claimed.rescore_top_k, claimed.fill.role)


@pytest.mark.parametrize(
    "query",
    [
        "rescore=nobody", "rescore=teacher&format=tinker", "rescore_top_k=1", "rescore_top_k=101&rescore=teacher",
        "rescore_top_k=1&rescore=teacher&format=areal",
        "format=nope", "branches=some", "max_len=0", "prompt_logprob=nan", "pad_id=-1", "container=xml", "report=1",
        "advantage=much", "advantage=reinforce_pp", "advantage=step&format=trl", "discount=0&advantage=grpo",
        "discount=1.5&advantage=grpo", "discount=nan&advantage=grpo", "discount=x", "discount=0.9",
        "discount=0.9&advantage=none", "discount=0.9&advantage=grpo&format=trl_async", "overlong=some", "overlong_buffer=0",
        "overlong_buffer=5",
        "overlong_buffer=5&overlong=cut&max_len=9", "max_len=&overlong=penalize",
        "overlong_buffer=9&overlong=penalize&max_len=8",
    ],
)  # fmt: skip
def test_an_invalid_option_is_named(query):
    with pytest.raises(BadRequest) as refused:
        export_query_from(request_for("GET", f"/groups/g/export?{query}"), IN_GROUP)

    assert query.partition("=")[0] == refused.value.param


def test_the_penalty_requires_both_lengths():
    for query, missing in (("overlong_buffer=5", "max_len"), ("max_len=5", "overlong_buffer")):
        with pytest.raises(BadRequest, match=f"{missing} is missing"):
            export_query_from(request_for("GET", f"/export?overlong=penalize&{query}"))


def test_the_penalty_does_not_cut_rows():
    request = request_for("GET", "/export?overlong=penalize&max_len=9&overlong_buffer=4")
    query = export_query_from(request)

    assert (Options(max_len=None, overlong="keep"), SoftPenalty(9, 4)) == (query.options, query.penalty)


def test_a_format_without_a_place_for_advantages_of_turns_names_those_that_have_one():
    with pytest.raises(BadRequest, match="use one of sequences, scored_data, verifiers, tinker, prime_rl"):
        export_query_from(request_for("GET", "/export?format=verl&advantage=step"))


def test_an_export_cannot_be_normalized_over_a_batch():
    with pytest.raises(BadRequest, match=r"a claimed batch \(POST /batches/claim\)"):
        export_query_from(request_for("GET", "/groups/g/export?advantage=reinforce_pp"), IN_GROUP)
    claim = read_as(ClaimBatch, b'{"consumer": "c", "advantage": "reinforce_pp"}')
    assert "reinforce_pp" == export_query_from_claim(claim, SERVICES).advantage


@pytest.mark.parametrize("body", ['"discount": 0', '"discount": 1.1', '"discount": "1"', '"overlong_buffer": 0'])
def test_a_claim_with_an_invalid_value_is_rejected(body):
    with pytest.raises(UnprocessableRequest, match=body.split('"')[1]):
        read_as(ClaimBatch, f'{{"consumer": "c", {body}}}'.encode())


def test_the_accept_header_selects_the_container():
    request = request_for("GET", "/export", headers={"Accept": "application/x-ndjson"})

    assert "application/x-ndjson" == export_query_from(request).container.content_type
