"""Records the calls of two sessions of each agent of `taped.py`: `python -m tests.system.agents.record_playback`.

The second session is on another day, where the agents read the time zone. Long texts are cut: of them remain the first line and
the lines that only one of the sessions has. Of the tools remain those that are called, or have such lines.
"""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import orjson
from tests.support.fakes import proxying

from proxy.server.listener import simulating
from proxy.simulator.options import Options
from proxy.simulator.script import read_script
from storage import StoreOptions, open_store
from storage.embedded.server import start_embedded

from .conftest import WINDOW
from .environment import Environment, ensure
from .recorded import recorded
from .running import installed_version
from .taped import ANOTHER_DAY, SCRIPT, TAPED, Taped
from .test_loops import TERMS

FOLDER = Path(__file__).with_name("sessions")
PATHS = {"chat": "chat/completions", "messages": "messages", "responses": "responses"}
LONG, LINE = 300, 100  # characters of a text that is cut, and of a line of it


async def main() -> None:
    """Write the sessions of the agents that the command names, or of all."""
    wanted, environment = set(sys.argv[1:]), ensure()
    with TemporaryDirectory() as folder:
        server = await start_embedded(Path(folder) / "store", "acknowledged")
        try:
            for agent in TAPED:
                if not wanted or agent.name in wanted:
                    await _record(agent, environment, Path(folder), f"unix:{server.socket}")
        finally:
            await server.stop()


async def _record(agent: Taped, environment: Environment, folder: Path, store: str) -> None:
    sessions = [await _calls(agent, environment, folder, store, zone) for zone in ("UTC", ANOTHER_DAY)]
    lines = [set(_lines(session)) for session in sessions]
    differing, called = lines[0] ^ lines[1], set(_called(sessions))
    cut = [[[path, _cut(body, differing, called)] for path, body in session] for session in sessions]
    text = orjson.dumps(cut).decode()
    for path, name in ((f"{folder}/", "/home/"), (f"{folder}/".replace("/", "-"), "-home-")):
        text = text.replace(path, name)  # the second one is in names of Claude Code's files
    version = await installed_version(agent.runs, agent.package, environment)
    recording = {"package": agent.package, "version": version, "preset": agent.preset, "sessions": orjson.loads(text)}
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{agent.name}.json").write_bytes(orjson.dumps(recording, option=orjson.OPT_INDENT_2) + b"\n")


async def _calls(agent: Taped, environment: Environment, folder: Path, store: str, zone: str) -> list[tuple[str, Any]]:
    async with AsyncExitStack() as stack:
        opened = await open_store(store, StoreOptions(prefix=token_hex(8)))
        stack.push_async_callback(opened.close)
        options = Options(max_model_len=WINDOW, script=read_script(SCRIPT))
        engine = await stack.enter_async_context(simulating("127.0.0.1:0", options))
        served = await stack.enter_async_context(proxying(engine, opened, **TERMS))
        await agent.play(served.url, "r", environment, folder / "session", {"TZ": zone})
        http = await stack.enter_async_context(aiohttp.ClientSession())
        found = await recorded(http, served.url, "r")
    assert len(found.complete) == agent.calls, f"{agent.name} made {len(found.complete)} calls"
    return [(f"/v1/{PATHS[step['dialect']]}", step["request"]) for step in found.complete]


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield from value.split("\n")
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _lines(each)


def _called(value: Any) -> Iterator[str]:
    """Yield the names of tools that replies call."""
    if isinstance(value, list | tuple):
        for each in value:
            yield from _called(each)
    elif isinstance(value, dict):
        if value.get("type") in ("tool_use", "function_call", "custom_tool_call"):
            yield value["name"]
        for call in value.get("tool_calls") or ():
            yield call["function"]["name"]
        for name in ("messages", "input", "content"):
            yield from _called(value.get(name))


def _cut(value: Any, differing: set[str], called: set[str]) -> Any:
    if isinstance(value, str):
        return value if len(value) <= LONG else _cut_text(value, differing)
    if isinstance(value, list):
        return [_cut(each, differing, called) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _cut_tools(each, differing, called) if name == "tools" else _cut(each, differing, called)
        for name, each in value.items()
    }


def _cut_text(text: str, differing: set[str]) -> str:
    first, *others = text.split("\n")
    return "\n".join((first[:LINE], "[...]", *(line for line in others if line in differing)))


def _cut_tools(tools: list[dict[str, Any]], differing: set[str], called: set[str]) -> list[dict[str, Any]]:
    kept = []
    for tool in tools:
        if tool.get("type") == "namespace":
            kept.append({**tool, "tools": _cut_tools(tool["tools"], differing, called)})
            continue
        own = tool.get("function", tool)
        if own.get("name") not in called and differing.isdisjoint(_lines(own)):
            continue
        short: dict[str, Any] = {name: own[name] for name in ("type", "name", "strict") if name in own}
        short["description"] = _cut_text(own.get("description", ""), differing)
        for schema in ("parameters", "input_schema"):
            if schema in own:
                short[schema] = {"type": "object", "properties": {}}
        kept.append({**tool, "function": short} if "function" in tool else short)
    return kept


if __name__ == "__main__":
    asyncio.run(main())
