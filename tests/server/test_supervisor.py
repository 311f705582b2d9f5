"""Worker processes that share a port."""

import asyncio
import os
import re
import signal
import subprocess
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path

import aiohttp
import orjson
import pytest
from tests.support.collector import collecting
from tests.support.commands import TOKENTAPE, children_of, is_alive, run, started

from proxy.config.settings import load
from proxy.server.supervisor import Workers, refuse_left_journals, settings_of_worker

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
WORKER = "tokentape.__main__"


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """The command line of a proxy with two workers."""
    monkeypatch.setenv("TOKENTAPE_LOG__LEVEL", "warning")  # the log is not read here, and a full pipe would block it
    return ("serve", "--workers", "2", "--listen", "127.0.0.1:0", "--store", f"embedded:{tmp_path / 'store'}")


async def wait_until(condition):
    async with asyncio.timeout(50):
        while not condition():
            await asyncio.sleep(0.02)


def sockets_folder(pid: int) -> Path:
    """Return the folder of a supervisor: the newest one, since a killed process with the same ID leaves its folder."""
    return max(Path(tempfile.gettempdir()).glob(f"tokentape-{pid}-*"), key=lambda folder: folder.stat().st_mtime_ns)


def calls_per_worker(pid):
    """Return the number of calls in each worker's metrics file."""
    folder = sockets_folder(pid)
    return [
        sum(value for metric, *_, samples in orjson.loads(path.read_bytes()) if metric == "tokentape_calls"
            for (name, _), value in samples if name.endswith("_total"))
        for path in sorted(folder.glob("[0-9]*.json"))
    ]  # fmt: skip


class Agents:
    """Agents that call on new connections until they are stopped; `delivered` are the steps of complete responses."""

    def __init__(self, url, http, count):
        self.delivered, self.statuses, self._stopped = [], Counter(), False
        self._tasks = [asyncio.create_task(self._call(f"{url}/rollouts/r{n}{CHAT}", http)) for n in range(count)]

    async def stop(self):
        self._stopped = True
        await asyncio.gather(*self._tasks)

    async def _call(self, url, http):
        while not self._stopped:
            with suppress(aiohttp.ClientError):
                async with http.post(url, json=BODY, headers={"Connection": "close"}) as response:
                    self.statuses[response.status] += 1
                    if (await response.read()).endswith(b"data: [DONE]\n\n"):
                        self.delivered.append(response.headers["X-Step-Id"])


async def metric(url, http, line):
    """Return a metric from any worker; each worker sums the metrics of all."""
    async with http.get(f"{url}/metrics", headers={"Connection": "close"}) as response:
        text = await response.text()
    return sum(float(value) for value in re.findall(rf"^{line}(?:{{\S*)? (\S+)$", text, re.MULTILINE))


async def is_listening(url, http):
    try:
        async with http.get(f"{url}/health", headers={"Connection": "close"}):
            return True
    except aiohttp.ClientConnectorError:
        return False
    except aiohttp.ClientError:
        return True  # the connection was never accepted


async def stored(url, http, count):
    """Return the steps of the agents' rollouts."""
    found = []
    for number in range(count):
        async with http.get(f"{url}/rollouts/r{number}/steps?limit=1000") as response:
            found += (await response.json())["steps"]
    return found


async def test_a_killed_worker_is_replaced_and_loses_no_delivered_step(serve):
    """With SIGKILL under load, each delivered step is stored once, and agents without a response call again."""
    with started(*serve) as (process, url, _):
        async with aiohttp.ClientSession() as http:
            before = children_of(process.pid, WORKER)
            agents = Agents(url, http, 4)
            await wait_until(lambda: len(agents.delivered) >= 40)
            counted = await metric(url, http, "tokentape_steps_total")
            os.kill(before[0], signal.SIGKILL)
            await wait_until(lambda: len({*children_of(process.pid, WORKER)} - {*before}) == 1)
            while await metric(url, http, "tokentape_workers") < 2:
                pass
            delivered = len(agents.delivered)
            await wait_until(lambda: len(agents.delivered) >= delivered + 40)
            await agents.stop()
            steps = await stored(url, http, 4)
            counts = {await metric(url, http, "tokentape_steps_total") for _ in range(8)}

    names = [step["step_id"] for step in steps]
    assert len(before) == 2
    assert {*agents.statuses} == {200}
    assert len(names) == len({*names})
    assert {*agents.delivered} <= {*names}
    assert len(counts) == 1  # every worker returns the same
    assert counted < counts.pop() <= len(steps)  # calls that the killed worker had not published are missing


