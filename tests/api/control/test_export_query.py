"""Export options, parsed from a query and from a claim."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlencode

import orjson
import pytest
from aiohttp.test_utils import make_mocked_request
from tests.support.policies import policies_of

from proxy.api.context import CONTEXT
from proxy.api.control.export_query import export_query, export_query_from
from proxy.api.control.schemas import ClaimBatch, ExportGroup, ExportMany, ExportOptions
from proxy.api.requests import read_as
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
    _, by_query = export_query_from(request_for("GET", f"/groups/g/export?{query}"), ExportGroup)
    claim = read_as(ClaimBatch, orjson.dumps({"consumer": "c", **options}))

    assert replace(export_query(SERVICES, claim), asked=by_query.asked) == by_query
    for name in ExportOptions.model_fields:
        assert getattr(claim, name) == getattr(by_query.asked, name)


def test_a_claim_and_a_query_have_the_same_scores():
    """The format has the columns of the scores, and is otherwise the same."""
    options = {"format": "verl_dataproto", "rescore": "policy", "prompt_length": 9, "response_length": 9}
    claim = read_as(ClaimBatch, orjson.dumps({"consumer": "c", **options}))
    claimed = export_query(SERVICES, claim)
    _, exported = export_query_from(request_for("GET", f"/export?{urlencode(options)}"), ExportMany)

    assert claimed.form.columns == exported.form.columns
    assert "old_log_probs" in claimed.form.columns
    assert replace(claimed, form=exported.form, asked=exported.asked) == exported
    assert (claimed.asked.rescore, claimed.asked.rescore_top_k, claimed.fill.role) == ("policy", 0, "proximal")


@pytest.mark.parametrize(
    "query",
    [
        "rescore=nobody", "rescore=teacher&format=tinker", "rescore_top_k=1", "rescore_top_k=101&rescore=teacher",
        "rescore_top_k=1&rescore=teacher&format=areal",
        "prompt_length=&response_length=9&format=verl_dataproto", "response_length=&prompt_length=9&format=verl_dataproto",
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
        export_query_from(request_for("GET", f"/groups/g/export?{query}"), ExportGroup)

    assert query.partition("=")[0] == refused.value.param


def test_the_penalty_requires_both_lengths():
    for query, missing in (("overlong_buffer=5", "max_len"), ("max_len=5", "overlong_buffer")):
        with pytest.raises(BadRequest, match=f"{missing} is missing"):
            export_query_from(request_for("GET", f"/export?overlong=penalize&{query}"), ExportMany)


def test_the_penalty_does_not_cut_rows():
    request = request_for("GET", "/export?overlong=penalize&max_len=9&overlong_buffer=4")
    _, query = export_query_from(request, ExportMany)

    assert (Options(max_len=None, overlong="keep"), SoftPenalty(9, 4)) == (query.options, query.penalty)


def test_a_format_without_a_place_for_advantages_of_turns_names_those_that_have_one():
    with pytest.raises(BadRequest, match="use one of sequences, scored_data, verifiers, tinker, prime_rl"):
        export_query_from(request_for("GET", "/export?format=verl&advantage=step"), ExportMany)


def test_an_export_cannot_be_normalized_over_a_batch():
    with pytest.raises(BadRequest, match=r"a claimed batch \(POST /batches/claim\)"):
        export_query_from(request_for("GET", "/groups/g/export?advantage=reinforce_pp"), ExportGroup)
    claim = read_as(ClaimBatch, b'{"consumer": "c", "advantage": "reinforce_pp"}')
    assert export_query(SERVICES, claim).asked.advantage == "reinforce_pp"


@pytest.mark.parametrize("body", ['"discount": 0', '"discount": 1.1', '"discount": "1"', '"overlong_buffer": 0'])
def test_a_claim_with_an_invalid_value_is_rejected(body):
    with pytest.raises(UnprocessableRequest, match=body.split('"')[1]):
        read_as(ClaimBatch, f'{{"consumer": "c", {body}}}'.encode())


def test_the_accept_header_selects_the_container():
    request = request_for("GET", "/export", headers={"Accept": "application/x-ndjson"})

    assert export_query_from(request, ExportMany)[1].container.content_type == "application/x-ndjson"


ROOT = Path(__file__).parents[3]
ADDED = {
    "proxy/api/control/schemas.py": (
        "    pad_id: Index = 0\n",
        "    pad_id: Index = 0\n    end_id: Index | None = None\n",
    ),
    "proxy/export/base.py": ("    pad_id: int = 0\n", "    pad_id: int = 0\n    end_id: int | None = None\n"),
    "proxy/export/trl.py": ('"input_ids": row.token_ids,', '"input_ids": [*row.token_ids, source.fill.end_id],'),
}
USE = """
import orjson
from tests.support.forests import make_choice, make_step
from proxy.api.control.export_query import export_query, export_query_from
from proxy.api.control.schemas import ClaimBatch, ExportGroup, ExportMany, ExportRollout
from proxy.api.requests import read_as
from proxy.api.openapi import describe
from proxy.trajectory.facts import RolloutFacts
from test_export_query import SERVICES, request_for

claim = export_query(SERVICES, read_as(ClaimBatch, b'{"consumer": "c", "format": "trl_async", "end_id": 7}'))
queries = [
    export_query_from(request_for("GET", "/export?format=trl_async&end_id=7"), model)[1]
    for model in (ExportRollout, ExportMany, ExportGroup)
]
steps = [make_step("s", [1, 2], make_choice(0, [3]), policy_version="1")]
rows = [it.form.rows(RolloutFacts("r", advantages=1.0), steps, it.options, it.fill).rows for it in (claim, *queries)]
document = orjson.dumps(describe()).decode()
print([row["input_ids"] for found in rows for row in found], document.count('"name":"end_id"'), document.count('"end_id":{'))
"""


def test_a_new_option_touches_three_files(tmp_path):
    """Its declaration, the values that formats read, and a format; queries, claims and OpenAPI have it then."""
    for package in ("proxy", "storage"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, (before, after) in ADDED.items():
        text = (tmp_path / name).read_text()
        assert before in text
        (tmp_path / name).write_text(text.replace(before, after))
    path = [str(tmp_path), str(ROOT / "tests/support"), str(Path(__file__).parent)]
    found = subprocess.run(
        [sys.executable, "-c", USE],
        check=False,
        env={"PYTHONPATH": ":".join(path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )

    assert found.stdout.strip() == "[[1, 2, 3, 7], [1, 2, 3, 7], [1, 2, 3, 7], [1, 2, 3, 7]] 3 1", found.stderr
