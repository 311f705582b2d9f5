"""Loading of settings by commands."""

import pytest

from proxy.cli.settings import InvalidSettings, load_settings


def test_options_replace_single_settings_of_the_file(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("listen: 127.0.0.1:1\nengines: {max_attempts: 7}\nstore: {url: 'redis://a', prefix: p}\n")
    settings = load_settings(config, engine=["http://e:1/v1"], store="redis://b", listen=None)

    assert (
        settings.listen,
        settings.engines.max_attempts,
        settings.engines.endpoints[0].url,
    ) == ("127.0.0.1:1", 7, "http://e:1")
    assert (settings.store.url, settings.store.prefix) == ("redis://b", "p")


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("lissten: x", {}, "lissten: unknown setting"),
        ("", {"engine": ["nowhere"]}, "engines.endpoints.0.url: invalid URL 'nowhere'"),
        (
            "",
            {"listen": "0.0.0.0:1"},
            "agents.api_keys: 0.0.0.0:1 is not a loopback address, and agents.api_keys is empty",
        ),
        ("listen: [", {}, "config.yaml is not valid YAML: while parsing"),
        ("- listen", {}, "config.yaml is not a mapping of settings"),
    ],
)
def test_an_invalid_setting_is_an_error_with_its_name(tmp_path, text, options, message):
    config = tmp_path / "config.yaml"
    config.write_text(text)
    with pytest.raises(InvalidSettings, match=message):
        load_settings(config, **options)


def test_a_missing_file_is_an_error_with_its_name(tmp_path):
    with pytest.raises(InvalidSettings, match="none.yaml"):
        load_settings(tmp_path / "none.yaml")


def test_the_error_of_invalid_yaml_does_not_quote_the_file(tmp_path):
    """It may be logged, and the file may contain keys."""
    config = tmp_path / "config.yaml"
    config.write_text("control: {api_keys: [hunter2hunter2]\nlisten: 'x\n")
    with pytest.raises(InvalidSettings, match="config.yaml is not valid YAML") as refused:
        load_settings(config)

    assert "hunter2" not in str(refused.value)


def test_the_error_of_a_list_in_the_environment_has_an_example_of_json(monkeypatch):
    """The value is not quoted."""
    monkeypatch.setenv("TOKENTAPE_AGENTS__API_KEYS", "hunter2")
    with pytest.raises(
        InvalidSettings, match=r"""agents.* must be JSON, e.g. TOKENTAPE_AGENTS__API_KEYS='\["a-key"\]'"""
    ) as error:
        load_settings(None)

    assert "hunter2" not in str(error.value)