async def test_a_killed_embedded_store_is_restarted_and_no_call_fails(serve):
    """Each delivered step is stored."""
    with started(*serve) as (process, url, _):
        async with aiohttp.ClientSession() as http:
            (store,) = children_of(process.pid, "valkey-server")
            agents = Agents(url, http, 4)
            await wait_until(lambda: len(agents.delivered) >= 20)
            os.kill(store, signal.SIGKILL)
            await wait_until(lambda: {store} != {*children_of(process.pid, "valkey-server")} != set())
            delivered = len(agents.delivered)
            await wait_until(lambda: len(agents.delivered) >= delivered + 40)
            await agents.stop()
            names = [step["step_id"] for step in await stored(url, http, 4)]

    assert {*agents.statuses} == {200}
    assert len(names) == len({*names})
    assert {*agents.delivered} <= {*names}


async def test_calls_are_distributed_over_the_workers_and_their_metrics_are_summed(serve):
    with started(*serve) as (process, url, _):
        async with aiohttp.ClientSession() as http:
            for _ in range(40):
                async with http.post(
                    f"{url}/rollouts/r0{CHAT}", json=BODY, headers={"Connection": "close"}
                ) as response:
                    await response.read()
            counts = {await metric(url, http, "tokentape_calls_total") for _ in range(8)}
            steps = await stored(url, http, 1)
        counts_per_worker = calls_per_worker(process.pid)
        ((of_supervisor, *_),) = orjson.loads((sockets_folder(process.pid) / "supervisor.json").read_bytes())

    assert counts == {40}
    assert of_supervisor == "tokentape_waiting_connections"
    assert [step["index"] for step in steps] == list(range(40))
    assert sum(counts_per_worker) == 40
    assert all(counts_per_worker)


async def test_sigterm_completes_the_calls_of_all_workers_and_exits_with_0(serve):
    """No process remains."""
    slow = ("simulate", "--listen", "127.0.0.1:0", "--token-delay-s", "0.05", "--seed", "1")
    with started(*slow) as (_, engine, _), started(*serve, "--engine", engine) as (process, url, _):
        processes = children_of(process.pid)
        async with aiohttp.ClientSession() as http:
            close = {"Connection": "close"}
            calls = [http.post(f"{url}/rollouts/r{n}{CHAT}", json=BODY, headers=close) for n in range(8)]
            responses = await asyncio.gather(*calls)
            process.send_signal(signal.SIGTERM)
            bodies = [await response.read() for response in responses]
        code = await asyncio.to_thread(process.wait, 50)

    assert code == 0
    assert all(body.endswith(b"data: [DONE]\n\n") for body in bodies)
    assert len(processes) == 3
    assert not any(map(is_alive, processes))


async def test_a_second_signal_ends_all_workers_immediately(serve):
    """Calls in flight are aborted."""
    slow = ("simulate", "--listen", "127.0.0.1:0", "--token-delay-s", "60")
    with started(*slow) as (_, engine, _), started(*serve, "--engine", engine) as (process, url, _):
        processes = children_of(process.pid)
        async with aiohttp.ClientSession() as http:
            call = asyncio.ensure_future(http.post(f"{url}/rollouts/r1{CHAT}", json={**BODY, "stream": False}))
            while b"tokentape_in_flight_calls 1.0" not in await (await http.get(f"{url}/metrics")).read():
                assert not call.done()
            process.send_signal(signal.SIGTERM)
            while await is_listening(url, http):  # until both workers have the signal
                pass
            process.send_signal(signal.SIGTERM)
            code = await asyncio.to_thread(process.wait, 30)
            with pytest.raises(aiohttp.ClientError):
                await call
        await wait_until(lambda: not any(map(is_alive, processes)))

    assert code == -signal.SIGTERM


