"""Errors in the dialect's shape."""

import orjson
import pytest
from anthropic.types import ErrorResponse

from proxy import errors
from proxy.protocols.dialects.messages import MESSAGES
from proxy.protocols.dialects.messages.errors import engine_message, status_for, type_for

EVERY = [
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
def test_our_failures_have_its_statuses_and_types(error, status, kind):
    """A client that may try again is told so: 529 for what is full for now."""
    told = orjson.loads(MESSAGES.error(error("why")))

    assert status == status_for(error("why")) == MESSAGES.status(error("why"))
    assert {"type": "error", "error": {"type": kind, "message": "why"}} == told


@pytest.mark.parametrize("error", EVERY, ids=lambda error: error.__name__)
def test_every_failure_is_one_that_the_sdk_knows(error):
    """By its own models, of which only 413, that the API documents, has none."""
    told = orjson.loads(MESSAGES.error(error("why")))
    if told["error"]["type"] == "request_too_large":
        assert errors.RequestTooLarge is error
        return

    assert "why" == ErrorResponse.model_validate(told, strict=True).error.message


@pytest.mark.parametrize(
    ("text", "words"),
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
def test_an_engines_words_are_told_as_they_are(text, words):
    """In whichever shape it wrapped them."""
    assert words == engine_message(text)
    assert words == orjson.loads(MESSAGES.engine_error(400, text))["error"]["message"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (422, "invalid_request_error"), (500, "api_error"), (503, "api_error")],
)
def test_an_engines_status_has_a_type(status, kind):
    """Those that the API does not have, too."""
    assert kind == type_for(status)
