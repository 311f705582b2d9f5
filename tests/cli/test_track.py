"""`tokentape track`: each finished rollout is logged once."""

import asyncio
import json
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI
from tests.support.fakes import proxying
from tests.support.forests import make_step
from tests.support.playbacks import at, inherit, record
from typer.testing import CliRunner

from proxy.cli import track as tracking
from proxy.cli.main import app
from proxy.cli.track import Log, Tracked, is_over, printed
from proxy.server.listener import simulating
from proxy.simulator.options import Options
from tokentape import AsyncClient, Client, ClientError


@pytest.fixture
async def simulated(store):
    """The URLs of a proxy and of the simulator."""
    async with simulating("127.0.0.1:0", Options(seed=1)) as engine, proxying(engine, store) as served:
        yield served.url, engine


async def tracked(url, path, *words):
    """Run the command once; return its output."""
    command = ["track", "--url", url, "--file", str(path), "--once", *words]
    done = await asyncio.to_thread(CliRunner().invoke, app, command)
    assert done.exit_code == 0, done.output
    return done.stdout


HELLO = [{"role": "user", "content": "Hello"}]


async def played(client, name, *, reward=1.0, status="completed", models=("policy",)):
    """Record a turn of each model in a rollout, and finish it."""
    opened = await client.open_rollout(name)
    async with AsyncOpenAI(base_url=opened["base_url"], api_key=opened["api_key"]) as agent:
        for model in models:
            await agent.chat.completions.create(model=model, messages=HELLO, max_tokens=8)
    await client.finish_rollout(name, status, reward=reward)


def names_in(path):
    return [json.loads(line)["rollout_id"] for line in path.read_text().splitlines()]


async def test_what_is_over_is_logged_with_its_versions(simulated, tmp_path):
    """A completed rollout waits for its reward; its oldest token determines its staleness when it is logged."""
    path, (url, _) = tmp_path / "log", simulated
    async with AsyncClient(url) as client:
        await client.put_policy(3)
        await played(client, "old", reward=0.5)
        await client.put_policy(5)
        await played(client, "failed", reward=None, status="failed")
        await played(client, "waits", reward=None)
        await client.open_rollout("open")
        await tracked(url, path)
        await client.patch_rollout("waits", reward=2.0)
        await tracked(url, path)
        counts = (await client.rollout("old"))["counts"]

    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert [entry["rollout_id"] for entry in entries] == ["old", "failed", "waits"]
    assert {
        **{name: counts[name] for name in ("steps", "prompt_tokens", "sampled_tokens", "flagged")},
        "completed": 1,
        "reward": 0.5,
        "drift": 0,
        "policy_version": 3,
        "staleness": 2,
    } == entries[0]["values"]
    assert [
        tuple(entry["values"].get(name) for name in ("reward", "completed", "staleness")) for entry in entries[1:]
    ] == [(None, 0, 0), (2.0, 1, 0)]


async def test_the_version_is_of_live_tokens(simulated, store, tmp_path):
    """A playback has steps of an earlier version, which its source sampled; without a live step it has no version."""
    path, (url, _) = tmp_path / "log", simulated
    async with AsyncClient(url) as client:
        await client.put_policy(3)
        for name in ("branch", "copy"):
            await client.open_rollout(name)
            await record(store, at(inherit(make_step("a", [1], [10], rollout_id="source"), name), "1"))
        await played(client, "branch")
        await client.finish_rollout("copy", "completed", reward=0.0)
        await tracked(url, path)

    entries = {entry["rollout_id"]: entry["values"] for entry in map(json.loads, path.read_text().splitlines())}
    assert (entries["branch"]["policy_version"], entries["copy"].get("policy_version")) == (3, None)


@pytest.mark.parametrize(("policy", "version"), [("coder", 8), ("default", 4), ("other", None)])
async def test_the_versions_belong_to_one_policy(simulated, store, tmp_path, policy, version):
    """Of a rollout with calls of several policies; without one of its calls, or with versions that are no numbers, none."""
    policies = {name: {"models": [name]} for name in ("coder", "other")}
    async with proxying(simulated[1], store, policies=policies) as served, AsyncClient(served.url) as client:
        for name, announced in (("coder", 8), ("default", 4), ("other", "first")):
            await client.put_policy(announced, policy=name)
        await played(client, "r1", models=("coder", "policy", "other"))
        await client.put_policy(10, policy="coder")
        await tracked(served.url, tmp_path / "log", "--policy", policy)

    values = json.loads((tmp_path / "log").read_text())["values"]
    staleness = {"coder": 2, "default": 0}.get(policy)
    assert (values.get("policy_version"), values.get("staleness")) == (version, staleness)


