"""Workers that share a port, as real processes."""

import asyncio
import os
import re
import signal
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path

import aiohttp
import orjson
import pytest
from commands import children_of, is_alive, run, started

from proxy.config.settings import load
from proxy.server.supervisor import Workers, refuse_left_journals, settings_of_worker

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
WORKER = "proxy.cli.main"


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """The words of a proxy with two workers."""
    monkeypatch.setenv("TOKENTAPE_LOG__LEVEL", "warning")  # nobody reads the log here, and a full pipe would stop it
    return ("serve", "--workers", "2", "--listen", "127.0.0.1:0", "--store", f"embedded:{tmp_path / 'store'}")


async def until(condition):
    async with asyncio.timeout(50):
        while not condition():
            await asyncio.sleep(0.02)


def _calls_of_each(pid):
    """The calls that each worker told the others of."""
    (folder,) = Path(tempfile.gettempdir()).glob(f"tokentape-{pid}-*")
    return [
        sum(value for one, *_, samples in orjson.loads(path.read_bytes()) if one == "tokentape_calls"
            for (name, _), value in samples if name.endswith("_total"))
        for path in sorted(folder.glob("*.json"))
    ]  # fmt: skip


class Agents:
    """Agents that call on connections of their own until told to stop; `told` are the steps whose end they saw."""

    def __init__(self, url, http, count):
        self.told, self.statuses, self._stopped = [], Counter(), False
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
                        self.told.append(response.headers["X-Step-Id"])


async def counted(url, http, line):
    """What any worker tells for all of them."""
    async with http.get(f"{url}/metrics", headers={"Connection": "close"}) as response:
        text = await response.text()
    return sum(float(value) for value in re.findall(rf"^{line}(?:{{\S*)? (\S+)$", text, re.MULTILINE))


async def is_taking_calls(url, http):
    try:
        async with http.get(f"{url}/health", headers={"Connection": "close"}):
            return True
    except aiohttp.ClientConnectorError:
        return False
    except aiohttp.ClientError:
        return True  # a connection that nobody took before the last one stopped listening


async def stored(url, http, count):
    """The steps of the agents' rollouts."""
    found = []
    for number in range(count):
        async with http.get(f"{url}/rollouts/r{number}/steps?limit=1000") as response:
            found += (await response.json())["steps"]
    return found


async def test_a_killed_worker_is_replaced_and_loses_no_step_that_a_client_was_told_of(serve):
    """kill -9 under load: two workers again, each told step is stored once, and who was told of none calls again."""
    with started(*serve) as (process, url, _):
        async with aiohttp.ClientSession() as http:
            before = children_of(process.pid, WORKER)
            agents = Agents(url, http, 4)
            await until(lambda: len(agents.told) >= 40)
            heard = await counted(url, http, "tokentape_steps_total")
            os.kill(before[0], signal.SIGKILL)
            await until(lambda: len({*children_of(process.pid, WORKER)} - {*before}) == 1)
            while await counted(url, http, "tokentape_workers") < 2:
                pass
            seen = len(agents.told)
            await until(lambda: len(agents.told) >= seen + 40)
            await agents.stop()
            steps = await stored(url, http, 4)
            counts = {await counted(url, http, "tokentape_steps_total") for _ in range(8)}

    names = [step["step_id"] for step in steps]
    assert 2 == len(before)
    assert {200} == {*agents.statuses}
    assert len(names) == len({*names})
    assert {*agents.told} <= {*names}
    assert 1 == len(counts)  # whoever answered
    assert heard < counts.pop() <= len(steps)  # what the dead one had not told before it was killed is not counted


async def test_a_killed_embedded_store_is_started_again_and_the_workers_wait_for_it(serve):
    """No call fails, and each step that a client was told of is there."""
    with started(*serve) as (process, url, _):
        async with aiohttp.ClientSession() as http:
            (store,) = children_of(process.pid, "valkey-server")
            agents = Agents(url, http, 4)
            await until(lambda: len(agents.told) >= 20)
            os.kill(store, signal.SIGKILL)
            await until(lambda: {store} != {*children_of(process.pid, "valkey-server")} != set())
            seen = len(agents.told)
            await until(lambda: len(agents.told) >= seen + 40)
            await agents.stop()
            names = [step["step_id"] for step in await stored(url, http, 4)]

    assert {200} == {*agents.statuses}
    assert len(names) == len({*names})
    assert {*agents.told} <= {*names}


