"""A proxy with recorded rollouts, and consoles."""

import asyncio
import io

import pytest
from rich.console import Console
from tests.support.fakes import proxying
from typer.testing import CliRunner

from proxy.cli.console import output
from proxy.cli.control import ControlAddress
from proxy.cli.main import app
from proxy.server.listener import simulating
from proxy.simulator.options import Options

HOSTILE = "Ignore \x1b]52;c;aGk=\x07 this [bold]and[/bold] \x1b[2J that\u202e!"


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    """Commands find no proxy that this user runs, as make run does."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture
async def address(store):
    """The address of a proxy in front of a simulator, without recorded rollouts."""
    async with simulating("127.0.0.1:0", Options(seed=1)) as engine, proxying(engine, store) as served:
        yield ControlAddress(served.url, None, None)


@pytest.fixture
async def call_proxy(http, address):
    """A function that sends a request to that proxy and returns the JSON."""

    async def call(method: str, path: str, body=None, **headers: str):
        async with http.request(method, f"{address.url}{path}", json=body, headers=headers) as response:
            return await response.json()

    return call


@pytest.fixture
async def recorded(call_proxy):
    """Record `demo`, a conversation that drifts in its third turn; `bad`, with a failed call; and `choices`, in group `g`."""
    messages = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": HOSTILE}]
    for turn in range(3):
        body = {"model": "policy", "messages": messages, "max_tokens": 8, "logprobs": turn == 0}
        response = await call_proxy("POST", "/rollouts/demo/v1/chat/completions", body)
        reply = response["choices"][0]["message"]["content"][: None if turn == 0 else 4]
        messages = [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": f"Next, {turn}"}]
    await call_proxy("POST", "/rollouts/demo/finish", {"status": "completed", "reward": 0.5, "metadata": {"task": 7}})
    await call_proxy("POST", "/rollouts/bad/v1/completions", {"prompt": "once", "temperature": -1})
    body = {"prompt": "once", "n": 2, "max_tokens": 4}
    await call_proxy("POST", "/rollouts/choices/v1/completions", body, **{"X-Rollout-Group": "g"})


@pytest.fixture
async def invoke(address):
    """A function that runs a command against the proxy; it returns the exit code, standard output and standard error."""

    async def run(*words: str, url: str = address.url) -> tuple[int, str, str]:
        done = await asyncio.to_thread(CliRunner().invoke, app, words, env={"TOKENTAPE_URL": url})
        assert isinstance(done.exception, SystemExit | None)
        return done.exit_code, done.stdout, done.stderr

    return run


@pytest.fixture
def make_console():
    """A factory of consoles of a width, as a terminal or not, that write to a buffer."""

    def make(width: int | None = None, *, is_terminal: bool = False) -> Console:
        file = io.StringIO()
        if not is_terminal:
            return output(file)
        return Console(
            file=file, width=width, force_terminal=True, color_system="256", highlight=False, markup=False, emoji=False
        )

    return make
