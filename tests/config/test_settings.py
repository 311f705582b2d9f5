"""Settings from a file, environment variables and options."""

from typing import get_args

import pytest
from pydantic import ValidationError

from proxy.config.engines import _ROUTER_HEADERS, EndpointSettings, SessionSettings
from proxy.config.sections import ContinuationMode
from proxy.config.settings import load
from proxy.continuation.types import Mode


def test_options_precede_the_environment_which_precedes_the_file(tmp_path, monkeypatch):
    """Sections are merged setting by setting."""
    file = tmp_path / "c.yaml"
    file.write_text("store: {prefix: file, ttl_s: 5, timeout_s: 3}\nlisten: 127.0.0.1:1\n")
    monkeypatch.setenv("TOKENTAPE_STORE__PREFIX", "environment")
    monkeypatch.setenv("TOKENTAPE_STORE__PASSWORD", "secret")
    monkeypatch.setenv("TOKENTAPE_CONTROL__API_KEYS", '["k"]')
    settings = load(file, listen="127.0.0.1:2", store={"timeout_s": 4})

    store = settings.store
    assert (store.prefix, store.ttl_s, store.timeout_s, settings.listen) == ("environment", 5, 4, "127.0.0.1:2")
    assert store.password.get_secret_value() == "secret"
    assert "secret" not in repr(settings)


@pytest.mark.parametrize(
    ("settings", "named"),
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
        ({"agents": {"api_keys": ["k"]}}, "control.api_keys is empty"),
        ({"allowed_hosts": ["http://proxy"]}, "without scheme and port"),
        ({"allowed_hosts": ["proxy:80"]}, "without scheme and port"),
        ({"allowed_hosts": ["*proxy"]}, "without scheme and port"),
        ({"control": {"listen": ":80"}}, "control.api_keys"),
        ({"continuation": {"mode": "exact"}}, "'off', 'faithful' or 'append'"),
        ({"continuation": {"mode": True}}, "'off', 'faithful' or 'append'"),
        ({"continuation": {"mode": 0}}, "'off', 'faithful' or 'append'"),
        ({"continuation": {"timeout_s": 0}}, "timeout_s"),
        ({"agents": {"rollout_cache_bytes": -1}}, "rollout_cache_bytes"),
    ],
)
def test_an_invalid_setting_is_named(settings, named):
    """This includes misspelt names, and listening beyond loopback without keys."""
    with pytest.raises(ValidationError, match=named):
        load(**settings)


def test_listening_beyond_loopback_requires_keys_or_insecure():
    keys = {"api_keys": ["k"]}

    assert load(listen="0.0.0.0:80", agents=keys, control=keys)
    assert load(listen="0.0.0.0:80", insecure=True)


def test_keys_of_agents_require_control_keys_unless_the_control_api_has_its_own_address():
    """An agent could omit its key. Open calls beside control keys are allowed."""
    keys = {"api_keys": ["k"]}
    with pytest.raises(ValidationError, match="an agent that omits its key could set its reward"):
        load(agents=keys)

    assert load(control=keys)
    assert load(agents=keys, control=keys)
    assert load(agents=keys, insecure=True)
    assert load(agents=keys, control={"listen": "127.0.0.1:1"})


def test_allowed_hosts_are_names_in_lower_case():
    assert load(allowed_hosts=["Proxy.", "*.rl.svc", "*", "a_b-c"]).allowed_hosts == ["proxy", "*.rl.svc", "*", "a_b-c"]


def test_a_misspelt_setting_in_a_file_or_the_environment_is_named(tmp_path, monkeypatch):
    file = tmp_path / "c.yaml"
    file.write_text("stor: {prefix: x}\n")
    with pytest.raises(ValidationError, match="stor"):
        load(file)
    monkeypatch.setenv("TOKENTAPE_STORE__PREFX", "x")
    with pytest.raises(ValidationError, match="prefx"):
        load()


def test_a_missing_configuration_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.yaml")


def test_an_engines_url_may_end_in_v1():
    """The name defaults to host and port."""
    endpoint = EndpointSettings(url="http://host:8000/v1/")

    assert (endpoint.url, endpoint.label) == ("http://host:8000", "host:8000")