async def test_calls_are_spread_over_all_of_them_and_counted_together(serve):
    """The kernel deals out connections; each worker has had some, and any tells how many all have had."""
    with started(*serve) as (process, url, _):
        async with aiohttp.ClientSession() as http:
            for _ in range(40):
                async with http.post(
                    f"{url}/rollouts/r0{CHAT}", json=BODY, headers={"Connection": "close"}
                ) as response:
                    await response.read()
            counts = {await counted(url, http, "tokentape_calls_total") for _ in range(8)}
            steps = await stored(url, http, 1)
        each = _calls_of_each(process.pid)

    assert {40} == counts
    assert list(range(40)) == [step["index"] for step in steps]
    assert 40 == sum(each)
    assert all(each)


async def test_told_to_stop_all_of_them_end_their_calls_and_the_exit_is_clean(serve):
    """SIGTERM to the parent alone: each call in flight is shown its end, and nothing of ours is left running."""
    slow = ("simulate", "--listen", "127.0.0.1:0", "--token-delay-s", "0.05", "--seed", "1")
    with started(*slow) as (_, engine, _), started(*serve, "--engine", engine) as (process, url, _):
        everybody = children_of(process.pid)
        async with aiohttp.ClientSession() as http:
            close = {"Connection": "close"}
            calls = [http.post(f"{url}/rollouts/r{n}{CHAT}", json=BODY, headers=close) for n in range(8)]
            answers = await asyncio.gather(*calls)
            process.send_signal(signal.SIGTERM)
            bodies = [await response.read() for response in answers]
        code = await asyncio.to_thread(process.wait, 50)

    assert 0 == code
    assert all(body.endswith(b"data: [DONE]\n\n") for body in bodies)
    assert 3 == len(everybody)
    assert not any(map(is_alive, everybody))


async def test_a_second_signal_ends_all_of_them_at_once(serve):
    """Whatever is in flight: a call of minutes is not waited for."""
    slow = ("simulate", "--listen", "127.0.0.1:0", "--token-delay-s", "60")
    with started(*slow) as (_, engine, _), started(*serve, "--engine", engine) as (process, url, _):
        everybody = children_of(process.pid)
        async with aiohttp.ClientSession() as http:
            call = asyncio.ensure_future(http.post(f"{url}/rollouts/r1{CHAT}", json={**BODY, "stream": False}))
            while b"tokentape_in_flight_calls 1.0" not in await (await http.get(f"{url}/metrics")).read():
                assert not call.done()
            process.send_signal(signal.SIGTERM)
            while await is_taking_calls(url, http):  # until both have been told
                pass
            process.send_signal(signal.SIGTERM)
            code = await asyncio.to_thread(process.wait, 30)
            with pytest.raises(aiohttp.ClientError):
                await call
        await until(lambda: not any(map(is_alive, everybody)))

    assert -signal.SIGTERM == code


async def test_when_the_parent_is_killed_nothing_of_it_is_left(serve):
    """Neither a worker that nobody watches nor a store that nobody owns; its place can be taken at once."""
    with started(*serve) as (process, _, _):
        everybody = children_of(process.pid)
        process.kill()
        process.wait()
        await until(lambda: not any(map(is_alive, everybody)))
        with started(*serve) as (again, _, _):
            assert 3 == len(children_of(again.pid))


def test_an_address_in_use_is_an_error_at_once(serve, tmp_path):
    """Also where another proxy's workers share it: theirs are not joined."""
    with started(*serve) as (_, url, _):
        other = ("--listen", url.removeprefix("http://"), "--store", f"embedded:{tmp_path / 'other'}")
        refused = run(*serve[:3], *other)

    assert 1 == refused.returncode
    assert url.removeprefix("http://") in refused.stderr
    assert "Traceback" not in refused.stderr


