"""The settings: a file, then the environment, then what was said."""

import pytest
from pydantic import ValidationError

from proxy.config.sections import EndpointSettings
from proxy.config.settings import load


def test_the_environment_wins_over_the_file_and_what_was_said_over_both(tmp_path, monkeypatch):
    """Setting by setting: sections are merged."""
    file = tmp_path / "c.yaml"
    file.write_text("store: {prefix: file, ttl_s: 5, timeout_s: 3}\nlisten: 127.0.0.1:1\n")
    monkeypatch.setenv("TOKENTAPE_STORE__PREFIX", "environment")
    monkeypatch.setenv("TOKENTAPE_STORE__PASSWORD", "secret")
    monkeypatch.setenv("TOKENTAPE_AGENTS__API_KEYS", '["k"]')
    settings = load(file, listen="127.0.0.1:2", store={"timeout_s": 4})

    store = settings.store
    assert ("environment", 5, 4, "127.0.0.1:2") == (store.prefix, store.ttl_s, store.timeout_s, settings.listen)
    assert "secret" == store.password.get_secret_value()
    assert "secret" not in repr(settings)


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"listn": "x"}, "listn"),
        ({"store": {"urll": "x"}}, "urll"),
        ({"engines": {"endpoints": [{"url": "ftp://x"}]}}, "ftp"),
        ({"engines": {"endpoints": [{"url": "http://user:pw@host"}]}}, "api_key"),
        ({"listen": "nowhere"}, "HOST:PORT"),
        ({"agents": {"api_keys": [""]}}, "not empty"),
        ({"control": {"api_keys": ["good", " "]}}, "not empty"),
        ({"control": {"api_keys": ["schlüssel"]}}, "printable ASCII"),
        ({"listen": "0.0.0.0:80"}, "agents.api_keys"),
        ({"listen": "0.0.0.0:80", "agents": {"api_keys": ["k"]}}, "control.api_keys"),
        ({"control": {"listen": ":80"}}, "control.api_keys"),
    ],
)
def test_what_is_not_valid_is_named(said, named):
    """A misspelt setting is not a silent one, and nobody is open to the world by accident."""
    with pytest.raises(ValidationError, match=named):
        load(**said)


def test_beyond_loopback_keys_or_a_clear_word_are_needed():
    """--insecure says so."""
    keys = {"api_keys": ["k"]}

    assert load(listen="0.0.0.0:80", agents=keys, control=keys)
    assert load(listen="0.0.0.0:80", insecure=True)


def test_a_misspelt_setting_in_a_file_or_a_section_of_the_environment_is_named(tmp_path, monkeypatch):
    """As it is when it was said."""
    file = tmp_path / "c.yaml"
    file.write_text("stor: {prefix: x}\n")
    with pytest.raises(ValidationError, match="stor"):
        load(file)
    monkeypatch.setenv("TOKENTAPE_STORE__PREFX", "x")
    with pytest.raises(ValidationError, match="prefx"):
        load()


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    """A file that was named is meant."""
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.yaml")


def test_an_engines_url_may_end_in_v1():
    """People paste base URLs; the name defaults to host and port."""
    endpoint = EndpointSettings(url="http://host:8000/v1/")

    assert ("http://host:8000", "host:8000") == (endpoint.url, endpoint.label)


def test_an_engines_url_is_refused_without_repeating_its_password():
    """The refusal ends up in a terminal, or a log."""
    with pytest.raises(ValidationError) as refused:
        EndpointSettings(url="http://me:pw@host")

    assert "pw" not in refused.value.errors()[0]["msg"]


def test_tls_needs_a_certificate_and_its_key():
    """One without the other is refused."""
    for said in ({"cert_file": "c.pem"}, {"key_file": "k.pem"}):
        with pytest.raises(ValidationError, match="both cert_file and key_file"):
            load(listen_tls=said)