async def test_when_the_supervisor_is_killed_its_workers_and_its_store_end(serve):
    """Its address and store can be used again."""
    with started(*serve) as (process, _, _):
        processes = children_of(process.pid)
        process.kill()
        process.wait()
        await wait_until(lambda: not any(map(is_alive, processes)))
        with started(*serve) as (restarted, _, _):
            assert len(children_of(restarted.pid)) == 3


def test_an_address_in_use_is_an_error(serve, tmp_path):
    """This holds although other workers share the port."""
    with started(*serve) as (_, url, _):
        other = ("--listen", url.removeprefix("http://"), "--store", f"embedded:{tmp_path / 'other'}")
        refused = run(*serve[:3], *other)

    assert refused.returncode == 1
    assert url.removeprefix("http://") in refused.stderr
    assert "Traceback" not in refused.stderr


def test_an_error_of_the_workers_at_the_start_is_printed_once(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("workers: 2\nlisten: 127.0.0.1:0\nlisten_tls: {cert_file: no-cert.pem, key_file: no-key.pem}\n")
    done = run("serve", "--config", str(config), "--store", f"embedded:{tmp_path / 'store'}")

    assert done.returncode == 78
    assert done.stderr.count("invalid certificate no-cert.pem or key no-key.pem") == 1
    assert "Traceback" not in done.stderr


async def test_workers_share_the_control_apis_port(tmp_path):
    """Each of them checks the `Host` at both addresses."""
    config = tmp_path / "config.yaml"
    config.write_text("workers: 2\ncontrol: {listen: '127.0.0.1:0'}\nlisten: 127.0.0.1:0\n")
    with started("serve", "--config", str(config), "--store", f"embedded:{tmp_path / 'store'}") as (_, url, output):
        control = re.search(r"control +(http://\S+)", output)[1]
        async with aiohttp.ClientSession() as http:
            shown = [(await http.get(f"{address}/rollouts", headers={"Connection": "close"})).status
                     for address in (control, control, control, control, url)]  # fmt: skip
            rebound = [(await http.get(f"{address}/v1/models", headers={"Connection": "close", "Host": "evil.test"})).status
                       for address in (control, control, url, url)]  # fmt: skip

    assert shown == [200, 200, 200, 200, 404]
    assert rebound == [403, 403, 403, 403]


def test_secrets_and_sockets_of_workers_are_not_accessible_to_other_users(tmp_path):
    """Settings are sent through a pipe; the sockets are in a folder with mode 0700."""
    config = tmp_path / "config.yaml"
    config.write_text(
        "workers: 2\nagents: {api_keys: [planted-secret]}\ncontrol: {api_keys: [planted-too]}\nlisten: 127.0.0.1:0\n"
    )
    with started("serve", "--config", str(config), "--store", f"embedded:{tmp_path / 'store'}") as (process, _, _):
        workers = children_of(process.pid, WORKER)
        lines = [Path(f"/proc/{pid}/{name}").read_text() for pid in workers for name in ("cmdline", "environ")]
        mode = sockets_folder(process.pid).stat().st_mode & 0o777

    assert len(lines) == 4
    assert not any("planted-secret" in line for line in lines)
    assert mode == 0o700


async def test_a_crashing_worker_is_restarted_with_growing_delays(tmp_path, monkeypatch):
    """They end at five seconds, and the restarts continue."""
    pauses = []
    ended = await asyncio.create_subprocess_exec("false")
    await ended.wait()
    workers = Workers(load(), tmp_path, [])
    workers._processes[0] = ended

    async def launch(number):
        raise OSError("the worker ended before it listened")

    async def sleep(pause_s):
        pauses.append(pause_s)
        if len(pauses) == 9:
            raise asyncio.CancelledError

    monkeypatch.setattr(workers, "_launch", launch)
    monkeypatch.setattr("proxy.server.supervisor.asyncio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await workers._watch(0)

    assert pauses == [0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5]


def test_each_worker_has_its_own_journal():
    """The first worker uses a single process's journal, so that adding workers abandons no journal."""
    settings = load(workers=2, store={"spool_path": "spool/steps"})

    paths = [str(settings_of_worker(settings, number).store.spool_path) for number in range(3)]

    assert paths == ["spool/steps", "spool/steps.1", "spool/steps.2"]


def test_fewer_workers_than_journals_with_steps_are_an_error(tmp_path):
    """Empty journals are ignored."""
    settings = load(workers=2, store={"spool_path": str(tmp_path / "steps")})
    for name in ("steps", "steps.1", "steps.2", "steps.3", "steps.old"):
        (tmp_path / name).write_bytes(b"" if name == "steps.3" else b"TTSP")

    with pytest.raises(ValueError, match="steps.2 has steps .* --workers 3"):
        refuse_left_journals(settings)
    refuse_left_journals(load(workers=3, store={"spool_path": str(tmp_path / "steps")}))


def instances(collector):
    return {resource["service.instance.id"] for resource in collector.resources}


async def test_each_worker_exports_its_spans_before_it_ends(serve):
    """By the standard variables of OpenTelemetry; workers are instances of one service."""
    async with collecting() as collector, aiohttp.ClientSession() as http:
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "100"}
        with started(*serve, **variables) as (process, url, _):
            agents = Agents(url, http, 4)
            await wait_until(lambda: len(instances(collector)) == 2)
            await agents.stop()
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 60) == 0

    assert sorted(agents.delivered) == sorted(span.attributes["tokentape.step.id"] for span in collector.named("chat"))
    assert {resource["service.name"] for resource in collector.resources} == {"tokentape"}


