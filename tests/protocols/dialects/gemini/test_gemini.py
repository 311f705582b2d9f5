"""Errors and models in Google's format."""

import orjson
import pytest

from proxy import errors
from proxy.protocols.dialects.gemini import GEMINI, GEMINI_ARRAY, error_for, error_from, name_for


@pytest.mark.parametrize(
    ("error", "status", "name"),
    [
        (errors.BadRequest, 400, "INVALID_ARGUMENT"),
        (errors.InvalidValue, 400, "INVALID_ARGUMENT"),
        (errors.UnprocessableRequest, 422, "INVALID_ARGUMENT"),
        (errors.RequestTooLarge, 413, "INVALID_ARGUMENT"),
        (errors.Unauthorized, 401, "UNAUTHENTICATED"),
        (errors.Forbidden, 403, "PERMISSION_DENIED"),
        (errors.NotFound, 404, "NOT_FOUND"),
        (errors.RequestTimeout, 408, "DEADLINE_EXCEEDED"),
        (errors.RolloutClosed, 409, "ABORTED"),
        (errors.LimitReached, 429, "RESOURCE_EXHAUSTED"),
        (errors.EngineBusy, 429, "RESOURCE_EXHAUSTED"),
        (errors.Paused, 429, "RESOURCE_EXHAUSTED"),
        (errors.EngineDisconnected, 502, "UNAVAILABLE"),
        (errors.EngineTimeout, 504, "DEADLINE_EXCEEDED"),
        (errors.InternalError, 500, "INTERNAL"),
    ],
)
def test_every_error_has_googles_name_of_its_status(error, status, name):
    """And the number in its body."""
    shown = orjson.loads(GEMINI.error(error("why")))["error"]

    assert (error.status, shown["status"]) == (status, name)
    assert (shown["code"], shown["message"]) == (status, "why")
    assert {
        "@type": "type.googleapis.com/google.rpc.ErrorInfo",
        "reason": error.code.upper(),
        "domain": "tokentape",
    } in (shown["details"])


def test_the_details_name_the_field_and_the_delay_of_a_retry():
    """A limit of a rollout has no delay: a retry cannot succeed."""
    field = error_for(errors.BadRequest("a: no", param="a"))["error"]["details"][1]
    retry = error_for(errors.Paused("no"))["error"]["details"][1]

    assert field == {
        "@type": "type.googleapis.com/google.rpc.BadRequest",
        "fieldViolations": [{"field": "a", "description": "a: no"}],
    }
    assert retry == {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "1s"}
    assert len(error_for(errors.LimitReached("no"))["error"]["details"]) == 1


@pytest.mark.parametrize(
    ("status", "name"),
    [(400, "INVALID_ARGUMENT"), (418, "INVALID_ARGUMENT"), (429, "RESOURCE_EXHAUSTED"), (599, "INTERNAL")],
)
def test_an_engines_error_keeps_its_status_and_message(status, name):
    """A stream as an array has its error in an array."""
    body = GEMINI.engine_error(status, '{"error": {"message": "too long", "code": 400}}')

    assert orjson.loads(body) == {"error": {"code": status, "message": "too long", "status": name}}
    assert [orjson.loads(body)] == orjson.loads(GEMINI_ARRAY.engine_error(status, "too long"))
    assert name_for(status) == name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("broke off", {"code": 500, "message": "broke off", "status": "INTERNAL"}),
        ('{"error": "x"}', {"code": 500, "message": "x", "status": "INTERNAL"}),
        ('{"error": {"message": "x", "code": 404}}', {"code": 404, "message": "x", "status": "NOT_FOUND"}),
        ('{"error": {"message": "x", "code": true}}', {"code": 500, "message": "x", "status": "INTERNAL"}),
        ("[1, 2]", {"code": 500, "message": "[1, 2]", "status": "INTERNAL"}),
    ],
)
def test_an_error_event_of_an_engine_becomes_an_error_of_the_stream(text, expected):
    assert error_from(text) == {"error": expected}


@pytest.mark.parametrize("dialect", [GEMINI, GEMINI_ARRAY])
def test_an_error_of_tokentape_is_unchanged_in_a_stream(dialect):
    """After keep-alive bytes, an error is a part of the stream."""
    assert error_for(errors.Paused("no")) == error_from(dialect.error(errors.Paused("no")).decode())


def test_a_model_has_its_context_window_as_limits():
    """The window of an engine without one is unknown."""
    shown = GEMINI.models([{"id": "org/name", "max_model_len": 4096}, {"id": "other"}])["models"]

    assert [entry["name"] for entry in shown] == ["models/org/name", "models/other"]
    assert (shown[0]["inputTokenLimit"], shown[0]["outputTokenLimit"]) == (4096, 4096)
    assert "inputTokenLimit" not in shown[1]
    assert shown[1] == GEMINI.model({"id": "other"})