def test_the_error_of_an_engine_url_with_credentials_does_not_contain_the_password():
    with pytest.raises(ValidationError) as refused:
        EndpointSettings(url="http://me:pw@host")

    assert "pw" not in refused.value.errors()[0]["msg"]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"headers": {"Content-Length": "3"}}, "Content-Length is set for each request"),
        ({"headers": {"X Y": "3"}}, "invalid header name"),
        ({"headers": {"X-Y": "planted\r\n"}}, "invalid header value"),
        ({"headers": {"authorization": "planted"}, "api_key": "k"}, "set only one of them"),
        ({"session": {}}, "one of router, header and field"),
        ({"session": {"router": "llm-d", "header": "X-Y"}}, "one of router, header and field"),
        ({"session": {"field": "a.b.c"}}, "should match pattern"),
    ],
)
def test_invalid_headers_and_sessions_of_an_engine_are_rejected(fields, error):
    """The error does not contain a value, which may be secret."""
    with pytest.raises(ValidationError, match=error) as refused:
        EndpointSettings(url="http://host", **fields)

    assert "planted" not in refused.value.errors()[0]["msg"]


def test_a_router_determines_the_header_of_sessions():
    names = {router: SessionSettings(router=router).header_name for router in _ROUTER_HEADERS}

    assert names["sgl-router"] == "X-SMG-Routing-Key"
    assert all(names.values())
    assert (SessionSettings(header="X-Y").header_name, SessionSettings(field="user").header_name) == ("X-Y", None)


def test_tls_requires_a_certificate_and_its_key():
    for settings in ({"cert_file": "c.pem"}, {"key_file": "k.pem"}):
        with pytest.raises(ValidationError, match="both cert_file and key_file"):
            load(listen_tls=settings)


@pytest.mark.parametrize("mode", ["off", "Off", "no", "false", '"off"'])
def test_the_continuation_mode_off_of_a_yaml_file_may_be_a_boolean(tmp_path, mode):
    """YAML 1.1 reads `off` without quotes as false."""
    file = tmp_path / "c.yaml"
    file.write_text(f"continuation: {{mode: {mode}, timeout_s: 2}}\n")

    assert (load(file).continuation.mode, load(file).continuation.timeout_s) == ("off", 2)


def test_the_continuation_is_faithful_by_default_and_set_by_environment_variables(monkeypatch):
    assert tuple(load().continuation.model_dump().values()) == ("faithful", 60)

    monkeypatch.setenv("TOKENTAPE_CONTINUATION__MODE", "append")
    monkeypatch.setenv("TOKENTAPE_CONTINUATION__TIMEOUT_S", "0.5")
    assert tuple(load().continuation.model_dump().values()) == ("append", 0.5)

    monkeypatch.setenv("TOKENTAPE_CONTINUATION__MODE", "off")
    assert load().continuation.mode == "off"


def test_the_settings_have_the_modes_of_the_continuation():
    """The settings import no other layer, so the modes are listed twice."""
    assert get_args(Mode) == get_args(get_args(ContinuationMode)[0])


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (None, "http/protobuf")),
        ({"EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, ("http://c:4318/v1/traces", "http/protobuf")),
        ({"EXPORTER_OTLP_ENDPOINT": "http://c/x/"}, ("http://c/x/v1/traces", "http/protobuf")),
        (
            {"EXPORTER_OTLP_TRACES_ENDPOINT": "http://c/in", "EXPORTER_OTLP_ENDPOINT": "http://d"},
            ("http://c/in", "http/protobuf"),
        ),
        ({"EXPORTER_OTLP_ENDPOINT": "http://c:4317", "EXPORTER_OTLP_PROTOCOL": "grpc"}, ("http://c:4317", "grpc")),
        ({"EXPORTER_OTLP_ENDPOINT": "http://c", "SDK_DISABLED": "true"}, (None, "http/protobuf")),
        ({"EXPORTER_OTLP_ENDPOINT": "http://c", "TRACES_EXPORTER": "none"}, (None, "http/protobuf")),
    ],
)
def test_traces_are_enabled_by_the_standard_variables_of_opentelemetry(variables, expected, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(f"OTEL_{name}", value)
    settings = load()

    assert (settings.tracing.endpoint, settings.tracing.protocol) == expected
    assert settings == load(**settings.to_json())  # as in a worker


def test_the_file_precedes_the_standard_variables_of_opentelemetry(tmp_path, monkeypatch):
    file = tmp_path / "c.yaml"
    file.write_text("tracing: {endpoint: http://file:4318}\n")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c")
    monkeypatch.setenv("TOKENTAPE_TRACING__CONTENT", "true")

    assert (load(file).tracing.endpoint, load(file).tracing.content) == ("http://file:4318", True)


@pytest.mark.parametrize(
    ("endpoint", "named"),
    [("collector:4317", "http://127.0.0.1:4318"), ("http://u:secret@c", "OTEL_EXPORTER_OTLP_HEADERS")],
)
def test_an_invalid_collector_is_refused_without_its_credentials(endpoint, named):
    with pytest.raises(ValidationError, match=named) as caught:
        load(tracing={"endpoint": endpoint})

    assert "secret" not in str(caught.value.errors()[0]["msg"])
