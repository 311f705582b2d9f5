"""Starting the proxy and the simulator, and the lines that are printed at a start."""

import asyncio
import io
import os
import signal

import orjson
import pytest
from aiohttp import web
from rich.console import Console
from tests.support.fakes import proxying, settings_for
from tests.support.taped import record
from typer.testing import CliRunner

from proxy.cli import serve as printing
from proxy.cli import serve as serving
from proxy.cli.main import app
from proxy.cli.runner import Exit
from proxy.cli.serve import banner, read_engines
from proxy.cli.settings import InvalidSettings
from proxy.config.settings import load
from proxy.server.listener import RunningServer, simulating
from proxy.simulator.options import Options


class Listening(Console):
    """A console with an event that is set once "listening" is printed."""

    def __init__(self) -> None:
        super().__init__(file=io.StringIO(), width=200)
        self.is_listening = asyncio.Event()

    def print(self, *words, **options) -> None:
        super().print(*words, **options)
        if "listening" in str(words):
            self.is_listening.set()


async def run_until_listening(work, notes: Listening) -> None:
    """Run a coroutine until it listens, then send SIGTERM."""
    task = asyncio.create_task(work)
    await notes.is_listening.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    await task


async def test_serve_prints_its_addresses_the_store_and_whether_it_uses_the_simulator(tmp_path, monkeypatch):
    """The model API has the URL for agents."""
    monkeypatch.setattr(serving, "set_up", lambda *_: None)
    notes = Listening()
    settings = {"listen": "127.0.0.1:0", "control": {"listen": "127.0.0.1:0"}, "store": {"url": f"embedded:{tmp_path}"}}
    await run_until_listening(serving.serve(load(**settings, agents={"url": "https://models.example"}), notes), notes)
    text = notes.file.getvalue()

    assert "SIMULATOR" in text
    assert "OPENAI_BASE_URL=https://models.example/v1" in text
    assert f"store     embedded:{tmp_path}" in text
    assert (
        text.index("control   http://127.0.0.1:") < text.index("listening http://127.0.0.1:") < text.index("stopping")
    )


async def test_serve_prints_the_base_url_of_each_tape(store, tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "set_up", lambda *_: None)
    path = await record(store, tmp_path, "r1", "a b")
    notes = Listening()
    await run_until_listening(serving.serve(settings_for(None, tape={"file": str(path)}), notes), notes)
    lines = notes.file.getvalue().splitlines()
    url = next(line.split()[1] for line in lines if line.startswith("listening"))

    assert {line for line in lines if line.startswith("tape ")} == {
        f"tape      r1   OPENAI_BASE_URL={url}/rollouts/r1/v1",
        f"tape      a b   OPENAI_BASE_URL={url}/rollouts/a%20b/v1",
    }
    many = list(banner(settings_for(None), SERVED, [], [str(number) for number in range(12)]))
    assert many[10] == "tapes     12 in all"


async def test_a_tape_that_cannot_be_read_ends_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "set_up", lambda *_: None)
    (tmp_path / "bad.jsonl").write_text("{}")
    for name, error in (("bad.jsonl", InvalidSettings), ("none.jsonl", OSError)):
        with pytest.raises(error):
            await serving.serve(settings_for(None, tape={"file": str(tmp_path / name)}), Listening())


@pytest.mark.parametrize("more", ["--engine http://127.0.0.1:9", "--store embedded:x", "--workers 2"])
def test_a_tape_excludes_engines_stores_and_workers(more):
    done = CliRunner().invoke(app, ["serve", "--playback", "x", *more.split()])

    assert (done.exit_code, "--playback has an engine" in done.stderr) == (Exit.MISUSED, True)


async def test_simulate_with_json_prints_one_line_with_its_address(capsys):
    """Standard error has the text for people."""
    notes = Listening()
    await run_until_listening(serving.simulate("127.0.0.1:0", Options(model="[m]"), notes, as_json=True), notes)
    payload = orjson.loads(capsys.readouterr().out)

    assert payload["model"] == "[m]"
    assert f"simulator listening {payload['url']}   model '[m]'" in notes.file.getvalue()


SERVED = RunningServer("http://0.0.0.0:8400", "http://0.0.0.0:8401")
KEYS = {"control": {"api_keys": ["control-key"]}}


@pytest.fixture
async def simulator():
    async with simulating("127.0.0.1:0", Options()) as url:
        yield url


async def lines_of(store, endpoints) -> list[str]:
    settings = settings_for(None, engines={"endpoints": endpoints}, **KEYS)
    async with proxying(None, store, engines={"endpoints": endpoints}, **KEYS) as served:
        return list(banner(settings, served, await read_engines(settings, served)))


async def test_an_engine_has_its_kind_and_version_or_is_unreachable_in_words(store, simulator):
    """The control key of the settings is used."""
    up, down, *_ = await lines_of(store, [{"url": simulator}, {"url": "http://127.0.0.1:9"}])

    assert up.startswith(f"engine    {simulator} (vllm ")
    assert down == (
        "engine    http://127.0.0.1:9 [bold red]UNREACHABLE[/]: cannot connect to 127.0.0.1:9: Connection refused. "
        "Calls get 503 until it responds."
    )


async def test_an_engine_without_token_ids_is_named_in_red(store, engine):
    """It lists its models, and no route shows its type."""
    engine.fixed_responses = {"/health": {}, "/v1/models": {"data": [{"id": "m"}]}}
    first, *_ = await lines_of(store, [{"url": engine.url}])

    assert f"engine    {engine.url} (plain) [bold red]NO TOKEN IDS[/]: its calls are recorded as text" in first


async def test_an_engine_that_does_not_respond_delays_the_lines_for_a_limited_time(store, engine, monkeypatch):
    monkeypatch.setattr(printing, "_TIMEOUT_S", 0.1)
    responds = asyncio.Event()

    async def respond(request, body):
        await responds.wait()
        return web.Response()

    engine.respond = respond
    first, *_ = await lines_of(store, [{"url": engine.url}])
    responds.set()

    assert f"engine    {engine.url} (no response yet)" == first


def test_the_page_the_docs_and_both_addresses_are_named(monkeypatch, tmp_path):
    """The page's address can be opened on this machine, and passwords are hidden."""
    settings = settings_for("http://e:1", store={"url": "redis://:secret@s"}, agents={"url": "https://models.example"})
    lines = list(banner(settings, SERVED, []))

    assert [
        "engine    http://e:1 (no response yet)",
        "store     redis://\u2026@s",
        f"docs      {printing._PAGES}",
        "control   http://0.0.0.0:8401",
        "web page  http://127.0.0.1:8401/ui",
        "[bold]listening http://0.0.0.0:8400[/]   OPENAI_BASE_URL=https://models.example/v1",
    ] == lines
    assert printing._PAGES.is_file()
    monkeypatch.setattr(printing, "_PAGES", tmp_path / "none")
    (docs,) = [line for line in banner(settings, SERVED, []) if line.startswith("docs")]
    assert str(tmp_path) not in docs
