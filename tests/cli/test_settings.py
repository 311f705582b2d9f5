"""The settings as a command gets them."""

import pytest

from proxy.cli.settings import InvalidSettings, load_settings


def test_the_command_line_wins_over_the_file_and_leaves_the_rest(tmp_path):
    """Engines and the store's URL are taken over, what else is set of them stays."""
    config = tmp_path / "config.yaml"
    config.write_text("listen: 127.0.0.1:1\nengines: {max_attempts: 7}\nstore: {url: 'redis://a', prefix: p}\n")
    settings = load_settings(config, engine=["http://e:1/v1"], store="redis://b", listen=None)

    assert ("127.0.0.1:1", 7, "http://e:1") == (
        settings.listen,
        settings.engines.max_attempts,
        settings.engines.endpoints[0].url,
    )
    assert ("redis://b", "p") == (settings.store.url, settings.store.prefix)


@pytest.mark.parametrize(
    ("text", "said", "told"),
    [
        ("lissten: x", {}, "lissten: unknown setting"),
        ("", {"engine": ["nowhere"]}, "endpoints.0.url: invalid URL 'nowhere'"),
        (
            "",
            {"listen": "0.0.0.0:1"},
            "settings: 0.0.0.0:1 is not a loopback address, and agents.api_keys is empty",
        ),
        ("listen: [", {}, "config.yaml is not valid YAML: while parsing"),
        ("- listen", {}, "config.yaml is not a mapping of settings"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, said, told):
    """Each fault by the setting's name."""
    config = tmp_path / "config.yaml"
    config.write_text(text)
    with pytest.raises(InvalidSettings, match=told):
        load_settings(config, **said)


def test_a_file_that_is_not_there_is_told(tmp_path):
    """By its name."""
    with pytest.raises(InvalidSettings, match="none.yaml"):
        load_settings(tmp_path / "none.yaml")


def test_a_key_in_a_file_that_is_no_yaml_is_not_told(tmp_path):
    """The place is, and not what stands there: it goes into a log."""
    config = tmp_path / "config.yaml"
    config.write_text("control: {api_keys: [hunter2hunter2]\nlisten: 'x\n")
    with pytest.raises(InvalidSettings, match="config.yaml is not valid YAML") as refused:
        load_settings(config)

    assert "hunter2" not in str(refused.value)


def test_a_list_in_the_environment_that_is_no_json_is_told_with_one_that_is(monkeypatch):
    """Keys are what people set there, and write as they are."""
    monkeypatch.setenv("TOKENTAPE_AGENTS__API_KEYS", "hunter2")
    with pytest.raises(
        InvalidSettings, match=r"""agents.* must be JSON, e.g. TOKENTAPE_AGENTS__API_KEYS='\["a-key"\]'"""
    ) as told:
        load_settings(None)

    assert "hunter2" not in str(told.value)
