"""The headers of responses to clients."""

import pytest

from proxy.api.requests import downstream


@pytest.mark.parametrize("value", ["a\rb", "a\nb", "a\x00b", "\x1b[31m", "a\x7f"])
def test_header_values_with_control_characters_are_dropped(value):
    """The rest of the response is forwarded; tabs and non-ASCII characters are allowed."""
    forwarded = downstream([("X-Odd", value), ("X-Tab", "a\tb"), ("X-Other", "ü\udcff")])

    assert forwarded == [("X-Tab", "a\tb"), ("X-Other", "ü\udcff")]


@pytest.mark.parametrize("connection", ["keep-alive", "close, X-Private", "X-Private"])
def test_the_engines_headers_are_forwarded(connection):
    """Without framing headers, and without headers in which the engine poses as TokenTape."""
    private = [("X-Private", "1")] if connection == "keep-alive" else []
    forwarded = downstream(
        [
            ("Content-Type", "x"),
            ("Content-Length", "3"),
            ("X-Private", "1"),
            ("Connection", connection),
            ("Retry-After", "7"),
            ("X-Rollout-Id", "forged"),
            ("X-Step-Id", "forged"),
        ]
    )

    assert forwarded == [("Content-Type", "x"), *private, ("Retry-After", "7")]


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

    assert list(kept.items()) == downstream((dict.fromkeys(dropped, "x") | kept).items())
