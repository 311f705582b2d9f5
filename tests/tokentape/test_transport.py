"""Errors from responses, the retry policy, lines, and waits."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy import errors
from tokentape.control_api import NOT_VALID
from tokentape.transport import (
    ROLLOUT_LIMIT,
    ClientError,
    LineBuffer,
    Wait,
    error_from_response,
    parse_json,
    retry_delay,
)

BODY = b'{"error": {"message": "no such rollout", "type": "not_found", "param": "rollout_id", "code": "unknown"}}'


def test_an_error_has_the_fields_of_its_response():
    """Message, status, type, code and param; status, code and message are in its text."""
    error = error_from_response(404, {}, BODY)

    assert (
        error.message, error.status, error.type, error.code, error.param,
    ) == ("no such rollout", 404, "not_found", "unknown", "rollout_id")  # fmt: skip
    assert str(error) == "404 unknown: no such rollout"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the response has no body"),
        (b"<html>502</html>", "<html>502</html>"),
        (b'{"error": "down"}', '{"error": "down"}'),
        (b'["x"]', '["x"]'),
        (b'{"error": {}}', '{"error": {}}'),
        (b"\xff", "�"),
    ],
)
def test_an_error_of_another_server_has_its_text_as_message(content, message):
    """A load balancer's page, for example."""
    error = error_from_response(502, {}, content)

    assert (error.message, error.status, error.type) == (message, 502, "http_error")


@pytest.mark.parametrize(("header", "seconds"), [(None, None), ("2", 2.0), ("-1", 0.0), ("Wed, 21 Oct 2026", None)])
def test_retry_after_is_parsed_as_seconds(header, seconds):
    """A date is ignored: the default delay applies."""
    headers = {} if header is None else {"Retry-After": header}

    assert seconds == error_from_response(503, headers, BODY).retry_after_s


def failed(status, **fields):
    return ClientError("no", status=status, **fields)


@pytest.mark.parametrize(
    ("error", "attempt", "delay"),
    [
        (failed(503, retry_after_s=2.0), 1, 2.0),
        (failed(429, retry_after_s=0.0), 4, 0.0),
        (failed(503), 1, 0.25),
        (failed(503), 3, 1.0),
        (ClientError("connection refused", code="unreachable"), 2, 0.5),
        (failed(503, retry_after_s=61.0), 1, None),
        (failed(503), 5, None),
        (failed(429, type="rollout_limit"), 1, None),
        (failed(404), 1, None),
        (failed(500), 1, None),
        (ClientError("reset", code="connection_lost"), 1, None),
    ],
)
def test_only_requests_that_were_not_processed_are_retried(error, attempt, delay):
    """429, 503 and a failed connection, five attempts, after Retry-After or twice the previous delay."""
    assert delay == retry_delay(error, attempt, 5)


def test_errors_have_the_names_of_the_proxys_errors():
    """The client has its own copy of them, because it imports nothing of the server."""
    assert (errors.LimitReached.kind, errors.UnprocessableRequest.code) == (ROLLOUT_LIMIT, NOT_VALID)


def test_what_is_not_json_is_an_error_that_suggests_to_check_the_url():
    assert parse_json(b'{"a": [1, null]}', "http://x") == {"a": [1, None]}
    with pytest.raises(ClientError, match="http://x did not return JSON; check that it is the control API") as caught:
        parse_json(b"<html>", "http://x")

    assert (caught.value.status, caught.value.code) == (None, "not_json")


@given(st.lists(st.sampled_from([b"a", b"\n", b"\r", "\u2028".encode(), b"\x85"])), st.integers(1, 4))
def test_lines_do_not_depend_on_how_the_response_is_cut(pieces, size):
    text = b"".join(pieces)
    lines = LineBuffer()
    found = [line for start in range(0, len(text), size) for line in lines.feed(text[start : start + size])]

    assert text.split(b"\n") == [*found, lines.rest()]


@pytest.mark.parametrize(("status", "may_pass"), [(None, True), (429, True), (503, True), (401, False), (409, False)])
def test_only_errors_of_requests_last(status, may_pass):
    """A proxy that restarts, or a store that is unreachable, comes back; a wrong key does not become right."""
    assert may_pass == ClientError("no", status=status).may_pass


def test_a_wait_of_infinite_wait_s_has_no_end(monkeypatch):
    now = iter([0.0, 1e12, 1e12])
    monkeypatch.setattr("tokentape.transport.monotonic", lambda: next(now))
    wait = Wait(math.inf)

    assert (math.inf, 0) == (wait.left_s, wait.until_log_s)


def test_a_wait_logs_again_after_its_interval_and_ends_with_what_it_waited_for(monkeypatch, caplog):
    now = [100.0]
    monkeypatch.setattr("tokentape.transport.monotonic", lambda: now[0])
    wait = Wait(90.0)
    seen = []
    for now[0] in (100.0, 130.0, 145.0, 200.0):
        seen.append((wait.seconds, wait.left_s, wait.until_log_s))
        if not wait.until_log_s:
            wait.log("a group")

    assert seen == [(0, 90, 30), (30, 60, 0), (45, 45, 15), (100, 0, 0)]
    assert [f"waiting for a group, for {seconds} s now" for seconds in (30, 100)] == caplog.messages
    assert "Waited 100 s for a group. Set wait_s" in str(wait.error("a group"))
