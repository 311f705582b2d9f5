"""The command line: serve | simulate | list | show | tail | export | audit | check.

Holds the commands and their options, nothing of what they do: that is in `terminal`, `download`, `audit` and `check`, imported
where a command needs it, so that `--help` is quick. Exit codes: `terminal.exits`.
"""

from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from proxy.cli.exit_codes import Exit
from proxy.cli.options import (
    USUAL_URL,
    AsJson,
    ConfigFile,
    OneRolloutId,
    ProxyKey,
    ProxyUrl,
    RolloutId,
    StoreUrl,
    tokentape,
)

if TYPE_CHECKING:
    from proxy.cli.show import ControlAddress
    from proxy.config.settings import Settings

app = typer.Typer(name="tokentape", callback=tokentape, no_args_is_help=True, pretty_exceptions_enable=False)


@app.command()
def serve(
    config: ConfigFile = None,
    listen: Annotated[str | None, typer.Option(help="HOST:PORT; 127.0.0.1:8400 by default.")] = None,
    engine: Annotated[list[str] | None, typer.Option(help="Base URL of an engine; may be repeated.")] = None,
    store: Annotated[str | None, typer.Option(help="embedded:PATH, redis://…, redis+cluster://….")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes that share the port; 1 by default.")] = None,
    *,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen beyond loopback without keys.")] = False,
) -> None:
    """Run the proxy. Without an engine, it starts the simulator and says so."""
    said = {"listen": listen, "workers": workers}
    settings = _settings(config, engine=engine, store=store, insecure=insecure, **said)
    from proxy.cli.console import notes  # noqa: PLC0415 - keeps `--help` quick
    from proxy.cli.serve import serve as serve_until_told  # noqa: PLC0415

    _run(serve_until_told(settings, notes()))


@app.command(hidden=True)
def worker() -> None:
    """Serve as `serve --workers` says by standard input, which starts this."""
    from proxy.server.worker import work  # noqa: PLC0415 - keeps `--help` quick

    _run(work())


@app.command()
def simulate(  # noqa: PLR0917 - each is an option with a name of its own
    listen: Annotated[str, typer.Option(help="HOST:PORT.")] = "127.0.0.1:8401",
    model: Annotated[str, typer.Option(help="Name of the model it serves.")] = "simulated",
    max_model_len: Annotated[int, typer.Option(help="Longest prompt and completion, in tokens.")] = 32768,
    seed: Annotated[int | None, typer.Option(help="Seed of requests without one; none: by chance.")] = None,
    token_delay_s: Annotated[float, typer.Option(help="Time between tokens, to watch a stream.")] = 0.0,
    shape: Annotated[Literal["vllm", "sglang"], typer.Option(help="Whose protocol it speaks.")] = "vllm",
    script: Annotated[Path | None, typer.Option(help="YAML file of what it replies, turn by turn.")] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Run a small engine that speaks vLLM's or SGLang's protocol: to try things with, on any machine."""
    from proxy.cli.console import notes  # noqa: PLC0415
    from proxy.cli.serve import simulate as simulate_until_told  # noqa: PLC0415
    from proxy.simulator.options import Options  # noqa: PLC0415 - keeps `--help` and `check` quick

    options = Options(model, max_model_len, seed, token_delay_s, shape=shape)
    _run(simulate_until_told(listen, options, notes(), script=script, as_json=as_json))


@app.command("list")
def list_(  # noqa: PLR0913, PLR0917 - each is an option with a name of its own
    url: ProxyUrl = USUAL_URL,
    store: StoreUrl = None,
    status: Annotated[str | None, typer.Option(help="Only of this status: open, completed, …")] = None,
    group: Annotated[str | None, typer.Option(help="Only rollouts of this group.")] = None,
    since: Annotated[str | None, typer.Option(help="Only rollouts opened since 90s, 15m, 2h or 3d ago.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many at the most.")] = 50,
    api_key: ProxyKey = None,
    *,
    groups: Annotated[bool, typer.Option("--groups", help="Groups instead of rollouts.")] = False,
    as_json: AsJson = False,
) -> None:
    """List rollouts, or groups, newest first."""
    if groups and (group or since):
        _misused("--group and --since choose rollouts, not groups")
    from proxy.cli.console import answers  # noqa: PLC0415 - keeps `--help` quick
    from proxy.cli.show import ago, print_list  # noqa: PLC0415

    try:
        filters = {"status": status, "group_id": group, "since": None if since is None else ago(since)}
    except ValueError as error:
        _misused(str(error))
    noun = "groups" if groups else "rollouts"
    _run(print_list(_place(url, store, api_key), answers(), noun, limit, as_json=as_json, **filters))


@app.command()
def show(  # noqa: PLR0913 - each is an option with a name of its own
    rollout: RolloutId,
    url: ProxyUrl = USUAL_URL,
    store: StoreUrl = None,
    step: Annotated[str | None, typer.Option(help="Only this step, by its id or its index.")] = None,
    api_key: ProxyKey = None,
    *,
    ids: Annotated[bool, typer.Option("--ids", help="Token ids, too.")] = False,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Sampled tokens, too, coloured by logprob.")] = False,
    whole: Annotated[bool, typer.Option("--whole", help="Long messages are not cut.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print a rollout: what was sampled bright, what was not dimmed, and what is wrong with it."""
    from proxy.cli.console import answers  # noqa: PLC0415 - keeps `--help` quick
    from proxy.cli.render.rollout import StepView  # noqa: PLC0415
    from proxy.cli.show import print_rollout, print_step  # noqa: PLC0415

    place, out = _place(url, store, api_key), answers()
    view = StepView(ids, logprobs, whole, with_values=not out.is_terminal or out.no_color)
    if step is None:
        _run(print_rollout(place, out, rollout, view, as_json=as_json))
    else:
        _run(print_step(place, out, rollout, step, view, as_json=as_json))


@app.command()
def tail(
    rollout: OneRolloutId = None,
    url: ProxyUrl = USUAL_URL,
    last: Annotated[int, typer.Option("--last", "-n", min=0, help="Of a rollout: how many last steps.")] = 10,
    api_key: ProxyKey = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Follow steps as they are stored, a line each, until Ctrl-C."""
    from proxy.cli.console import answers  # noqa: PLC0415 - keeps `--help` quick
    from proxy.cli.tail import tail as follow  # noqa: PLC0415

    _run(follow(_place(url, None, api_key), rollout, last, answers(), as_json=as_json))


@app.command()
def export(  # noqa: PLR0913, PLR0917 - each is an option with a name of its own
    url: Annotated[str | None, typer.Option(help="A running proxy's control API.")] = None,
    store: Annotated[str | None, typer.Option(help="Or a store, read directly.")] = None,
    form: Annotated[str, typer.Option("--format", help="The format of the rows.")] = "sequences",
    rollout: Annotated[list[str] | None, typer.Option(help="Only this rollout; may be repeated.")] = None,
    group: Annotated[str | None, typer.Option(help="Only this group.")] = None,
    include: Annotated[str, typer.Option(help="exact, or with flagged or retokenized steps.")] = "exact",
    container: Annotated[str, typer.Option(help="ndjson, json, parquet, arrow or msgpack.")] = "ndjson",
    query: Annotated[
        list[str] | None, typer.Option(help="More of what GET /export takes, as branches=last; may be repeated.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File to write; standard output if none.")] = None,
    api_key: Annotated[str | None, typer.Option(help="A key for the control API.", envvar="TOKENTAPE_API_KEY")] = None,
    push: Annotated[str | None, typer.Option(help="Post scored_data groups to this Atropos service instead.")] = None,
    group_size: Annotated[
        int | None, typer.Option(min=1, help="With --push: rollouts of a whole group, where calls made it.")
    ] = None,
    max_len: Annotated[int | None, typer.Option(min=1, help="With --push: the longest sequence to post.")] = None,
    env_id: Annotated[int | None, typer.Option(help="With --push: as the service's /register-env gave it.")] = None,
    *,
    force_partial: Annotated[bool, typer.Option("--force-partial", help="With --push: also what is left.")] = False,
    as_json: AsJson = False,
) -> None:
    """Export rollouts as rows that a trainer takes."""
    from proxy.cli.export import ExportRequest, export_to  # noqa: PLC0415
    from proxy.cli.push import push_all  # noqa: PLC0415

    if (url is None) == (store is None):
        _misused("give either --url (a running proxy) or --store (a store nobody else has open)")
    more = tuple((name, value) for name, _, value in (each.partition("=") for each in query or ()))
    wanted = ExportRequest(form, tuple(rollout or ()), group, include, container, more)
    settings = None if store is None else _settings(None, store=store, listen="127.0.0.1:0")
    if push is None:
        if as_json and out is None:
            _misused("--json tells of the rows on standard output: give --out for the rows themselves")
        _run(export_to(url, settings, wanted, out, api_key=api_key, as_json=as_json))
        return
    from proxy.cli.push import Delivery  # noqa: PLC0415

    if rollout or query or out is not None or form not in {"sequences", "scored_data"}:
        _misused("--push takes whole groups (no --rollout, --query, --out), in scored_data")
    to = Delivery(push, group_size, env_id, force_partial, max_len)
    if not _run(push_all(url, settings, wanted, to, api_key=api_key, as_json=as_json)):
        raise typer.Exit(Exit.FAILED)


@app.command()
def audit(  # noqa: PLR0913, PLR0917 - each is an option with a name of its own
    engine: Annotated[str, typer.Option(help="Base URL of the engine that scores.")],
    url: Annotated[str | None, typer.Option(help="A running proxy's control API, to take rows from.")] = None,
    file: Annotated[Path | None, typer.Option(help="Or a file that export wrote (sequences, ndjson).")] = None,
    rollout: Annotated[list[str] | None, typer.Option(help="Only this rollout; may be repeated.")] = None,
    group: Annotated[str | None, typer.Option(help="Only this group.")] = None,
    api_key: Annotated[str | None, typer.Option(help="A key for the control API.", envvar="TOKENTAPE_API_KEY")] = None,
    engine_api_key: Annotated[
        str | None, typer.Option(help="A key for the engine.", envvar="TOKENTAPE_ENGINE_API_KEY")
    ] = None,
    engine_kind: Annotated[Literal["vllm", "sglang"] | None, typer.Option(help="What it is; asked if none.")] = None,
    model: Annotated[str | None, typer.Option(help="The model that scores; the first one listed if none.")] = None,
    logprobs_mode: Annotated[
        Literal["raw_logprobs", "processed_logprobs", "after_temperature_logprobs"] | None,
        typer.Option(help="What the recorded logprobs are of; by the engine's kind if none."),
    ] = None,
    tolerance: Annotated[float, typer.Option(min=0, help="Largest |difference| of an aligned token.")] = 0.01,
    concurrency: Annotated[int, typer.Option(min=1, help="Sequences scored at once.")] = 4,
    resume: Annotated[Path | None, typer.Option(help="Journal of results: what is in it is not scored again.")] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Have an engine score exported sequences again, and say which are not what it sampled."""
    from proxy.cli import audit as command  # noqa: PLC0415 - keeps `--help` quick
    from proxy.cli.console import answers, notes  # noqa: PLC0415
    from proxy.cli.export import ExportRequest  # noqa: PLC0415

    if (url is None) == (file is None):
        _misused("give either --url (a running proxy) or --file (rows that export wrote)")
    request = command.Request(
        source=file or command.ServerAddress(str(url), api_key),
        wanted=ExportRequest("sequences", tuple(rollout or ()), group, "exact", "ndjson"),
        engine=command.ServerAddress(engine, engine_api_key),
        kind=engine_kind,
        model=model,
        tolerance=tolerance,
        logprobs_mode=logprobs_mode,
        concurrency=concurrency,
        journal=resume,
        as_json=as_json,
    )
    if not _run(command.audit(request, answers(), notes())):
        raise typer.Exit(Exit.FOUND)


@app.command()
def check(
    config: ConfigFile = None,
    engine: Annotated[list[str] | None, typer.Option(help="Base URL of an engine, as for serve.")] = None,
    store: Annotated[str | None, typer.Option(help="The store, as for serve.")] = None,
    listen: Annotated[str | None, typer.Option(help="HOST:PORT, as for serve.")] = None,
    *,
    insecure: Annotated[bool, typer.Option("--insecure", help="As for serve.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what is wrong with the configuration, the machine, the store and each engine, and how to mend it."""
    from proxy.cli.check import Finding, findings, one, print_findings  # noqa: PLC0415 - keeps `--help` quick  # noqa: PLC0415
    from proxy.cli.console import answers  # noqa: PLC0415
    from proxy.cli.settings import WrongSettings, settings_of  # noqa: PLC0415

    try:
        found = findings(settings_of(config, engine=engine, store=store, insecure=insecure, listen=listen))
    except WrongSettings as error:
        found = one(Finding("configuration", "fault", str(error), "docs/settings.md has every setting"))
    if not _run(print_findings(found, answers(), as_json=as_json)):
        raise typer.Exit(Exit.FOUND)


def _place(url: str, store: str | None, api_key: str | None) -> "ControlAddress":
    from proxy.cli.show import ControlAddress  # noqa: PLC0415 - keeps `--help` quick

    if store is None:
        return ControlAddress(url, None, api_key)
    return ControlAddress(None, _settings(None, store=store, listen="127.0.0.1:0"), None)


def _settings(config: Path | None, **said: Any) -> "Settings":
    """The settings, with what was said on the command line on top; ends the command where they cannot be used."""
    from proxy.cli.settings import WrongSettings, settings_of  # noqa: PLC0415 - keeps `--help` quick

    try:
        return settings_of(config, **said)
    except WrongSettings as error:
        from proxy.cli.runner import fail  # noqa: PLC0415

        fail(str(error))


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run to the end; failures that have a sentence are told by it."""
    from proxy.cli.runner import run  # noqa: PLC0415 - keeps `--help` quick

    return run(work)


def _misused(sentence: str) -> NoReturn:
    from proxy.cli.runner import fail  # noqa: PLC0415 - keeps `--help` quick

    fail(sentence, code=Exit.MISUSED)


def main() -> None:
    """The `tokentape` command."""
    app()


if __name__ == "__main__":
    main()
