"""Which headers pass, in each direction."""

import pytest

from proxy.upstream import headers


@pytest.mark.parametrize("value", ["a\rb", "a\nb", "a\x00b", "\x1b[31m", "a\x7f"])
def test_what_cannot_be_written_does_not_pass(value):
    """A control character in a header of an engine must not cost its answer; a tab and other letters may pass."""
    shown = headers.downstream({"X-Odd": value, "X-Tab": "a\tb", "X-Other": "ü\udcff"}, rollout_id=None, step_id=None)

    assert [("X-Tab", "a\tb"), ("X-Other", "ü\udcff")] == shown


def test_what_is_of_one_connection_or_secret_does_not_go_upstream():
    """Trace headers and the client's own do; the engine's key is added."""
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
            ("Content-Type", "application/json"),
            ("X-Request-Id", "t"),
        ],
        api_key="engine",
    )

    assert [
        ("Content-Type", "application/json"),
        ("X-Request-Id", "t"),
        ("Accept-Encoding", "identity"),
        ("Authorization", "Bearer engine"),
    ] == sent


def test_the_engines_headers_come_back_with_our_names():
    """Framing aside; an engine cannot speak for us."""
    shown = headers.downstream(
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

    assert [("Content-Type", "x"), ("Retry-After", "7"), ("X-Rollout-Id", "r1"), ("X-Step-Id", "s1")] == shown
