"""A proxy of two workers under load and a Prometheus that scrapes it, as real processes.

The rules come from deploy/, except that an alert fires after a second instead of minutes.
"""

import asyncio
import copy
import math
import signal
import sys
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from tests.system.faults.system import ROOT, Part, free_port, valkey

DEPLOYED = ROOT / "deploy" / "prometheus"
KEY = "the-key-of-the-trainer"
CHAT = "v1/chat/completions"


class Scene:
    """All processes. `url` is the model API, `control` the control API, `gone` the port of an engine that does not exist."""

    def __init__(self, folder: Path, binaries: Path) -> None:
        self.folder = folder
        listen, control, store, one, two, self.gone, self.port = (free_port() for _ in range(7))
        self.url, self.control = f"http://127.0.0.1:{listen}", f"http://127.0.0.1:{control}"
        self.store_port, self._control_port = store, control
        self.store = valkey(folder, "store", store)
        simulate = [sys.executable, "-m", "proxy", "simulate", "--listen"]
        self._engines = [f"http://127.0.0.1:{port}" for port in (one, two)]
        self.one = Part("one", [*simulate, f"127.0.0.1:{one}"], folder)
        self.two = Part("two", [*simulate, f"127.0.0.1:{two}", "--token-delay-s", "0.01"], folder)
        serve = [sys.executable, "-m", "proxy", "serve", "--config", f"{folder}/proxy.yaml"]
        self.proxy = Part("proxy", serve, folder)
        (folder / "proxy.yaml").write_text(yaml.safe_dump(self._settings(listen, one, two)))
        words = [f"--config.file={folder}/prometheus.yml", f"--web.listen-address=127.0.0.1:{self.port}"]
        self.prometheus = Part(
            "prometheus", [str(binaries / "prometheus"), *words, f"--storage.tsdb.path={folder}/tsdb"], folder
        )
        self.write_rules()
        self.http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20))

    def _settings(self, listen: int, one: int, two: int) -> dict[str, Any]:
        endpoints = [
            {"url": f"http://127.0.0.1:{one}", "name": "one", "kind": "vllm"},
            {"url": f"http://127.0.0.1:{two}", "name": "two", "kind": "vllm", "max_in_flight": 1},
            {"url": f"http://127.0.0.1:{self.gone}", "name": "gone", "kind": "vllm"},
        ]
        return {
            "listen": f"127.0.0.1:{listen}",
            "workers": 2,
            "drain_timeout_s": 2,
            "engines": {"endpoints": endpoints, "health_interval_s": 1, "max_ejection_s": 4, "max_queued": 2},
            "control": {"listen": f"127.0.0.1:{self._control_port}", "api_keys": [KEY]},
            "store": {
                "url": f"redis://127.0.0.1:{self.store_port}",
                "on_failure": "spool",
                "spool_path": f"{self.folder}/spool",
            },
            "agents": {"probes": {"user_agents": ["kube-probe"]}},
            "audit": {"sample_rate": 0.5},
            "log": {"level": "warning"},
            "tracing": {"endpoint": f"http://127.0.0.1:{self.gone}"},  # no collector: spans are dropped
        }

    def write_rules(self) -> None:
        """Write the deployed files with this scene's addresses, a scrape every second, and alerts that fire after a second."""
        (self.folder / "control_key").write_text(KEY)
        config = yaml.safe_load((DEPLOYED / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        proxies, itself = config["scrape_configs"]
        proxies["authorization"]["credentials_file"] = f"{self.folder}/control_key"
        del proxies["dns_sd_configs"]
        proxies["static_configs"] = [{"targets": [f"127.0.0.1:{self._control_port}"]}]
        itself["static_configs"] = [{"targets": [f"127.0.0.1:{self.port}"]}]
        (self.folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        rules = copy.deepcopy(deployed_rules())
        for rule in (rule for group in rules["groups"] for rule in group["rules"]):
            if "for" in rule:
                rule["for"] = "1s"
        (self.folder / "rules.yml").write_text(yaml.safe_dump(rules))

    async def start(self) -> None:
        await asyncio.gather(self.store.start(), self.one.start(), self.two.start(), self.prometheus.start())
        await self.store_answers()
        await self.ask_store("CONFIG SET maxmemory 1gb")
        for url in self._engines:  # a slow start would eject it
            await self._until_well(f"{url}/health")
        await self.proxy.start()
        await self._until_well(f"{self.control}/ready")

    async def _until_well(self, url: str) -> None:
        async with asyncio.timeout(30):
            while await self._status(url) != 200:
                await asyncio.sleep(0.05)

    async def stop(self) -> None:
        await self.http.close()
        for part in (self.proxy, self.prometheus, self.one, self.two, self.store):
            if part.process is not None and part.process.returncode is None:
                await part.end(signal.SIGTERM)

    async def store_answers(self) -> None:
        async with asyncio.timeout(30):
            while True:
                with suppress(OSError):
                    if await self.ask_store("PING") == b"+PONG\r\n":
                        return
                await asyncio.sleep(0.02)

    async def ask_store(self, words: str) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.store_port)
        writer.write(f"{words}\r\n".encode())
        reply = await asyncio.wait_for(reader.read(2**16), 50)
        writer.close()
        return reply

    async def _status(self, url: str) -> int:
        try:
            async with self.http.get(url) as response:
                return response.status
        except aiohttp.ClientError:
            return 0

    async def post(self, url: str, body: Mapping[str, Any], **headers: str) -> dict[str, Any]:
        """Post JSON on a new connection, so that either worker can get it. Return the response, or {} on failure."""
        with suppress(aiohttp.ClientError, TimeoutError):
            headers = {"Connection": "close", "Authorization": f"Bearer {KEY}", **headers}
            async with self.http.post(url, json=body, headers=headers) as response:
                if response.content_type == "application/json":
                    return await response.json()
                await response.read()
        return {}

    async def announce(self, version: int) -> None:
        """Announce a policy version, if the store is reachable."""
        with suppress(aiohttp.ClientError, TimeoutError):
            headers = {"Authorization": f"Bearer {KEY}"}
            async with self.http.put(f"{self.control}/policy", json={"version": version}, headers=headers):
                pass

    async def metrics(self) -> str:
        """Return the /metrics of the proxy."""
        async with self.http.get(self.control + "/metrics", headers={"Authorization": f"Bearer {KEY}"}) as response:
            assert response.status == 200
            return await response.text()

    async def ask(self, path: str, **params: str) -> Any:
        """Return the data of a request to Prometheus' API."""
        async with self.http.get(f"http://127.0.0.1:{self.port}/api/v1/{path}", params=params) as response:
            body = await response.json()
        assert body["status"] == "success", (body, params)
        return body["data"]

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the current vector of an expression, with every value of the dashboard's variables."""
        return (await self.ask("query", query=without_variables(expression)))["result"]

    async def shown(self, expressions: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
        """Return the vector of each expression once it has data: rare events take a while to happen."""
        found: dict[str, list[dict[str, Any]]] = {expression: [] for expression in expressions}
        with suppress(TimeoutError):
            async with asyncio.timeout(60):
                while missing := [expression for expression, vector in found.items() if not shows(vector)]:
                    for expression in missing:
                        found[expression] = await self.query(expression)
                    await asyncio.sleep(0.5)
        return found

    async def alerts(self) -> dict[str, list[dict[str, Any]]]:
        """Return the pending and firing alerts by name."""
        found: dict[str, list[dict[str, Any]]] = {}
        for alert in (await self.ask("alerts"))["alerts"]:
            found.setdefault(alert["labels"]["alertname"], []).append(alert)
        return found

    async def until_alert(self, *names: str) -> dict[str, list[dict[str, Any]]]:
        """Return the alerts once all of these fire."""
        firing: set[str] = set()
        try:
            async with asyncio.timeout(90):
                while True:
                    found = await self.alerts()
                    firing = {
                        name for name, alerts in found.items() if any(alert["state"] == "firing" for alert in alerts)
                    }
                    if firing >= {*names}:
                        return found
                    await asyncio.sleep(0.25)
        except TimeoutError:
            raise AssertionError(f"only these fire after 90 s: {sorted(firing)}") from None

    async def until_no_alert(self, *names: str) -> None:
        """Return once none of these is pending or firing."""
        async with asyncio.timeout(90):
            while (await self.alerts()).keys() & {*names}:
                await asyncio.sleep(0.25)


def without_variables(expression: str) -> str:
    """Return a dashboard's expression as Grafana sends it, with everything selected and a rate interval of a minute."""
    return expression.replace("$__rate_interval", "1m").replace("$job", ".+").replace("$instance", ".+")


def shows(vector: list[dict[str, Any]]) -> bool:
    """Return whether any value is a number."""
    return any(not math.isnan(float(series["value"][1])) for series in vector)


def deployed_rules() -> dict[str, Any]:
    """Return the content of deploy/prometheus/rules.yml."""
    return yaml.safe_load((DEPLOYED / "rules.yml").read_text())


async def live(scene: Scene, number: int) -> None:
    """Run an agent in a loop: groups, some of them dropped or refused, drift, flagged steps, disconnects and errors."""
    turn = 0
    while True:
        turn += 1
        group = f"g{number}-{turn}"
        await scene.announce(turn)
        opened = await scene.post(f"{scene.control}/groups", {"group_id": group, "size": 2})
        rollouts = [rollout["rollout_id"] for rollout in opened.get("rollouts", ())]
        rewards = (1.0, -0.5) if turn % 2 else (1.0, 1.0)
        await asyncio.gather(*(_play(scene, *played) for played in zip(rollouts, rewards, strict=False)))
        claim = {"consumer": "t", "groups": 4, "format": "sequences", "wait_s": 0, "lease_s": 60}
        await scene.post(f"{scene.control}/batches/claim", {**claim, "format": "marin"})  # refused: no env_name
        batch = await scene.post(f"{scene.control}/batches/claim", {**claim, "only_mixed": turn % 3 == 0})
        if batch.get("batch_id"):
            verb = "release" if turn == 1 else "ack"
            await scene.post(f"{scene.control}/batches/{batch['batch_id']}/{verb}", {})
        await scene.post(f"{scene.control}/rollouts/{group}/nothing", {})
        await asyncio.sleep(0.05)


async def _play(scene: Scene, rollout: str, reward: float) -> None:
    base = f"{scene.url}/rollouts/{rollout}"
    ask = [{"role": "user", "content": "Count to three."}]
    same = {"Idempotency-Key": f"{rollout}-1"}
    reply = await scene.post(f"{base}/{CHAT}", {"model": "simulated", "messages": ask, "max_tokens": 12}, **same)
    if "choices" not in reply:
        return
    await scene.post(f"{base}/{CHAT}", {"model": "simulated", "messages": ask, "max_tokens": 12}, **same)  # replayed
    edited = {"role": "assistant", "content": (reply["choices"][0]["message"]["content"] or "") + " And so on."}
    more = [*ask, edited, {"role": "user", "content": "Go on."}]
    await scene.post(f"{base}/{CHAT}", {"model": "simulated", "messages": more, "max_tokens": 12, "stream": True})
    await scene.post(
        f"{base}/v1/completions", {"model": "simulated", "prompt": "hi", "echo": True, "max_tokens": 2}
    )  # flagged
    await _leave(scene, f"{base}/{CHAT}", {"model": "simulated", "messages": ask, "max_tokens": 2000, "stream": True})
    await scene.post(f"{scene.control}/rollouts/{rollout}/finish", {"status": "completed", "reward": reward})


async def talk(scene: Scene, number: int) -> None:
    """Run an agent that continues one rollout during outages of the store, and a health probe."""
    body = {"model": "simulated", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4}
    while True:
        await scene.post(f"{scene.url}/rollouts/steady-{number}/{CHAT}", body)
        await scene.post(f"{scene.url}/{CHAT}", {**body, "max_tokens": 1}, **{"User-Agent": "kube-probe/1.32"})
        await asyncio.sleep(0.1)


async def _leave(scene: Scene, url: str, body: Mapping[str, Any]) -> None:
    """Start a stream and disconnect."""
    with suppress(aiohttp.ClientError, TimeoutError):
        async with scene.http.post(url, json=body, headers={"Connection": "close"}) as response:
            await response.content.readany()


@asynccontextmanager
async def playing(folder: Path, binaries: Path, agents: int = 3) -> AsyncIterator[Scene]:
    """Run the scene with this many agents of each kind."""
    scene = Scene(folder, binaries)
    try:
        await scene.start()
        tasks = [asyncio.create_task(life(scene, number)) for number in range(agents) for life in (live, talk)]
        try:
            yield scene
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        await scene.stop()
