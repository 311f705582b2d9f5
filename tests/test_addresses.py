"""Addresses: where to listen, and what may be printed."""

import pytest

from proxy.addresses import is_loopback, split_listen, without_secrets


@pytest.mark.parametrize(
    ("listen", "expected"), [("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:80", ("::1", 80)), (":80", ("0.0.0.0", 80))]
)
def test_an_address_is_host_and_port(listen, expected):
    """IPv6 in brackets; no host is every address."""
    assert expected == split_listen(listen)
    assert is_loopback(expected[0]) is (expected[0] != "0.0.0.0")


@pytest.mark.parametrize(
    ("host", "expected"), [("localhost", True), ("127.9.9.9", True), ("127.example.org", False), ("10.0.0.1", False)]
)
def test_loopback_is_an_address_and_no_prefix(host, expected):
    """A name may resolve to anything."""
    assert expected is is_loopback(host)


@pytest.mark.parametrize("secret", ["me:pw", "me:p@w", "me:p/w", ":p//w@"])
def test_secrets_in_urls_are_not_printed(secret):
    """Neither user nor password."""
    assert "redis://…@host/0" == without_secrets(f"redis://{secret}@host/0")
