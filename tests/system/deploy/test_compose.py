"""deploy/compose.yaml conforms to the Compose specification and to the files that it mounts."""

import re

import pytest
import yaml

from proxy.config.settings import Settings
from storage.embedded.server import bundled_server
from storage.errors import StorageError

from .conftest import DEPLOY
from .stores import store_warnings, valkey

PARSE = "import sys; from compose_spec import PyCompose; PyCompose.from_yaml(sys.stdin.read()).to_spec()"
STORED_AFTER_S = 30  # what a proxy may need to store the steps of aborted calls


def seconds(text):
    return int(re.fullmatch(r"(\d+)s", text)[1])


def expand_anchors(text):
    """Expand YAML's anchors, which the checker does not do."""
    return yaml.safe_dump(yaml.safe_load(text))


@pytest.fixture
def replica(services, monkeypatch):
    """Return the settings of a replica from its environment."""
    for name, value in services["proxy"]["environment"].items():
        monkeypatch.setenv(name, value)
    return Settings()


def test_it_conforms_to_the_specification(checker, compose_text):
    """With every variable of env.example substituted, there is no unknown field and no value of a wrong type."""
    assert checker(PARSE, stdin=expand_anchors(compose_text)) == (0, "")


def test_an_unknown_field_is_found(checker, compose_text):
    """The check can fail."""
    code, output = checker(PARSE, stdin=expand_anchors(compose_text).replace("restart:", "restrat:", 1))

    assert code != 0
    assert "restrat" in output


def test_the_replicas_environment_is_valid_settings(replica, services):
    """The variables configure keys, an engine, and a store that writes each step to disk."""
    assert replica.agents.api_keys
    assert replica.control.api_keys
    assert [endpoint.url for endpoint in replica.engines.endpoints] == ["http://simulator:8000"]
    assert replica.store.durability == "fsync"
    named = {name for name in services["proxy"]["environment"] if name.startswith("TOKENTAPE_")}
    assert set(services["proxy"]["environment"]) == named


def test_calls_have_time_to_finish(replica, services):
    """Docker waits longer than the replicas wait for calls in flight, and than the balancers wait for theirs."""
    balancer = (DEPLOY / "haproxy" / "haproxy.cfg").read_text()
    hard_stop = seconds(re.search(r'hard-stop-after "\$\{HARD_STOP-(\w+)\}"', balancer)[1])

    stops_within = replica.shutdown_delay_s + replica.drain_timeout_s + STORED_AFTER_S
    assert seconds(services["proxy"]["stop_grace_period"]) >= stops_within
    for name in ("models", "control"):
        assert seconds(services[name]["stop_grace_period"]) > hard_stop >= stops_within


def test_only_the_model_api_is_reachable_by_others(services):
    """Every other port is bound to this machine, and the agents' network contains only the model API's balancer."""
    ports = {name: service.get("ports", []) for name, service in services.items()}

    assert ports.pop("models") == ["8400:8400"]
    assert all(port.startswith("127.0.0.1:") for all_of_one in ports.values() for port in all_of_one)
    assert [name for name, service in services.items() if "agents" in service["networks"]] == ["models"]


def test_our_containers_have_few_rights(services):
    """No capabilities, no new privileges, and nothing writable but /tmp and mounts."""
    for name in ("models", "control", "proxy", "simulator"):
        assert services[name]["cap_drop"] == ["ALL"], name
        assert services[name]["security_opt"] == ["no-new-privileges:true"], name
        assert services[name]["read_only"] is True, name


def test_mounted_files_exist(services):
    """Every path of this folder that a service mounts exists in the tree."""
    mounted = [mount.split(":")[0] for service in services.values() for mount in service.get("volumes", [])]
    missing = [path for path in mounted if path.startswith("./") and not (DEPLOY / path).exists()]

    assert missing == []


def test_prometheus_scrapes_each_replica_with_a_control_key(compose_text, services):
    """By the service's name, at the control port, with the key that compose mounts as a file."""
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    (job,) = [job for job in scraped if job["job_name"] == "tokentape"]
    (secret,) = services["prometheus"]["secrets"]

    assert job["dns_sd_configs"][0]["names"] == ["proxy"]
    assert services["proxy"]["deploy"]["replicas"] > 1
    assert job["dns_sd_configs"][0]["port"] == 8401
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    assert yaml.safe_load(compose_text)["secrets"][secret] == {"environment": "CONTROL_KEY"}


async def test_the_store_accepts_the_configuration_and_writes_to_disk(compose_text, replica, tmp_path):
    """A real valkey-server with this file requires the password, and provides the durability `fsync`."""
    configuration = yaml.safe_load(compose_text)["configs"]["valkey.conf"]["content"]
    where = f"unix:{tmp_path}/v.sock"
    config = tmp_path / "valkey.conf"
    config.write_text(f"{configuration.replace('/data', str(tmp_path))}\nport 0\nunixsocket {tmp_path}/v.sock\n")
    with valkey([str(bundled_server()), str(config)]):
        facts = await store_warnings(where, replica.store.password.get_secret_value())
        with pytest.raises(StorageError, match="(?i)auth|password"):
            await store_warnings(where, None)

    assert "warnings" not in facts
    assert "appendfsync always" in configuration
