"""Export options, parsed from a query and from a claim."""

import orjson
import pytest
from aiohttp.test_utils import make_mocked_request

from proxy.api.control.export_query import export_query_from, export_query_from_claim
from proxy.api.control.group_rows import ADVANTAGES
from proxy.api.control.schemas import ClaimBatch, read_as
from proxy.errors import BadRequest

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
]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_claim_and_a_query_have_the_same_options(options):
    query = "&".join(f"{name}={value}" for name, value in options.items())
    by_query = export_query_from(make_mocked_request("GET", f"/groups/g/export?{query}"), ADVANTAGES)

    assert by_query == export_query_from_claim(read_as(ClaimBatch, orjson.dumps({"consumer": "c", **options})))


@pytest.mark.parametrize(
    "query",
    ["format=nope", "branches=some", "max_len=0", "prompt_logprob=nan", "pad_id=-1", "container=xml", "report=1"],
)
def test_an_invalid_option_is_named(query):
    with pytest.raises(BadRequest) as refused:
        export_query_from(make_mocked_request("GET", f"/export?{query}"))

    assert query.partition("=")[0] == refused.value.param


def test_the_accept_header_selects_the_container():
    request = make_mocked_request("GET", "/export", headers={"Accept": "application/x-ndjson"})

    assert "application/x-ndjson" == export_query_from(request).container.content_type
