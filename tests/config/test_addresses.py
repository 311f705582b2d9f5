"""Parsing of addresses and URLs, and hiding their secrets."""

import pytest

from proxy.config.addresses import base_url, is_loopback, split_listen, without_secrets


@pytest.mark.parametrize(
    ("listen", "expected"), [("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:80", ("::1", 80)), (":80", ("0.0.0.0", 80))]
)
def test_a_listen_address_is_host_and_port(listen, expected):
    """IPv6 addresses are in brackets; without a host it is every address."""
    assert split_listen(listen) == expected
    assert is_loopback(expected[0]) is (expected[0] != "0.0.0.0")


@pytest.mark.parametrize(
    ("host", "expected"), [("localhost", True), ("127.9.9.9", True), ("127.example.org", False), ("10.0.0.1", False)]
)
def test_loopback_is_recognised_by_address_not_by_prefix(host, expected):
    """A host name may resolve to any address."""
    assert expected is is_loopback(host)


@pytest.mark.parametrize("secret", ["me:pw", "me:p@w", "me:p/w", ":p//w@"])
def test_user_and_password_of_a_url_are_hidden(secret):
    assert without_secrets(f"redis://{secret}@host/0") == "redis://…@host/0"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h", "http://h"),
        ("https://h.example.:1/v1/", "https://h.example.:1"),
        ("http://[::1]:2/a/", "http://[::1]:2/a"),
    ],
)
def test_a_trailing_v1_and_slashes_are_removed_from_a_base_url(url, expected):
    assert base_url(url) == expected


@pytest.mark.parametrize("url", [
    "", "h:1", "ftp://h", "file:///h", "http://", "http://.", "http://a..b", "http://*", "http://a b", "http://h/a b", "http://h%31",
    "http://h:x", "http://h:-1", "http://h:0", "http://h:65536", "http://h/\r\nX: y", "http://h\n", "http://h/é", "http://é",
    f"http://{'h' * 64}", "http://[::1", "http://[x]", "http://me:pw@h", "ftp://me:pw@h", "http://h?q", "http://h#f",
])  # fmt: skip
def test_an_invalid_engine_url_is_rejected_without_its_password(url):
    with pytest.raises(ValueError, match=".") as caught:
        base_url(url)
    assert "pw" not in str(caught.value)
