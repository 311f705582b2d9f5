"""`tokentape serve` and `tokentape simulate`: run until a signal and print the addresses."""

from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from proxy.cli.banner import banner, read_engines
from proxy.cli.console import print_json
from proxy.cli.settings import InvalidSettings
from proxy.config.settings import Settings
from proxy.server.listener import RunningServer, running, simulating, with_an_engine
from proxy.server.shutdown import stopped_by_signals
from proxy.server.supervisor import refuse_left_journals, working
from proxy.simulator.options import Options
from proxy.simulator.script import read_script
from proxy.simulator.template import read_template
from proxy.telemetry.logs import set_up


async def serve(settings: Settings, notes: Console) -> None:
    """Run the proxy until SIGINT or SIGTERM."""
    set_up(settings.log.level, settings.log.format)
    with stopped_by_signals() as stop:
        async with AsyncExitStack() as stack:
            complete, is_simulated, served = await _started(stack, settings)
            if is_simulated:
                notes.print("[bold yellow]No engine is configured; the built-in SIMULATOR generates the responses.[/]")
                notes.print("  Its text is meaningless. To use a real engine: --engine http://127.0.0.1:8000")
            for line in banner(complete, served, await read_engines(complete, served)):
                notes.print(line, soft_wrap=True)
            await stop.wait()
            notes.print("stopping: waiting for calls in flight")


async def _started(stack: AsyncExitStack, settings: Settings) -> tuple[Settings, bool, RunningServer]:
    """Start the proxy; return its settings, whether the simulator is its engine, and its addresses.

    Raises:
        InvalidSettings: A start with these settings cannot succeed.
        OSError, StorageError: The start failed for another reason.
    """
    serving = running if settings.workers == 1 else working
    try:
        refuse_left_journals(settings)
        complete, is_simulated = await stack.enter_async_context(with_an_engine(settings))
        return complete, is_simulated, await stack.enter_async_context(serving(complete))
    except ValueError as error:
        raise InvalidSettings(str(error)) from error


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
        options = replace(options, template=read_template(template))
    with stopped_by_signals() as stop:
        async with simulating(listen, options) as url:
            if as_json:
                print_json({"url": url, "model": options.model}, lines=True)
            message = f"[bold]simulator listening {escape(url)}[/]   model {escape(repr(options.model))}"
            notes.print(message, soft_wrap=True)
            await stop.wait()
