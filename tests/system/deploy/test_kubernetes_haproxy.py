"""deploy/kubernetes-haproxy, built by kustomize: its schemas and selectors, and its HAProxy with more than 16 replicas."""

import asyncio
import os
from contextlib import AsyncExitStack

import aiohttp
import pytest
import yaml
from aiohttp import web

from .balancing import CONFIGURATION, Names, own_addresses
from .conftest import DEPLOY
from .environment import program
from .test_kubernetes import OF_THE_API, VERSIONS, built

FOLDER = DEPLOY / "kubernetes-haproxy"
REPLICAS = 40  # their addresses take more than a DNS message of 512 bytes


@pytest.fixture(scope="module")
def objects():
    """The objects of the kustomization, by kind and name."""
    return {
        (document["kind"], document["metadata"]["name"]): document for document in yaml.safe_load_all(built(FOLDER))
    }


@pytest.fixture(scope="module")
def containers(objects):
    """HAProxy's containers, by name."""
    pod = objects["Deployment", "tokentape-haproxy"]["spec"]["template"]
    return {container["name"]: container for container in pod["spec"]["containers"]}


def variables_of(container):
    return {variable["name"]: variable["value"] for variable in container["env"]}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_conforms_to_the_api(checker, version):
    """Strictly: no unknown field, no wrong value."""
    assert checker(OF_THE_API, version, stdin=built(FOLDER)) == (0, "")


def test_agents_and_trainers_reach_the_replicas_through_haproxy(objects):
    """The Services of both APIs lead to HAProxy, and it alone reaches both ports of the replicas."""
    balancers = objects["Deployment", "tokentape-haproxy"]["spec"]["template"]["metadata"]["labels"]
    replicas = objects["Deployment", "tokentape"]["spec"]["template"]["metadata"]["labels"]
    allowed = objects["NetworkPolicy", "tokentape"]["spec"]["ingress"]

    for name in ("tokentape", "tokentape-control"):
        assert balancers == objects["Service", name]["spec"]["selector"]
    assert replicas == objects["Service", "tokentape-replicas"]["spec"]["selector"]
    assert balancers == objects["NetworkPolicy", "tokentape-haproxy"]["spec"]["podSelector"]["matchLabels"]
    assert balancers == objects["PodDisruptionBudget", "tokentape-haproxy"]["spec"]["selector"]["matchLabels"]
    assert [source["podSelector"] for source in allowed[0]["from"]] == [{"matchLabels": balancers}]
    assert [port["port"] for port in allowed[0]["ports"]] == ["models", "control"]
    assert [s["namespaceSelector"]["matchLabels"] for s in allowed[1]["from"]] == [{"tokentape/role": "monitoring"}]


def test_prometheus_scrapes_the_replicas(objects):
    """By labels of their Service, which HAProxy's do not have."""
    documents = yaml.safe_load_all(built(DEPLOY / "kubernetes" / "monitoring"))
    (monitor,) = [document for document in documents if document["kind"] == "ServiceMonitor"]
    labels = monitor["spec"]["selector"]["matchLabels"].items()
    scraped = [
        name for (kind, name), it in objects.items() if kind == "Service" and labels <= it["metadata"]["labels"].items()
    ]

    assert scraped == ["tokentape-replicas"]


def test_haproxy_finds_every_replica_of_the_autoscaler(objects, containers):
    """Also by the names that it resolves; and it waits as long for calls in flight as a replica does."""
    settings = yaml.safe_load((DEPLOY / "kubernetes" / "config.yaml").read_text())
    grace = objects["Deployment", "tokentape-haproxy"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    for name, port in (("models", "8400"), ("control", "8401")):
        variables = variables_of(containers[name])
        stop = int(variables["HARD_STOP"].removesuffix("s"))
        assert objects["HorizontalPodAutoscaler", "tokentape"]["spec"]["maxReplicas"] == int(variables["MAX_REPLICAS"])
        assert variables["REPLICAS"].startswith("tokentape-replicas.tokentape.svc.")
        assert port == variables["API_PORT"]
        assert grace - 10 >= stop >= settings["drain_timeout_s"] + settings["shutdown_delay_s"] + 30


async def test_calls_reach_more_replicas_than_16(containers, http, tmp_path):
    """With the command and the variables of its container, and the addresses by TCP, a call arrives at each of 40."""
    address, *replicas = own_addresses(1 + REPLICAS)

    async def respond(request):
        if request.path == "/ready":
            return web.json_response({"status": "ready"})
        return web.Response(text=request.transport.get_extra_info("sockname")[0])

    app = web.Application()
    app.router.add_get("/{path:.*}", respond)
    runner = web.AppRunner(app)
    names = Names()
    names.addresses = replicas
    async with AsyncExitStack() as stack:
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        for replica in replicas:
            for port in (8400, 8401):
                await web.TCPSite(runner, replica, port).start()
        server = await asyncio.start_server(names.serve_by_tcp, address, 0)
        stack.callback(server.close)
        (tmp_path / "resolv.conf").write_text(f"search a.local\nnameserver {address}\nnameserver 127.0.0.1\n")
        (script,) = containers["models"]["args"]
        for old, new in (
            ("/etc/resolv.conf", str(tmp_path / "resolv.conf")),
            (':53"', f':{server.sockets[0].getsockname()[1]}"'),
            ("exec haproxy -W", f"exec {program('haproxy')}"),
            ("/usr/local/etc/haproxy/haproxy.cfg", str(CONFIGURATION)),
        ):
            assert old in script
            script = script.replace(old, new)
        environment = {**os.environ, **variables_of(containers["models"]), "API_ADDRESS": address}
        balancer = await asyncio.create_subprocess_exec(*containers["models"]["command"], script, env=environment)
        stack.push_async_callback(balancer.wait)
        stack.callback(balancer.kill)
        url = f"http://{address}:8400"
        found = set()
        async with asyncio.timeout(120):
            while len(found) < REPLICAS:
                try:
                    async with http.get(f"{url}/who") as response:
                        if response.status == 200:
                            found.add(await response.text())
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.05)

    assert found == set(replicas)
