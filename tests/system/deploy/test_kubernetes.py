"""deploy/kubernetes, built by kustomize, conforms to the API's schemas, the settings and the metrics."""

import json
import re
import subprocess

import pytest
import yaml
from pydantic import ValidationError
from tests.support.fakes import settings_for

from proxy.config.settings import load
from proxy.server.listener import running
from storage.embedded.server import bundled_server
from storage.errors import StorageError

from .conftest import DEPLOY
from .environment import program
from .stores import store_warnings, valkey

FOLDER = DEPLOY / "kubernetes"
VERSIONS = ("1.30", "1.37")  # the oldest and the newest API that the manifests are checked against
OF_THE_API = """
import sys, yaml, kubernetes_validate
for one in yaml.safe_load_all(sys.stdin):
    kubernetes_validate.validate(one, sys.argv[1], strict=True)
"""
# These models ignore unknown fields: the output shows which were read.
OF_THE_OPERATOR = """
import sys, yaml
from cloudcoil.models.prometheus_operator import v1
for one in yaml.safe_load_all(sys.stdin):
    model = getattr(v1, one["kind"]).model_validate(one)
    again = model.model_dump(by_alias=True, exclude_unset=True, mode="json")
    assert one == again, f"{one['kind']}: {one} is read as {again}"
"""


def built(folder):
    """Return kustomize's output for a folder."""
    command = [program("kubectl"), "kustomize", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.fixture(scope="module")
def objects():
    """The objects of the kustomization, by kind and name."""
    return {
        (document["kind"], document["metadata"]["name"]): document for document in yaml.safe_load_all(built(FOLDER))
    }


@pytest.fixture(scope="module")
def secret():
    """The Secret, made from the example with keys instead of the placeholders in « »."""
    text = (FOLDER / "secret.example.yaml").read_text()
    return yaml.safe_load(re.sub(r"«(.*?)»", lambda found: found[1].replace(" ", "-"), text))["stringData"]


@pytest.fixture(scope="module")
def pod(objects):
    return objects["Deployment", "tokentape"]["spec"]["template"]


@pytest.fixture
def settings(pod, secret, monkeypatch):
    """The settings of a replica: its file, and the variables from the Secret."""
    (container,) = pod["spec"]["containers"]
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], secret[variable["valueFrom"]["secretKeyRef"]["key"]])
    return load(FOLDER / "config.yaml", listen="0.0.0.0:8400")


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_conforms_to_the_api(checker, version):
    """The kustomizations and the examples, strictly: no unknown field, no wrong value."""
    files = [(FOLDER / f"{name}.example.yaml").read_text() for name in ("secret", "agents-namespace")]
    text = "---\n".join([built(FOLDER), built(FOLDER / "valkey"), *files])

    assert checker(OF_THE_API, version, stdin=text) == (0, "")


def test_an_unknown_field_is_found(checker):
    """The check can fail."""
    code, output = checker(OF_THE_API, VERSIONS[-1], stdin=built(FOLDER).replace("minReplicas", "leastReplicas"))

    assert code != 0
    assert "leastReplicas" in output


def test_the_monitoring_objects_conform_to_the_operators_types(checker):
    """ServiceMonitor and PrometheusRule have no unknown field."""
    text = built(FOLDER / "monitoring")

    assert sorted(document["kind"] for document in yaml.safe_load_all(text)) == ["PrometheusRule", "ServiceMonitor"]
    assert checker(OF_THE_OPERATOR, stdin=text) == (0, "")
    assert checker(OF_THE_OPERATOR, stdin=text.replace("jobLabel", "jobName"))[0] != 0


def test_the_rules_equal_the_rules_of_prometheus():
    """There is one source: the PrometheusRule has the groups of deploy/prometheus/rules.yml."""
    documents = yaml.safe_load_all(built(FOLDER / "monitoring"))
    (rule,) = [document for document in documents if document["kind"] == "PrometheusRule"]

    assert yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text()) == rule["spec"]


def test_the_configuration_is_valid_settings(settings):
    """The file and the Secret's variables configure keys for both APIs, an engine, and a durable store."""
    assert settings.agents.api_keys
    assert len(settings.control.api_keys) == 2
    assert settings.engines.endpoints
    assert settings.store.durability == "fsync"
    assert settings.store.password


def test_the_example_secret_is_rejected():
    """Its values are public: a proxy starts only with other keys."""
    values = yaml.safe_load((FOLDER / "secret.example.yaml").read_text())["stringData"]
    for section in ("agents", "control"):
        with pytest.raises(ValidationError, match="invalid API key: it must be printable ASCII"):
            load(**{section: {"api_keys": json.loads(values[f"{section}-keys"])}})


def test_prometheus_has_one_of_the_control_keys(secret, settings):
    """The ServiceMonitor's key is in the Secret and is accepted by the control API."""
    monitor = yaml.safe_load((FOLDER / "monitoring" / "servicemonitor.yaml").read_text())
    (endpoint,) = monitor["spec"]["endpoints"]
    key = secret[endpoint["authorization"]["credentials"]["key"]]

    assert key in {secret_key.get_secret_value() for secret_key in settings.control.api_keys}


