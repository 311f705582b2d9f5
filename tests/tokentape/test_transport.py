"""What is refused, and how long a client waits before it asks again."""

import pytest

from tokentape.transport import ClientError, error_from_response, parse_line, retry_delay

OURS = b'{"error": {"message": "no such rollout", "type": "not_found", "param": "rollout_id", "code": "unknown"}}'


def test_a_refusal_of_ours_keeps_what_it_says():
    """Message, status, type, code, param; and all of it in its text."""
    error = error_from_response(404, {}, OURS)

    assert ("no such rollout", 404, "not_found", "unknown", "rollout_id") == (
        error.message, error.status, error.type, error.code, error.param,
    )  # fmt: skip
    assert "404 unknown: no such rollout" == str(error)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "the response has no body"),
        (b"<html>502</html>", "<html>502</html>"),
        (b'{"error": "down"}', '{"error": "down"}'),
        (b'["x"]', '["x"]'),
        (b'{"error": {}}', '{"error": {}}'),
        (b"\xff", "�"),
    ],
)
def test_a_refusal_of_somebody_else_has_its_text(text, message):
    """A load balancer's page, say."""
    error = error_from_response(502, {}, text)

    assert (message, 502, "http_error") == (error.message, error.status, error.type)


@pytest.mark.parametrize(("said", "seconds"), [(None, None), ("2", 2.0), ("-1", 0.0), ("Wed, 21 Oct 2026", None)])
def test_retry_after_is_read_as_seconds(said, seconds):
    """A date is left to the default pause."""
    headers = {} if said is None else {"Retry-After": said}

    assert seconds == error_from_response(503, headers, OURS).retry_after_s


def refused(status, **said):
    return ClientError("no", status=status, **said)


@pytest.mark.parametrize(
    ("error", "attempt", "pause"),
    [
        (refused(503, retry_after_s=2.0), 1, 2.0),
        (refused(429, retry_after_s=0.0), 4, 0.0),
        (refused(503), 1, 0.25),
        (refused(503), 3, 1.0),
        (ClientError("away", code="unreachable"), 2, 0.5),
        (refused(503, retry_after_s=61.0), 1, None),
        (refused(503), 5, None),
        (refused(429, type="rollout_limit"), 1, None),
        (refused(404), 1, None),
        (refused(500), 1, None),
        (ClientError("cut", code="connection_lost"), 1, None),
    ],
)
def test_only_what_was_not_carried_out_is_asked_again(error, attempt, pause):
    """429, 503 and a refused connection, five times, each after its Retry-After or twice the pause before."""
    assert pause == retry_delay(error, attempt, 5)


def test_a_line_is_json():
    """One row of an export."""
    assert {"a": [1, None]} == parse_line('{"a": [1, null]}')
