"""What `serve` and `simulate` say of themselves. How they serve and stop is in tests/cli/test_main.py."""

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
    """A console that hears when somebody listens."""

    def __init__(self) -> None:
        super().__init__(file=io.StringIO(), width=200)
        self.heard = asyncio.Event()

    def print(self, *words, **said) -> None:
        super().print(*words, **said)
        if "listening" in str(words):
            self.heard.set()


async def stopped(work, notes: Listening) -> None:
    """Run until it listens, then tell it to stop."""
    task = asyncio.create_task(work)
    await notes.heard.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    await task


async def test_serve_says_where_it_listens_and_what_it_uses(tmp_path, monkeypatch):
    """Both APIs, the model API as agents reach it; the store; that the simulator stands in for an engine."""
    monkeypatch.setattr(serving, "set_up", lambda *_: None)
    notes = Listening()
    said = {"listen": "127.0.0.1:0", "control": {"listen": "127.0.0.1:0"}, "store": {"url": f"embedded:{tmp_path}"}}
    await stopped(serving.serve(load(**said, agents={"url": "https://models.example"}), notes), notes)
    text = notes.file.getvalue()

    assert "SIMULATOR" in text
    assert "OPENAI_BASE_URL=https://models.example/v1" in text
    assert f"store     embedded:{tmp_path}" in text
    assert (
        text.index("control   http://127.0.0.1:") < text.index("listening http://127.0.0.1:") < text.index("stopping")
    )


async def test_simulate_as_json_is_one_line_with_its_address(capsys):
    """For programs that start it; people are told on standard error."""
    notes = Listening()
    await stopped(serving.simulate("127.0.0.1:0", Options(model="[m]"), notes, as_json=True), notes)
    told = orjson.loads(capsys.readouterr().out)

    assert "[m]" == told["model"]
    assert f"simulator listening {told['url']}   model '[m]'" in notes.file.getvalue()