def test_calls_have_time_to_finish(pod, settings):
    """A pod accepts calls while they are routed to it, and is killed after drain_timeout_s and 30 s to store the rest."""
    assert settings.shutdown_delay_s >= 5
    assert pod["spec"]["terminationGracePeriodSeconds"] >= settings.shutdown_delay_s + settings.drain_timeout_s + 30


def test_a_pod_is_not_root_and_writes_only_to_its_volumes(pod):
    """As Kubernetes' restricted profile requires, and with the user and group of the image."""
    (container,) = pod["spec"]["containers"]
    image = (DEPLOY / "Dockerfile").read_text()
    own = pod["spec"]["securityContext"]

    assert f"USER {own['runAsUser']}:{own['runAsGroup']}" in image
    assert own["runAsNonRoot"] is True
    assert own["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}
    }  # fmt: skip
    assert {"/tmp", "/data"} <= {mount["mountPath"] for mount in container["volumeMounts"]}


def test_every_selector_matches_the_pod(objects, pod):
    """Services, the disruption budget and the network policy select the pods of the Deployment."""
    labels = pod["metadata"]["labels"].items()
    selectors = [
        *(document["spec"]["selector"] for (kind, _), document in objects.items() if kind == "Service"),
        objects["PodDisruptionBudget", "tokentape"]["spec"]["selector"]["matchLabels"],
        objects["NetworkPolicy", "tokentape"]["spec"]["podSelector"]["matchLabels"],
        objects["Deployment", "tokentape"]["spec"]["selector"]["matchLabels"],
    ]

    assert len(selectors) == 5
    assert all(selector.items() <= labels for selector in selectors)


def test_agents_reach_only_the_model_api(objects):
    """By the label of their namespace; trainers reach both APIs, monitoring the control API."""
    allowed = {}
    for rule in objects["NetworkPolicy", "tokentape"]["spec"]["ingress"]:
        for source in rule["from"]:
            role = source["namespaceSelector"]["matchLabels"]["tokentape/role"]
            allowed.setdefault(role, set()).update(port["port"] for port in rule["ports"])

    assert allowed == {"agents": {"models"}, "trainers": {"models", "control"}, "monitoring": {"control"}}


def test_each_service_has_one_api(objects, pod):
    """Their ports are the container's, by name."""
    (container,) = pod["spec"]["containers"]
    named = {port["name"]: port["containerPort"] for port in container["ports"]}
    apis = {
        port["targetPort"]: port["port"]
        for (kind, _), document in objects.items()
        if kind == "Service"
        for port in document["spec"]["ports"]
    }

    assert named == apis == {"models": 8400, "control": 8401}


async def test_the_metric_of_the_autoscaler_is_exported(objects, store, http):
    """It is in a real /metrics, and prometheus-adapter uses it by that name."""
    (metric,) = objects["HorizontalPodAutoscaler", "tokentape"]["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"]
    (rule,) = yaml.safe_load((FOLDER / "monitoring" / "prometheus-adapter-values.yaml").read_text())["rules"]["custom"]
    async with running(settings_for(None), store) as served, http.get(f"{served.url}/metrics") as response:
        lines = (await response.text()).splitlines()

    assert any(line.startswith(f"{name} ") for line in lines)
    assert name == rule["name"]["as"]
    assert rule["seriesQuery"].startswith(f"{name}{{")


async def test_the_probes_need_no_key(pod, store, http):
    """/health and /ready, on the control port, while every other route requires a key. Ready needs no engine."""
    (container,) = pod["spec"]["containers"]
    probes = [container[f"{name}Probe"]["httpGet"] for name in ("liveness", "readiness", "startup")]
    keys = {"agents": {"api_keys": ["a"]}, "control": {"api_keys": ["c"], "listen": "127.0.0.1:0"}}
    statuses = {}
    async with running(settings_for(None, **keys), store) as served:
        for path in {probe["path"] for probe in probes} | {"/metrics"}:
            async with http.get(f"{served.control_url}{path}") as response:
                statuses[path] = response.status

    assert {probe["port"] for probe in probes} == {"control"}
    assert statuses == {"/health": 200, "/ready": 200, "/metrics": 401}


async def test_the_store_writes_to_disk_and_keeps_its_password_off_its_command_line(tmp_path):
    """As its container starts it: any program of the node can read command lines."""
    (stateful,) = [
        document for document in yaml.safe_load_all(built(FOLDER / "valkey")) if document["kind"] == "StatefulSet"
    ]
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    (script,) = container["args"]
    own = f"{bundled_server()} - --port 0 --unixsocket {tmp_path}/v.sock"
    script = script.replace("valkey-server -", own).replace("/data", str(tmp_path))
    with valkey([*container["command"], script], STORE_PASSWORD="of $HOME's own") as command:
        facts = await store_warnings(f"unix:{tmp_path}/v.sock", "of $HOME's own")
        with pytest.raises(StorageError, match="(?i)auth|password"):
            await store_warnings(f"unix:{tmp_path}/v.sock", None)

    assert "warnings" not in facts
    assert b"valkey-server" in command
    assert b"own" not in command
    assert "--appendfsync always" in script
