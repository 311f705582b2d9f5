"""Headers that are forwarded in each direction."""

import pytest

from proxy.config.sections import EndpointSettings, EnginesSettings
from proxy.upstream import headers
from proxy.upstream.endpoint import make_endpoint


def endpoint(**settings):
    return make_endpoint(EndpointSettings(url="http://127.0.0.1:1", **settings), EnginesSettings())


@pytest.mark.parametrize("value", ["a\rb", "a\nb", "a\x00b", "\x1b[31m", "a\x7f"])
def test_header_values_with_control_characters_are_dropped(value):
    """The rest of the response is forwarded; tabs and non-ASCII characters are allowed."""
    forwarded = headers.downstream(
        {"X-Odd": value, "X-Tab": "a\tb", "X-Other": "ü\udcff"}, rollout_id=None, step_id=None
    )

    assert [("X-Tab", "a\tb"), ("X-Other", "ü\udcff")] == forwarded


def test_connection_headers_and_credentials_are_not_sent_to_the_engine():
    """TokenTape's own headers are not either; trace headers and others are. The engine's API key is added."""
    sent = headers.upstream(
        [
            ("Authorization", "Bearer agent"),
            ("x-api-key", "agent"),
            ("Connection", "close, X-Private"),
            ("X-Private", "1"),
            ("Transfer-Encoding", "chunked"),
            ("Content-Encoding", "gzip"),
            ("Host", "me"),
            ("X-Rollout-Id", "r1"),
            ("X-Rollout-Continuation", "append"),
            ("Content-Type", "application/json"),
            ("X-Request-Id", "t"),
        ],
        endpoint(api_key="engine"),
    )

    assert [
        ("Content-Type", "application/json"),
        ("X-Request-Id", "t"),
        ("Accept-Encoding", "identity"),
        ("Authorization", "Bearer engine"),
    ] == sent


def test_configured_headers_replace_those_of_the_client():
    configured = endpoint(headers={"X-Tenant": "ours", "X-Other": "o"})
    sent = headers.upstream([("x-tenant", "theirs"), ("X-Mine", "m")], configured)

    assert [("X-Mine", "m"), ("X-Tenant", "ours"), ("X-Other", "o"), ("Accept-Encoding", "identity")] == sent


def test_the_engines_headers_are_forwarded_with_rollout_and_step_id():
    """Without framing headers, and without headers in which the engine poses as TokenTape."""
    forwarded = headers.downstream(
        {
            "Content-Type": "x",
            "Content-Length": "3",
            "Connection": "keep-alive",
            "Retry-After": "7",
            "X-Step-Id": "forged",
        },
        rollout_id="r1",
        step_id="s1",
    )

    assert [("Content-Type", "x"), ("Retry-After", "7"), ("X-Rollout-Id", "r1"), ("X-Step-Id", "s1")] == forwarded


def test_headers_about_the_engines_own_address_are_not_forwarded():
    """Addresses, cookies and credentials, and permissions of web pages; what describes the response is."""
    dropped = [
        "Location", "Content-Location", "Refresh", "Link", "Alt-Svc", "Via", "X-Served-By", "X-Accel-Redirect", "Set-Cookie",
        "WWW-Authenticate", "Access-Control-Allow-Origin", "access-control-allow-credentials", "Access-Control-Expose-Headers",
        "Timing-Allow-Origin", "Content-Security-Policy", "Content-Security-Policy-Report-Only", "Cross-Origin-Resource-Policy",
        "Strict-Transport-Security", "Clear-Site-Data", "Service-Worker-Allowed", "Report-To", "NEL", "SourceMap",
    ]  # fmt: skip
    kept = {
        "Content-Type": "text/event-stream", "Server": "uvicorn", "Retry-After": "7", "X-Should-Retry": "false",
        "X-Request-Id": "1", "request-id": "2", "X-RateLimit-Remaining": "3", "X-Accel-Buffering": "no",
    }  # fmt: skip

    assert list(kept.items()) == headers.downstream(dict.fromkeys(dropped, "x") | kept, rollout_id=None, step_id=None)