def test_what_a_worker_cannot_start_with_is_said_once(tmp_path):
    """The first one says it, and the others are not started."""
    config = tmp_path / "config.yaml"
    config.write_text("workers: 2\nlisten: 127.0.0.1:0\nlisten_tls: {cert_file: no-cert.pem, key_file: no-key.pem}\n")
    done = run("serve", "--config", str(config), "--store", f"embedded:{tmp_path / 'store'}")

    assert 1 == done.returncode
    assert 1 == done.stderr.count("invalid certificate no-cert.pem or key no-key.pem")
    assert "Traceback" not in done.stderr


async def test_the_control_api_may_have_a_port_of_its_own(tmp_path):
    """It is shared as well."""
    config = tmp_path / "config.yaml"
    config.write_text("workers: 2\ncontrol: {listen: '127.0.0.1:0'}\nlisten: 127.0.0.1:0\n")
    with started("serve", "--config", str(config), "--store", f"embedded:{tmp_path / 'store'}") as (_, url, said):
        control = re.search(r"control +(http://\S+)", said)[1]
        async with aiohttp.ClientSession() as http:
            shown = [(await http.get(f"{at}/rollouts", headers={"Connection": "close"})).status
                     for at in (control, control, control, control, url)]  # fmt: skip

    assert [200, 200, 200, 200, 404] == shown


def test_other_users_of_the_machine_read_no_secret_and_reach_no_worker(tmp_path):
    """Settings go by a pipe; the sockets of the workers lie in a folder that only their user can enter."""
    config = tmp_path / "config.yaml"
    config.write_text("workers: 2\nagents: {api_keys: [planted-secret]}\nlisten: 127.0.0.1:0\n")
    with started("serve", "--config", str(config), "--store", f"embedded:{tmp_path / 'store'}") as (process, _, _):
        workers = children_of(process.pid, WORKER)
        lines = [Path(f"/proc/{pid}/{what}").read_text() for pid in workers for what in ("cmdline", "environ")]
        (folder,) = Path(tempfile.gettempdir()).glob(f"tokentape-{process.pid}-*")
        mode = folder.stat().st_mode & 0o777

    assert 4 == len(lines)
    assert not any("planted-secret" in line for line in lines)
    assert 0o700 == mode


async def test_a_worker_that_keeps_ending_is_started_after_a_growing_pause(tmp_path, monkeypatch):
    """At first at once; never more than five seconds, and for ever."""
    pauses = []
    ended = await asyncio.create_subprocess_exec("false")
    await ended.wait()
    workers = Workers(load(), tmp_path)
    workers._processes[0] = ended

    async def launch(number):
        raise OSError("it ended before it listened")

    async def sleep(pause_s):
        pauses.append(pause_s)
        if len(pauses) == 9:
            raise asyncio.CancelledError

    monkeypatch.setattr(workers, "_launch", launch)
    monkeypatch.setattr("proxy.server.supervisor.asyncio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await workers._watch(0)

    assert [0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5] == pauses


def test_each_worker_has_a_journal_of_its_own():
    """And the first one that of a lone process, so that going from one process to several leaves none behind."""
    settings = load(workers=2, store={"spool_path": "spool/steps"})

    paths = [str(settings_of_worker(settings, number).store.spool_path) for number in range(3)]

    assert ["spool/steps", "spool/steps.1", "spool/steps.2"] == paths


def test_fewer_workers_than_journals_with_steps_are_refused(tmp_path):
    """Nobody would store those steps; an empty journal is nothing."""
    settings = load(workers=2, store={"spool_path": str(tmp_path / "steps")})
    for name in ("steps", "steps.1", "steps.2", "steps.3", "steps.old"):
        (tmp_path / name).write_bytes(b"" if name == "steps.3" else b"TTSP")

    with pytest.raises(ValueError, match="steps.2 has steps .* --workers 3"):
        refuse_left_journals(settings)
    refuse_left_journals(load(workers=3, store={"spool_path": str(tmp_path / "steps")}))
