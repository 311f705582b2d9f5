"""Values that all dialects read in the same way, and OpenAI's error body."""

import orjson
import pytest
from pydantic import TypeAdapter

from proxy.errors import BadRequest
from proxy.protocols.dialects.base import is_on, openai_error, requested_usage, sample_count


@pytest.mark.parametrize(
    ("value", "expected"), [(None, False), (False, False), (0, False), (True, True), (1, True), ("maybe", True)]
)
def test_a_flag_is_on_unless_it_is_absent_null_or_false(value, expected):
    """The engine validates other values."""
    assert expected is is_on(value)


@pytest.mark.parametrize(
    "text", ["0", "off", "f", "false", "n", "no", "No", "FALSE", "1", "on", "t", "true", "y", "yes"]
)
def test_a_flag_written_as_a_word_is_read_as_pydantic_reads_it(text):
    """Engines validate requests with pydantic."""
    assert TypeAdapter(bool).validate_python(text) is is_on(text)


@pytest.mark.parametrize(
    ("n", "expected"), [(None, 1), (1, 1), (3, 3), (0, None), (-1, None), ("3", None), (True, None), (2.0, None)]
)
def test_n_is_one_by_default_and_unknown_if_invalid(n, expected):
    assert sample_count({"n": n}) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [(None, False), ({}, False), ({"include_usage": True}, True), ({"include_usage": False}, False), (7, False)],
)
def test_usage_is_requested_in_stream_options(options, expected):
    assert expected is requested_usage({"stream_options": options})[0]


def test_errors_have_openais_shape():
    expected = {"message": "no", "type": "invalid_request_error", "param": "x", "code": "bad_request"}

    assert orjson.loads(openai_error(BadRequest("no", param="x"))) == {"error": expected}
