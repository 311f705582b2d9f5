"""`tokentape serve` and `tokentape simulate`: run until a signal; print the engines with their states, and the addresses."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from errno import EADDRINUSE
from importlib.metadata import metadata
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson
from rich.console import Console
from rich.markup import escape

from proxy.api.requests import path_prefix
from proxy.cli.console import print_json, visible
from proxy.cli.running import announced, running_urls
from proxy.cli.settings import InvalidSettings
from proxy.config.addresses import without_secrets
from proxy.config.settings import Settings
from proxy.server.listener import RunningServer, running, simulating, with_an_engine
from proxy.server.playback import with_tapes
from proxy.server.shutdown import stopped_by_signals
from proxy.server.supervisor import refuse_left_journals, working
from proxy.simulator.options import Options
from proxy.simulator.script import read_script
from proxy.telemetry.logs import set_up
from storage.errors import StorageError


async def serve(settings: Settings, notes: Console) -> None:
    """Run the proxy until SIGINT or SIGTERM.

    Raises:
        InvalidSettings: A start with these settings cannot succeed.
        OSError, StorageError: The start failed for another reason.
    """
    set_up(settings.log.level, settings.log.format)
    with stopped_by_signals() as stop:
        async with AsyncExitStack() as stack:
            tapes, is_simulated = list[str](), False
            try:
                if settings.tape.file is not None:
                    complete, store = await stack.enter_async_context(with_tapes(settings, settings.tape.file))
                    tapes = [name async for name in store.names()]
                    served = await stack.enter_async_context(running(complete, store))
                else:
                    refuse_left_journals(settings)
                    complete, is_simulated = await stack.enter_async_context(with_an_engine(settings))
                    serving = running if settings.workers == 1 else working
                    served = await stack.enter_async_context(serving(complete))
            except ValueError as error:
                raise InvalidSettings(str(error)) from error
            except StorageError:  # an embedded store has one owner
                for url in running_urls():
                    notes.print(f"A TokenTape proxy runs at {escape(url)}")
                raise
            except OSError as error:
                if getattr(error.__cause__, "errno", None) != EADDRINUSE:
                    raise
                raise OSError(f"{error}. {await _taken_by(settings)}") from error
            stack.enter_context(announced(_local(served.control_url)))
            if is_simulated:
                notes.print("[bold yellow]No engine is configured; the built-in SIMULATOR generates the responses.[/]")
                notes.print("  Its text is meaningless. To use a real engine: --engine http://127.0.0.1:8000")
            engines = [] if tapes else await read_engines(complete, served)
            for line in banner(complete, served, engines, tapes):
                notes.print(line, soft_wrap=True)
            await stop.wait()
            notes.print("stopping: waiting for calls in flight")


async def simulate(
    listen: str,
    options: Options,
    notes: Console,
    *,
    script: Path | None = None,
    template: Path | None = None,
    as_json: bool,
) -> None:
    """Run the simulator until SIGINT or SIGTERM. With `as_json`, print its address as one line of JSON.

    Raises:
        ValueError, OSError: The script or the template cannot be read.
    """
    if script is not None:
        options = replace(options, script=read_script(script))
    if template is not None:
        options = replace(options, template=await asyncio.to_thread(template.read_text, encoding="utf-8"))
    with stopped_by_signals() as stop:
        async with simulating(listen, options) as url:
            if as_json:
                print_json({"url": url, "model": options.model}, lines=True)
            message = f"[bold]simulator listening {escape(url)}[/]   model {escape(repr(options.model))}"
            notes.print(message, soft_wrap=True)
            await stop.wait()


async def _taken_by(settings: Settings) -> str:
    """Return what uses the address, and what to do."""
    from proxy.cli.check import proxy_runs  # only for this

    by = "A TokenTape proxy runs there" if await proxy_runs(settings) else "Another program uses it"
    return f"{by}. Stop it, or choose another address: --listen 127.0.0.1:9000 (make run LISTEN=127.0.0.1:9000)."


_MAX_TAPES: Final = 10
_TIMEOUT_S: Final = 3  # an engine that hangs delays the start of the display, not the proxy
_PAGES: Final = Path(__file__).parents[2] / "docs" / "index.md"  # in a clone; a wheel does not contain it


async def read_engines(settings: Settings, served: RunningServer) -> list[Mapping[str, Any]]:
    """Return the engines as the proxy shows them, which checks them for it; [] if that takes too long."""
    keys = settings.control.api_keys
    headers = {"Authorization": f"Bearer {keys[0].get_secret_value()}"} if keys else {}
    url = f"{_local(served.control_url)}/engines"
    try:
        async with (
            asyncio.timeout(_TIMEOUT_S),
            aiohttp.ClientSession(headers=headers) as session,
            session.get(url, ssl=False) as response,  # its own certificate may be for another name
        ):
            return list(orjson.loads(await response.read())["engines"])
    except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError, KeyError):
        return []


def banner(
    settings: Settings, served: RunningServer, engines: Sequence[Mapping[str, Any]], tapes: Sequence[str] = ()
) -> Iterator[str]:
    """Yield the lines, in the markup of rich. The last one has `listening`."""
    url, agents_url = escape(served.url), escape(settings.agents.url or served.url)
    if tapes:
        shown = (f"{visible(name)}   OPENAI_BASE_URL={agents_url}{path_prefix(name)}/v1" for name in tapes[:_MAX_TAPES])
        yield from (f"tape      {escape(line)}" for line in shown)
        if len(tapes) > _MAX_TAPES:
            yield f"tapes     {len(tapes)} in all"
    elif engines:
        yield from (f"engine    {escape(engine['url'])} {_state(engine)}" for engine in engines)
    else:
        yield from (f"engine    {escape(endpoint.url)} (no response yet)" for endpoint in settings.engines.endpoints)
    yield f"store     {escape(without_secrets(settings.store.url))}"
    yield f"docs      {escape(_documentation())}"
    if served.control_url != served.url:
        yield f"control   {escape(served.control_url)}"
    yield f"web page  {escape(_local(served.control_url))}/ui"
    yield f"[bold]listening {url}[/]   OPENAI_BASE_URL={agents_url}/v1"


def _state(engine: Mapping[str, Any]) -> str:
    if engine["healthy"]:
        kind = f"({escape(' '.join(filter(None, (engine['kind'], engine['version']))))})"
        if engine["token_ids"] is False:
            kind += " [bold red]NO TOKEN IDS[/]: its calls are recorded as text, and none can be exported for training."
        return kind
    reason = str(engine["last_fault"] or "no response").removeprefix(f"Engine {engine['name']} is unreachable: ")
    return f"[bold red]UNREACHABLE[/]: {escape(reason)}. Calls get 503 until it responds."


def _local(url: str) -> str:
    """Return a URL that this machine can open, also if the proxy listens on all addresses."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def _documentation() -> str:
    """Return the pages of the clone that this runs from, or the URL that the package names."""
    if _PAGES.is_file():
        return str(_PAGES)
    urls = (str(url).partition(", ") for url in metadata("tokentape").get_all("Project-URL") or ())
    return {name: url for name, _, url in urls}.get("Documentation", "docs/index.md in the repository")
