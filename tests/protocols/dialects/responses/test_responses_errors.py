"""Errors in OpenAI's shape."""

import orjson
import pytest

from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects.responses import RESPONSES


def test_an_error_of_the_proxy_has_the_native_dialects_type_and_code():
    """`param` is the name of the field."""
    assert orjson.loads(RESPONSES.error(UnprocessableRequest("x is wrong", param="x"))) == {
        "error": {
            "message": "x is wrong",
            "type": "invalid_request_error",
            "param": "x",
            "code": "unprocessable_request",
        }
    }


@pytest.mark.parametrize(
    ("status", "text", "kind", "message"),
    [
        (
            400,
            '{"error": {"message": "m", "type": "BadRequestError", "param": "p", "code": 400}}',
            "invalid_request_error",
            "m",
        ),
        (
            404,
            '{"object": "error", "message": "m", "type": "NotFound", "param": "p", "code": 404}',
            "not_found_error",
            "m",
        ),
        (401, '{"error": "Unauthorized"}', "authentication_error", "Unauthorized"),
        (429, '{"error": {"code": "slow"}}', "rate_limit_error", '{"error": {"code": "slow"}}'),
        (500, "Internal Server Error", "server_error", "Internal Server Error"),
        (503, "", "server_error", "The engine returned status 503 without a message."),
        (500, "[1]", "server_error", "[1]"),
        (500, '{"error": [1]}', "server_error", '{"error": [1]}'),
    ],
)
def test_an_engines_error_message_is_forwarded(status, text, kind, message):
    """From nested JSON, flat JSON or plain text; the type depends on the status."""
    body = orjson.loads(RESPONSES.engine_error(status, text))["error"]

    assert (body["message"], body["type"]) == (message, kind)
    assert (body["param"], body["code"]) == ("p" if '"p"' in text else None, "slow" if "slow" in text else None)
