"""The output of `serve` and `simulate`. tests/cli/test_main.py runs them as processes."""

import asyncio
import io
import os
import signal

import orjson
from rich.console import Console

from proxy.cli import serve as serving
from proxy.config.settings import load
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


async def test_simulate_with_json_prints_one_line_with_its_address(capsys):
    """Standard error has the text for people."""
    notes = Listening()
    await run_until_listening(serving.simulate("127.0.0.1:0", Options(model="[m]"), notes, as_json=True), notes)
    payload = orjson.loads(capsys.readouterr().out)

    assert "[m]" == payload["model"]
    assert f"simulator listening {payload['url']}   model '[m]'" in notes.file.getvalue()