async def test_rollouts_that_end_while_the_proxy_is_away_are_logged(simulated, store, tmp_path, unused_tcp_port):
    """Each once, and those that end later as well."""
    logged, loop = asyncio.Queue(), asyncio.get_running_loop()

    def put(name):
        loop.call_soon_threadsafe(logged.put_nowait, name)
        if name == "last":
            raise KeyboardInterrupt

    def follow():
        with Client(listening) as client, (tmp_path / "log").open("a+b") as file, pytest.raises(KeyboardInterrupt):
            log = Log(file, 0, lambda number, entry, text: put(entry["rollout_id"]))
            tracking.follow(client, log, Tracked(tmp_path / "log"))

    url, engine = simulated
    listen, listening = f"127.0.0.1:{unused_tcp_port}", f"http://127.0.0.1:{unused_tcp_port}"
    async with AsyncClient(url) as client:  # a replica
        async with proxying(engine, store, listen=listen):
            await played(client, "before")
            following = asyncio.create_task(asyncio.to_thread(follow))
            seen = [await logged.get()]
            await played(client, "meanwhile")
            seen.append(await logged.get())
        await played(client, "away")
        async with proxying(engine, store, listen=listen):
            seen.append(await logged.get())
            await played(client, "last")
            await following

    assert seen == ["before", "meanwhile", "away"]
    assert names_in(tmp_path / "log") == [*seen, "last"]


class Died(Exception):
    """The process died."""


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["written", "torn", "logged", "tracked"]), st.integers(0, 5)), max_size=6))
def test_a_tracker_has_each_rollout_once_wherever_the_process_dies(tmp_path_factory, deaths):
    """Before or after a line is written, while it is written, and before the tracker kept what it got."""
    path = tmp_path_factory.mktemp("log") / "log"
    kept: dict[int, str] = {}

    def attempt(kind, alive):
        lines = 0

        def track(number, entry, text):
            nonlocal lines
            lines += 1
            if lines > alive and kind == "written":
                raise Died
            if not (lines > alive and kind == "tracked"):
                assert kept.setdefault(number, entry["rollout_id"]) == entry["rollout_id"]
            if lines > alive and kind in ("tracked", "logged"):
                raise Died

        start = next(number for number in range(len(kept) + 1) if number not in kept)
        with path.open("a+b") as file:
            log = Log(file, start, track)
            for name in ("a", "b", "c", "d"):
                if name not in log.known:
                    if lines >= alive and kind == "torn":
                        file.write(b'{"rollout_id":"')
                        raise Died
                    log.add({"rollout_id": name, "values": {}})

    for kind, alive in deaths:
        try:
            attempt(kind, alive)
        except Died:
            continue
    attempt("ends", 99)

    assert names_in(path) == [kept[number] for number in range(4)] == ["a", "b", "c", "d"]


def test_a_file_belongs_to_one_process_and_one_run(tmp_path):
    """A second process, or a run with more rollouts than the file, is refused."""
    with (tmp_path / "log").open("a+b") as first, (tmp_path / "log").open("a+b") as second:
        Log(first, 0, print)
        with pytest.raises(ValueError, match="another process"):
            Log(second, 0, print)
    with (tmp_path / "log").open("a+b") as third, pytest.raises(ValueError, match="use another --run"):
        Log(third, 1, print)


@pytest.mark.parametrize("content", [b"my notes", b'{"loss": 1}\n{"rollout_id": "', b"a line\n", b"[1]\n"])
def test_a_file_with_something_else_is_refused_unchanged(tmp_path, content):
    """Its last line is not taken for one that a process left when it died."""
    path = tmp_path / "log"
    path.write_bytes(content)
    command = ["track", "--once", "--url", "http://127.0.0.1:9", "--file", str(path)]
    done = CliRunner().invoke(app, command)

    assert (done.exit_code, f"{path} has another text than rollouts" in done.stderr) == (1, True)
    assert content == path.read_bytes()


