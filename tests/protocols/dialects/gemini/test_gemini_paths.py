"""Paths of the Gemini API and the fields that a URL has."""

import pytest

from proxy.errors import BadRequest
from proxy.protocols.dialects.gemini import (
    COUNT,
    GENERATE,
    STREAM,
    Target,
    alt_from,
    bound_fields,
    check_alt,
    is_gemini,
    read_target,
)


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("/v1beta/models/gemini-pro:generateContent", Target("gemini-pro", GENERATE)),
        ("/v1beta/models/org/name:generateContent", Target("org/name", GENERATE)),
        ("/v1beta/models/org%2Fname%3AgenerateContent", Target("org/name", GENERATE)),
        ("/v1/models/qwen:7b:streamGenerateContent", Target("qwen:7b", STREAM)),
        ("/v1alpha/tunedModels/mine:countTokens", Target("tunedModels/mine", COUNT)),
        ("/v1beta/models/x:embedContent", Target("x", ":embedContent")),
        ("/v1beta/models/:generateContent", None),
        ("/v1beta/models", None),
        ("/v1beta/models/x", None),
        ("/v1beta/cachedContents", None),
    ],
)
def test_a_posted_path_has_a_model_and_a_method(path, target):
    """Names with slashes and colons, encoded or not."""
    assert read_target(path, "POST") == target


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("/v1beta/models", Target("", "")),
        ("/v1beta/models/", Target("", "")),
        ("/v1beta/models/org%2Fqwen:7b", Target("org/qwen:7b", "")),
        ("/v1beta/files/a", None),
    ],
)
def test_a_path_to_get_has_a_model_or_all(path, target):
    assert read_target(path, "GET") == target


@pytest.mark.parametrize(
    ("path", "headers", "expected"),
    [
        ("/v1beta/anything", {}, True),
        ("/v1alpha/models", {}, True),
        ("/v1/models/m:generateContent", {}, True),
        ("/v1/models/m%3AcountTokens", {}, True),
        ("/v1/models", {}, False),
        ("/v1/models", {"x-goog-api-key": "k"}, True),
        ("/v1/models/m", {"x-goog-api-client": "google-genai-sdk/3.4.0"}, True),
        ("/v1/embeddings", {"x-goog-api-key": "k"}, False),
        ("/health", {}, False),
    ],
)
def test_a_path_belongs_to_the_gemini_api_by_its_version_its_method_or_its_client(path, headers, expected):
    """The list of models of version 1 has the path of OpenAI's."""
    assert expected is is_gemini(path, headers)


@pytest.mark.parametrize(
    ("query", "alt"),
    [
        ({}, "json"),
        ({"alt": "sse"}, "sse"),
        ({"alt": "SSE"}, "sse"),
        ({"alt": ""}, "json"),
        ({"$alt": "json;enum-encoding=int"}, "json"),
        ({"alt": "proto"}, "proto"),
    ],
)
def test_the_format_is_in_the_query(query, alt):
    assert alt_from(query) == alt


def test_an_unknown_format_is_rejected():
    """Server-sent events are a format of streams alone."""
    check_alt("json", GENERATE)
    check_alt("sse", STREAM)
    with pytest.raises(BadRequest, match="alt: must be json or sse, not 'media'"):
        check_alt("media", STREAM)
    with pytest.raises(BadRequest, match="alt: must be json, not 'sse'"):
        check_alt("sse", GENERATE)


def test_a_request_is_recorded_with_the_fields_of_its_url():
    """They replace fields of the body with these names."""
    assert bound_fields(Target("a/b", GENERATE), "json") == {"model": "a/b", "stream": False}
    assert bound_fields(Target("m", STREAM), "sse") == {"model": "m", "stream": True, "alt": "sse"}
