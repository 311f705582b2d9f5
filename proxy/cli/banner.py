"""The lines that `tokentape serve` prints at its start: the engines and their states, the store, and the addresses."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import metadata
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson
from rich.markup import escape

from proxy.config.addresses import without_secrets
from proxy.config.settings import Settings
from proxy.server.listener import RunningServer

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


def banner(settings: Settings, served: RunningServer, engines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines, in the markup of rich. The last one has `listening`."""
    if engines:
        yield from (f"engine    {escape(engine['url'])} {_state(engine)}" for engine in engines)
    else:
        yield from (f"engine    {escape(endpoint.url)} (no response yet)" for endpoint in settings.engines.endpoints)
    yield f"store     {escape(without_secrets(settings.store.url))}"
    yield f"docs      {escape(_documentation())}"
    if served.control_url != served.url:
        yield f"control   {escape(served.control_url)}"
    yield f"web page  {escape(_local(served.control_url))}/ui"
    url, agents_url = escape(served.url), escape(settings.agents.url or served.url)
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