@pytest.fixture
def worker(server, tmp_path):
    """A worker that listens, with settings from a pipe."""
    process = subprocess.Popen([*TOKENTAPE, "worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    store = {"url": f"unix:{server.socket}", "prefix": "worker", "password": None}
    settings = load(listen="127.0.0.1:0", store=store, engines={"endpoints": [{"url": "http://127.0.0.1:9"}]})
    process.stdin.write(
        orjson.dumps({"number": 0, "folder": str(tmp_path), "settings": settings.to_json(), "channels": []}) + b"\n"
    )
    process.stdin.flush()
    assert b"http://127.0.0.1:" in process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_a_worker_exits_with_0_on_a_stop_line(worker):
    worker.stdin.write(b'"stop"\n')
    worker.stdin.flush()

    assert worker.wait(50) == 0


def test_a_worker_exits_with_0_when_its_parent_ends(worker):
    """The kernel closes the pipe."""
    worker.stdin.close()

    assert worker.wait(50) == 0


def test_a_worker_exits_with_0_on_one_or_two_signals(worker):
    """A service manager signals all processes of a service, and the supervisor also sends the stop line."""
    for _ in range(2):
        worker.send_signal(signal.SIGTERM)
    worker.stdin.write(b'"stop"\n')
    worker.stdin.flush()

    assert worker.wait(50) == 0


def test_the_settings_of_a_worker_include_secrets():
    """They are sent through the pipe; printed settings hide secrets."""
    settings = load(
        store={"url": "redis://127.0.0.1", "password": "planted"}, agents={"api_keys": ["sown"]}, insecure=True
    )
    text = orjson.dumps(settings.to_json()).decode()

    assert "planted" in text
    assert "sown" in text
    assert type(settings)(**orjson.loads(text)) == settings