@pytest.mark.parametrize(("status", "without", "rewarded"), [("open", 0, 0), ("completed", 0, 1), ("aborted", 1, 1)])
def test_only_rollouts_that_failed_are_logged_without_a_reward(status, without, rewarded):
    assert [is_over({"status": status, "reward": reward}) for reward in (None, 0.0)] == [without, rewarded]


async def test_a_wrong_key_ends_the_program_and_another_failure_does_not(engine, tmp_path, monkeypatch, capsys):
    """Errors that may pass are printed; the rollouts are read again afterwards."""
    answers = iter([503, 401])

    async def respond(request, body):
        return web.json_response({}, status=next(answers))

    engine.respond = respond
    monkeypatch.setattr(tracking, "RETRY_S", 0.0)
    monkeypatch.setattr(tracking, "Client", lambda url, **options: Client(url, attempts=1, **options))
    with pytest.raises(ClientError, match="401"):
        await asyncio.to_thread(tracking.track, engine.url, None, Tracked(tmp_path / "log"), 0, printed)

    assert "503" in capsys.readouterr().err


async def test_with_once_a_proxy_that_is_away_is_an_error(tmp_path, monkeypatch, unused_tcp_port):
    """The command does not wait for it: it may run from a schedule."""
    monkeypatch.setattr(tracking, "Client", lambda url, **options: Client(url, attempts=1, **options))
    command = ["track", "--once", "--url", f"http://127.0.0.1:{unused_tcp_port}", "--file", str(tmp_path / "log")]
    done = await asyncio.to_thread(CliRunner().invoke, app, command)

    assert (done.exit_code, str(unused_tcp_port) in done.stderr) == (1, True)


async def test_each_nth_rollout_is_logged_with_its_text(simulated, tmp_path):
    """The output has the lines of the file; a tracker gets the text that `show --whole` prints."""
    url, texts = simulated[0], {}
    async with AsyncClient(url) as client:
        for name in ("a", "b", "c"):
            await played(client, name)
    options = Tracked(tmp_path / "log", sample=2, once=True)
    await asyncio.to_thread(
        tracking.track, url, None, options, 0, lambda number, entry, text: texts.update({entry["rollout_id"]: text})
    )
    output = await tracked(url, tmp_path / "other")

    assert list(texts) == [json.loads(line)["rollout_id"] for line in output.splitlines()] == ["a", "b", "c"]
    assert texts["b"] is None
    assert "Hello" in texts["a"]
    assert texts["c"].startswith("c  completed  reward 1\n")


def test_a_run_of_mlflow_is_found_by_any_name_that_its_search_can_express(monkeypatch):
    """Its search language has two kinds of quotes, and no escapes."""
    filters = []
    client = Mock()
    client.search_runs = lambda _places, query: filters.append(query) or [Mock(data=Mock(metrics={"rollouts": 3.0}))]
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=lambda: client))
    monkeypatch.setitem(sys.modules, "mlflow.entities", SimpleNamespace(Metric=Mock()))

    assert [tracking.mlflow_run("e", name)[0] for name in ("a", "it's", 'the "b"')] == [3, 3, 3]
    assert [query.removeprefix("attributes.run_name = ") for query in filters] == ["'a'", '"it\'s"', "'the \"b\"'"]
    with pytest.raises(ValueError, match="use another one"):
        tracking.mlflow_run("e", 'it\'s "b"')


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--wandb", "p", "--mlflow", "e"), 2, "either --wandb or --mlflow"),
        (("--wandb", "p"), 1, "--wandb requires wandb: pip install 'wandb'"),
        (("--mlflow", "e"), 1, "--mlflow requires mlflow: pip install 'mlflow-skinny'"),
        (("--file", "/nowhere/log"), 1, "/nowhere/log"),
    ],
)
def test_what_the_command_lacks_is_named(tmp_path, monkeypatch, words, code, message):
    for package in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, package, None)
    command = ["track", "--once", "--url", "http://127.0.0.1:9", "--file", str(tmp_path / "log"), *words]
    done = CliRunner().invoke(app, command)

    assert (done.exit_code, message in done.stderr) == (code, True)
