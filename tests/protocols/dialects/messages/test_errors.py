"""Errors in Anthropic's shape, status codes and types."""

import orjson
import pytest
from anthropic.types import ErrorResponse

from proxy import errors
from proxy.protocols.dialects.base import engine_message
from proxy.protocols.dialects.messages import MESSAGES
from proxy.protocols.dialects.messages.errors import status_for, type_for

ERRORS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.ProxyError) and kind is not errors.ProxyError
]


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (errors.BadRequest, 400, "invalid_request_error"),
        (errors.UnprocessableRequest, 400, "invalid_request_error"),
        (errors.UnsupportedEncoding, 400, "invalid_request_error"),
        (errors.RolloutClosed, 400, "invalid_request_error"),
        (errors.Unauthorized, 401, "authentication_error"),
        (errors.Forbidden, 403, "permission_error"),
        (errors.NotFound, 404, "not_found_error"),
        (errors.RequestTooLarge, 413, "request_too_large"),
        (errors.LimitReached, 429, "rate_limit_error"),
        (errors.EngineBusy, 529, "overloaded_error"),
        (errors.Overloaded, 529, "overloaded_error"),
        (errors.Paused, 529, "overloaded_error"),
        (errors.EngineDisconnected, 502, "api_error"),
        (errors.StoreUnavailable, 503, "api_error"),
        (errors.EngineTimeout, 504, "timeout_error"),
    ],
)
def test_an_error_has_the_status_and_type_of_anthropics_api(error, status, kind):
    """Overload that passes is 529, on which clients retry."""
    body = orjson.loads(MESSAGES.error(error("why")))

    assert status == status_for(error("why")) == MESSAGES.status(error("why"))
    assert {"type": "error", "error": {"type": kind, "message": "why"}} == body


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_every_error_is_of_a_type_that_the_sdk_models(error):
    """Except 413, which the API documents and the SDK does not model."""
    body = orjson.loads(MESSAGES.error(error("why")))
    if body["error"]["type"] == "request_too_large":
        assert errors.RequestTooLarge is error
        return

    assert "why" == ErrorResponse.model_validate(body, strict=True).error.message


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
    assert message == engine_message(text)
    assert message == orjson.loads(MESSAGES.engine_error(400, text))["error"]["message"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (422, "invalid_request_error"), (500, "api_error"), (503, "api_error")],
)
def test_every_status_of_an_engine_has_an_error_type(status, kind):
    """Also statuses that Anthropic's API does not have."""
    assert kind == type_for(status)
