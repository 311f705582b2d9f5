"""Errors and models in Anthropic's shape and types."""

import orjson
import pytest
from anthropic.types import ErrorResponse, ModelInfo

from proxy import errors
from proxy.protocols.dialects.base import engine_message
from proxy.protocols.dialects.messages import MESSAGES, type_for

ERRORS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.ProxyError) and kind is not errors.ProxyError
]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.BadRequest, "invalid_request_error"),
        (errors.UnprocessableRequest, "invalid_request_error"),
        (errors.InvalidValue, "invalid_request_error"),
        (errors.RolloutClosed, "invalid_request_error"),
        (errors.Unauthorized, "authentication_error"),
        (errors.Forbidden, "permission_error"),
        (errors.NotFound, "not_found_error"),
        (errors.RequestTooLarge, "request_too_large"),
        (errors.LimitReached, "rate_limit_error"),
        (errors.EngineBusy, "rate_limit_error"),
        (errors.Overloaded, "rate_limit_error"),
        (errors.Paused, "rate_limit_error"),
        (errors.EngineDisconnected, "api_error"),
        (errors.StoreUnavailable, "api_error"),
        (errors.EngineTimeout, "timeout_error"),
    ],
)
def test_an_error_has_the_type_of_anthropics_api_for_its_status(error, kind):
    """A status that the API does not have is of an invalid request or of the API."""
    body = orjson.loads(MESSAGES.error(error("why")))

    assert body == {"type": "error", "error": {"type": kind, "message": "why"}}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_every_error_is_of_a_type_that_the_sdk_models(error):
    """Except 413, which the API documents and the SDK does not model."""
    body = orjson.loads(MESSAGES.error(error("why")))
    if body["error"]["type"] == "request_too_large":
        assert errors.RequestTooLarge is error
        return

    assert ErrorResponse.model_validate(body, strict=True).error.message == "why"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}', "too long"),
        ('{"object":"error","message":"too long","type":"BadRequestError","code":400}', "too long"),
        ('{"error": "Unauthorized"}', "Unauthorized"),
        ('{"detail":"Not Found"}', "Not Found"),
        ('{"error": {}}', '{"error": {}}'),
        ('{"message": 7}', '{"message": 7}'),
        ("[1]", "[1]"),
        ("Bad Gateway", "Bad Gateway"),
        ("", ""),
    ],
)
def test_an_engines_message_is_forwarded(text, message):
    """Engines nest it in different JSON objects."""
    assert engine_message(text) == message
    assert orjson.loads(MESSAGES.engine_error(400, text))["error"]["message"] == message


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (422, "invalid_request_error"), (500, "api_error"), (503, "api_error")],
)
def test_every_status_of_an_engine_has_an_error_type(status, kind):
    """Also statuses that Anthropic's API does not have."""
    assert type_for(status) == kind


def test_models_are_one_page_that_the_sdk_reads():
    page = MESSAGES.models([{"id": "policy", "created": 1795229441, "max_model_len": 2048}, {"id": "b"}])

    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "policy", "b")
    first = ModelInfo.model_validate(page["data"][0])
    assert (first.id, first.max_input_tokens, first.created_at.year) == ("policy", 2048, 2026)


def test_a_listing_without_models_is_an_empty_page():
    assert MESSAGES.models([]) == {"data": [], "has_more": False, "first_id": None, "last_id": None}


@pytest.mark.parametrize("created", [None, "x", -1, 1 << 60, True])
def test_a_model_without_a_valid_date_has_the_epochs(created):
    """Anthropic's API documents this."""
    assert MESSAGES.model({"id": "m", "created": created})["created_at"] == "1970-01-01T00:00:00Z"
