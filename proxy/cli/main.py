"""The commands of `tokentape` and their options.

Each command imports its implementation when it runs, so that `--help` and shell completion are fast.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlencode

import typer

from proxy.cli.resources import Fields, batches, fields_of, groups, policies, rollouts
from proxy.cli.runner import (
    Answer,
    AsJson,
    Commands,
    ConfigFile,
    EngineKey,
    EngineUrls,
    Exit,
    Insecure,
    OptionalRolloutId,
    PolicyName,
    ProxyKey,
    ProxyUrl,
    RolloutId,
    StoreUrl,
    address_of,
    rollout_ids,
    run,
    settings_of,
    tokentape,
    usage_error,
)
from proxy.cli.running import url_of_commands

if TYPE_CHECKING:
    from proxy.cli.control import Control

EngineKind = Literal["vllm", "sglang"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "after_temperature_logprobs"]

app = Commands(name="tokentape", callback=tokentape, no_args_is_help=True, pretty_exceptions_enable=False)
for group in (rollouts, groups, batches, policies):
    app.add_typer(group)


@app.command()
def serve(  # noqa: PLR0913, PLR0917 - each parameter is a named option
    config: ConfigFile = None,
    listen: Annotated[str | None, typer.Option(help="HOST:PORT to listen on; default 127.0.0.1:8400.")] = None,
    engine: EngineUrls = None,
    store: Annotated[str | None, typer.Option(help="Store URL: embedded:PATH, redis://…, redis+cluster://….")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Number of worker processes; default 1.")] = None,
    playback: Annotated[
        str | None, typer.Option(help="Answer calls from the rollouts of this file or archive, without an engine.")
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help="With --playback: text of messages that may differ, with *; repeatable.")
    ] = None,
    preset: Annotated[
        list[str] | None, typer.Option(help="With --playback: agent with known texts that may differ; repeatable.")
    ] = None,
    *,
    insecure: Insecure = False,
) -> None:
    """Run the proxy. If no engine is configured, it starts the simulator."""
    if playback is not None and (engine or store or (workers or 1) > 1):
        usage_error("--playback has an engine and a store of its own, and one process")
    played = {"file": playback, "ignore": ignore, "presets": preset}
    overrides: dict[str, Any] = {"listen": listen, "workers": workers}
    overrides["tape"] = {name: value for name, value in played.items() if value} or None
    settings = settings_of(config, engine=engine, store=store, insecure=insecure, **overrides)
    from proxy.cli.console import notes
    from proxy.cli.serve import serve as serve_until_signal

    run(serve_until_signal(settings, notes()))


@app.command(hidden=True)
def worker() -> None:
    """Run one worker process of `serve --workers`, configured through standard input."""
    from proxy.server.supervisor import work

    run(work(), on_value_error=Exit.REFUSED)  # the supervisor passes it on if the worker cannot start


@app.command()
def simulate(  # noqa: PLR0913, PLR0917 - each parameter is a named option
    listen: Annotated[str, typer.Option(help="HOST:PORT to listen on.")] = "127.0.0.1:8401",
    model: Annotated[str, typer.Option(help="Name of the served model.")] = "simulated",
    max_model_len: Annotated[int, typer.Option(help="Maximum number of prompt and completion tokens.")] = 32768,
    seed: Annotated[int | None, typer.Option(help="Default seed of requests; random if omitted.")] = None,
    token_delay_s: Annotated[float, typer.Option(help="Delay between tokens, in seconds.")] = 0.0,
    shape: Annotated[EngineKind, typer.Option(help="API to serve.")] = "vllm",
    script: Annotated[Path | None, typer.Option(help="YAML file with scripted replies, one per turn.")] = None,
    template: Annotated[
        Path | None, typer.Option(help="Chat template in Jinja; requires the extra `tokenizer`.")
    ] = None,
    eos: Annotated[str, typer.Option(help="Token that ends a turn; one that the template writes.")] = "<|im_end|>",
    call_eos: Annotated[
        str | None, typer.Option(help="Token that ends a turn with tool calls; default: --eos.")
    ] = None,
    noncanonical_rate: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Probability of token splits that no tokenizer makes, to test drift."),
    ] = 0.0,
    *,
    as_json: AsJson = False,
) -> None:
    """Run a simulated engine with the HTTP API of vLLM or SGLang. It needs no GPU."""
    from proxy.cli.console import notes
    from proxy.cli.serve import simulate as simulate_until_signal
    from proxy.simulator.options import Options

    options = Options(
        model,
        max_model_len,
        seed,
        token_delay_s,
        shape=shape,
        eos=eos,
        call_eos=call_eos,
        noncanonical_rate=noncanonical_rate,
    )
    run(simulate_until_signal(listen, options, notes(), script=script, template=template, as_json=as_json))


@app.verb("list", store=True)
async def list_(
    control: "Control",
    status: Annotated[str | None, typer.Option(help="Only rollouts with this status: open, completed, …")] = None,
    group: Annotated[str | None, typer.Option(help="Only rollouts in this group.")] = None,
    since: Annotated[str | None, typer.Option(help="Only rollouts opened within this time: 90s, 15m, 2h, 3d.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of rows.")] = 50,
) -> Answer:
    """List rollouts, newest first."""
    from proxy.cli.commands import ago, listed

    try:
        filters = {"status": status, "group_id": group, "since": None if since is None else ago(since)}
    except ValueError as error:
        usage_error(str(error))
    return await listed(control, "rollouts", limit, **filters)


@app.command()
def show(  # noqa: PLR0913 - each parameter is a named option
    rollout: RolloutId,
    url: ProxyUrl = None,
    store: StoreUrl = None,
    step: Annotated[str | None, typer.Option(help="Show only this step, by ID or index.")] = None,
    api_key: ProxyKey = None,
    *,
    ids: Annotated[bool, typer.Option("--ids", help="Show token IDs.")] = False,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Show completion tokens, colored by logprob.")] = False,
    whole: Annotated[bool, typer.Option("--whole", help="Do not truncate long messages.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a rollout: prompts dimmed, completions bright, with its drift and problems."""
    from proxy.cli.commands import print_rollout, print_step
    from proxy.cli.console import output
    from proxy.cli.render import StepView

    address, out = address_of(url, store, api_key), output()
    view = StepView(ids, logprobs, whole, with_values=not out.is_terminal or out.no_color)
    if step is None:
        run(print_rollout(address, out, rollout, view, as_json=as_json))
    else:
        run(print_step(address, out, rollout, step, view, as_json=as_json))


@app.command()
def diff(
    a: Annotated[str, typer.Argument(help="Rollout ID, or a .json or .jsonl file.", autocompletion=rollout_ids)],
    b: Annotated[str, typer.Argument(help="What to compare it with.", autocompletion=rollout_ids)],
    url: ProxyUrl = None,
    store: StoreUrl = None,
    tolerance: Annotated[float, typer.Option(min=0, help="Difference up to which logprobs count as equal.")] = 0.01,
    api_key: ProxyKey = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Compare two rollouts from their first different step on. Exit with 0 if they are equal, else with 1, as diff does."""
    from proxy.cli.console import output
    from proxy.cli.diff import diff as compare

    if not run(
        compare(address_of(url, store, api_key), output(), a, b, tolerance, as_json=as_json), on_failure=Exit.MISUSED
    ):
        raise typer.Exit(Exit.FAILED)


@app.command()
def tail(
    rollout: OptionalRolloutId = None,
    url: ProxyUrl = None,
    last: Annotated[
        int, typer.Option("--last", "-n", min=0, help="Number of earlier steps to show for a single rollout.")
    ] = 10,
    api_key: ProxyKey = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Follow new steps, one line per step, until Ctrl-C."""
    from proxy.cli.console import output
    from proxy.cli.tail import tail as follow

    run(follow(address_of(url, None, api_key), rollout, last, output(), as_json=as_json))


@app.command()
def export(  # noqa: PLR0913, PLR0917 - each parameter is a named option
    url: ProxyUrl = None,
    store: StoreUrl = None,
    form: Annotated[str, typer.Option("--format", help="Export format.")] = "sequences",
    rollout: Annotated[list[str] | None, typer.Option(help="Only this rollout; repeatable.")] = None,
    group: Annotated[str | None, typer.Option(help="Only this group.")] = None,
    include: Annotated[str, typer.Option(help="exact; flagged or retokenized to include those steps too.")] = "exact",
    container: Annotated[str, typer.Option(help="ndjson, json, parquet, arrow, msgpack.")] = "ndjson",
    policy: Annotated[str | None, typer.Option(help="Only this policy; default all trained ones.")] = None,
    rescore: Annotated[str | None, typer.Option(help="Also the logprobs by this scorer now, e.g. policy.")] = None,
    threads: Annotated[str | None, typer.Option(help="main, agents (without auxiliary calls) or all.")] = None,
    query: Annotated[
        list[str] | None, typer.Option(help="Another GET /export parameter, e.g. branches=last; repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Output file; default standard output.")] = None,
    api_key: ProxyKey = None,
    push: Annotated[str | None, typer.Option(help="POST scored_data groups to this Atropos service.")] = None,
    group_size: Annotated[
        int | None, typer.Option(min=1, help="With --push: rollouts per complete group, if the group has no size.")
    ] = None,
    max_len: Annotated[int | None, typer.Option(min=1, help="With --push: maximum sequence length, in tokens.")] = None,
    env_id: Annotated[int | None, typer.Option(help="With --push: env_id returned by /register-env.")] = None,
    *,
    force_partial: Annotated[bool, typer.Option("--force-partial", help="With --push: incomplete groups too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Export rollouts as training rows."""
    from proxy.cli.export import ExportRequest, export_to

    more = [(name, value) for name, _, value in (parameter.partition("=") for parameter in query or ())]
    more += [(name, value) for name, value in (("policy", policy), ("threads", threads), ("rescore", rescore)) if value]
    asked = ExportRequest(form, tuple(rollout or ()), group, include, container, tuple(more))
    address = address_of(url, store, api_key)
    if push is None:
        if as_json and out is None:
            usage_error("--json prints a report to standard output; use --out FILE for the rows")
        run(export_to(address, asked, out, as_json=as_json))
        return
    if rollout or query or rescore or out is not None or form not in {"sequences", "scored_data"}:
        usage_error(
            "--push exports groups as scored_data; it excludes --rollout, --query, --rescore, --out and another --format"
        )
    from proxy.cli.console import notes
    from proxy.cli.push import PushOptions, post_groups

    options = PushOptions(push, group_size, env_id, force_partial, max_len)
    if not run(post_groups(address, asked, options, notes(), as_json=as_json)):
        raise typer.Exit(Exit.FAILED)


@app.command()
def archive(
    to: Annotated[str | None, typer.Option(help="Path or URL (s3://…, hf://…); default archive.url.")] = None,
    config: ConfigFile = None,
    store: StoreUrl = None,
    older_than: Annotated[
        str | None, typer.Option(help="Only rollouts unchanged for this time: 0s, 15m, 2h, 3d.")
    ] = None,
    when: Annotated[
        Literal["acknowledged", "finished"] | None, typer.Option(help="Which rollouts; default archive.when.")
    ] = None,
    *,
    delete: Annotated[bool, typer.Option("--delete", help="Delete archived rollouts from the store.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Exit after one sweep.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write finished rollouts to a dataset of Parquet files; repeat until Ctrl-C."""
    from proxy.cli import archive as command
    from proxy.cli.commands import seconds_of

    settings = settings_of(config, store=store, listen="127.0.0.1:0")
    try:
        chosen = {"url": to, "when": when, "older_than_s": None if older_than is None else seconds_of(older_than)}
    except ValueError as error:
        usage_error(str(error))
    changes = {name: value for name, value in chosen.items() if value is not None}
    archived = settings.archive.model_copy(update={**changes, **({"delete": True} if delete else {})})
    run(command.archive(settings.model_copy(update={"archive": archived}), once=once, as_json=as_json))


@app.command("import")
def import_(
    url: Annotated[str, typer.Argument(help="Path or URL of a dataset, or of one of its files.")],
    config: ConfigFile = None,
    store: StoreUrl = None,
    max_staleness: Annotated[
        int | None,
        typer.Option(min=0, help="With --requeue: `max_staleness` of the groups, instead of that of claims."),
    ] = None,
    *,
    requeue: Annotated[
        bool, typer.Option("--requeue", help="Put the groups that were trained into the queue again.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Bring the rollouts of an archive back into a store."""
    from proxy.cli import archive as command

    if max_staleness is not None and not requeue:
        usage_error("--max-staleness requires --requeue")
    settings = settings_of(config, store=store, listen="127.0.0.1:0")
    run(command.import_dataset(settings, url, as_json=as_json, requeue=requeue, max_staleness=max_staleness))


@app.command()
def audit(  # noqa: PLR0913, PLR0917 - each parameter is a named option
    engine: Annotated[str, typer.Option(help="Base URL of the scoring engine.")],
    url: ProxyUrl = None,
    file: Annotated[
        Path | None, typer.Option(help="File to read rows from (sequences, ndjson), in place of a running proxy.")
    ] = None,
    rollout: Annotated[list[str] | None, typer.Option(help="Only this rollout; repeatable.")] = None,
    group: Annotated[str | None, typer.Option(help="Only this group.")] = None,
    api_key: ProxyKey = None,
    engine_api_key: EngineKey = None,
    engine_kind: Annotated[EngineKind | None, typer.Option(help="Engine type; detected if omitted.")] = None,
    model: Annotated[str | None, typer.Option(help="Scoring model; default the first in /v1/models.")] = None,
    logprobs_mode: Annotated[
        LogprobsMode | None, typer.Option(help="Mode of the recorded logprobs; default by engine type.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Maximum absolute logprob difference of an aligned token.")
    ] = 0.01,
    policy_version: Annotated[
        str | None,
        typer.Option(help="Version of the engine's weights if it reports none, for calls that were resumed."),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Number of concurrent scoring requests. Default: 4, and 1 with LoRA adapters."),
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Journal file of results; sequences in it are skipped.")] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Score exported sequences again and report those whose logprobs differ."""
    from proxy.cli import audit as command
    from proxy.cli.console import notes, output
    from proxy.cli.export import ExportRequest

    asked = command.Request(
        source=file or command.ServerAddress(url or url_of_commands(), api_key),
        export=ExportRequest("sequences", tuple(rollout or ()), group, "exact", "ndjson"),
        engine=command.ServerAddress(engine, engine_api_key),
        kind=engine_kind,
        model=model,
        tolerance=tolerance,
        logprobs_mode=logprobs_mode,
        policy_version=policy_version,
        concurrency=concurrency,
        journal=resume,
        as_json=as_json,
    )
    if not run(command.audit(asked, output(), notes())):
        raise typer.Exit(Exit.FOUND)


@app.command()
def resample(  # noqa: PLR0913, PLR0917 - each parameter is a named option
    rollout: Annotated[
        list[str] | None, typer.Argument(help="Rollout IDs. Default: all.", autocompletion=rollout_ids)
    ] = None,
    url: ProxyUrl = None,
    group: Annotated[str | None, typer.Option(help="Only rollouts of this group.")] = None,
    status: Annotated[str | None, typer.Option(help="Only rollouts with this status.")] = None,
    model: Annotated[str | None, typer.Option(help="The engine's name of the model. Default: the source's.")] = None,
    n: Annotated[int, typer.Option("-n", "--n", min=1, max=1000, help="How often each call is sampled.")] = 1,
    concurrency: Annotated[int, typer.Option(min=1, max=1000, help="Number of concurrent calls.")] = 16,
    api_key: ProxyKey = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Sample recorded calls again without their agent, each in a rollout that branches before its step."""
    from proxy.cli import resample as command
    from proxy.cli.console import notes

    asked = command.Request(tuple(rollout or ()), group, status, model, n, concurrency)
    if not run(command.resample(address_of(url, None, api_key), notes(), asked, as_json=as_json)):
        raise typer.Exit(Exit.FOUND)


@app.command()
def check(
    config: ConfigFile = None,
    engine: EngineUrls = None,
    store: Annotated[str | None, typer.Option(help="Store URL.")] = None,
    listen: Annotated[str | None, typer.Option(help="HOST:PORT to listen on.")] = None,
    *,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Check configuration, machine, store and engines; report problems and how to fix them."""
    from proxy.cli.check import findings, print_findings, refused
    from proxy.cli.console import output
    from proxy.cli.settings import InvalidSettings, load_settings

    try:
        found = findings(load_settings(config, engine=engine, store=store, insecure=insecure, listen=listen))
    except InvalidSettings as error:
        found = refused(error)
    raise typer.Exit(run(print_findings(found, output(), as_json=as_json)))


@app.command()
def certify(
    engine: Annotated[str, typer.Argument(help="Base URL of the engine.")],
    model: Annotated[str | None, typer.Option(help="Model; default the first in /v1/models.")] = None,
    config: ConfigFile = None,
    api_key: EngineKey = None,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Maximum difference of a logprob that is scored again.")
    ] = 0.01,
    time_limit_s: Annotated[float, typer.Option(min=1, help="Seconds after which no further shape is run.")] = 180,
    *,
    admin: Annotated[
        bool, typer.Option("--admin", help="Also change the weight version, pause, and abort all calls of the engine.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run each shape of a call against an engine, and report what is exact, what is flagged and why, and if training is safe.

    Each call is sent to the engine alone and through a temporary proxy; the engine scores the recorded tokens again. It takes
    one to three minutes and some hundred short calls, and leaves nothing. docs/exactness.md has results of real engines.
    """
    from proxy.cli import certify as command
    from proxy.cli.console import notes, output

    settings = settings_of(config)
    asked = command.Request(engine, settings, model, api_key, admin, tolerance, time_limit_s, as_json)
    raise typer.Exit(run(command.certify(asked, output(), notes())))


@app.verb("engines")
async def engines(control: "Control") -> Answer:
    """Check the engines of a running proxy, and show their health, versions, calls and last failures."""
    found = await control.send("GET", "/engines")
    return Answer(found, tables={"engines": found["engines"]})


@app.verb("mismatch")
async def mismatch(control: "Control", batch: Annotated[str, typer.Argument(help="Batch ID.")]) -> Answer:
    """Show how a trainer's logprobs of a batch differ from the recorded ones, and why (docs/mismatch.md)."""
    found = await control.batch_mismatch(batch)
    lines = [
        verdict["verdict"] + ("" if verdict["of"] is None else f" ({verdict['of']})") + f": {verdict['why']}"
        for verdict in found["verdicts"]
    ]
    sequences = found["sequences"]
    if sequences["rows"]:
        ratios = f"log of the ratio: mean {sequences['mean']:.3g}, absolute {sequences['abs_mean']:.3g}"
        lines.append(f"{sequences['rows']} rows, {ratios}")
    cells = [
        {"dimension": dimension, "value": value, **means}
        for dimension, of in found["cells"].items()
        for value, means in sorted(of.items())
    ]
    return Answer(found, lines=lines, tables={"cells": cells})


@app.verb("search")
async def search(
    control: "Control",
    text: Annotated[str, typer.Argument(help="Text in prompts, replies or errors.")],
    status: Annotated[str | None, typer.Option(help="Only rollouts with this status.")] = None,
    group: Annotated[str | None, typer.Option(help="Only rollouts in this group.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=200, help="Maximum number of rollouts.")] = 20,
) -> Answer:
    """Search for a text in the steps of rollouts, newest first, and show where it is."""
    found = await control.send("GET", "/search", q=text, status=status, group_id=group, limit=limit)
    lines = [
        f"{rollout['rollout_id']}  {match['step_id']}  {match['role'] or match['place']}  "
        f"{match['before']}{match['text']}{match['after']}"
        for rollout in found["rollouts"]
        for match in rollout["matches"]
    ]
    more = "" if found["cursor"] is None else "; older ones were not searched: use --limit, or --json for the cursor"
    return Answer(found, "searched {rollouts} rollouts, {steps} steps".format(**found["searched"]) + more, lines)


@app.verb("training")
async def training(
    control: "Control",
    policy: Annotated[str | None, typer.Option(help="Policy that is trained, if there are several.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of groups.")] = 20,
) -> Answer:
    """Show what the newest groups of a policy earned, and how many groups have each state."""
    found = await control.send("GET", "/training", policy=policy, limit=limit)
    states = ", ".join(f"{count} {status}" for status, count in found["statuses"].items()) or "no groups"
    note = f"policy {found['policy']!r}: version {found['version'] or 'none'}; {states}"
    return Answer(found, note, tables={"training": found["groups"]} if found["groups"] else {})


@app.verb("request")
async def request(
    control: "Control",
    method: Annotated[str, typer.Argument(help="GET, POST, PUT, PATCH or DELETE.")],
    path: Annotated[str, typer.Argument(help="Path of docs/http-api.md, such as /rollouts/r1/tree.")],
    fields: Fields = None,
) -> Answer:
    """Send any other request to the control API, and print its response as JSON."""
    from tokentape.control_api import query_from

    given, method = fields_of(fields), method.upper()
    if not path.startswith("/"):
        usage_error(f"{path}: the path begins with /")
    body = given if method in {"POST", "PUT", "PATCH"} else None
    if given and body is None:
        path += ("&" if "?" in path else "?") + urlencode(query_from(given))
    return Answer(await control.send(method, path, body), is_json=True)


@app.command()
def track(  # noqa: PLR0913, PLR0917 - each parameter is a named option
    url: ProxyUrl = None,
    wandb: Annotated[str | None, typer.Option(help="Log to this project of W&B.", metavar="PROJECT")] = None,
    mlflow: Annotated[str | None, typer.Option(help="Log to this experiment of MLflow.", metavar="EXPERIMENT")] = None,
    run_id: Annotated[str, typer.Option("--run", help="ID of the run; its name in MLflow.")] = "tokentape",
    policy: PolicyName = "default",
    file: Annotated[Path, typer.Option(help="File with a line for each logged rollout.")] = Path("rollouts.ndjson"),
    sample: Annotated[
        int, typer.Option(min=0, help="Log the text of each N-th rollout; 0: of none.", metavar="N")
    ] = 100,
    api_key: ProxyKey = None,
    *,
    once: Annotated[bool, typer.Option("--once", help="Log the rollouts that are finished, and exit.")] = False,
) -> None:
    """Log finished rollouts to W&B, MLflow or standard output, each once; follow until Ctrl-C (docs/trackers.md)."""
    from proxy.cli.track import Tracked, main, mlflow_run, printed, wandb_run

    if wandb is not None and mlflow is not None:
        usage_error("specify either --wandb or --mlflow")

    def tracker() -> Any:
        if wandb is not None:
            return wandb_run(wandb, run_id)
        return (0, printed) if mlflow is None else mlflow_run(mlflow, run_id)

    main(url or url_of_commands(), api_key, Tracked(file, policy, sample, once), tracker)


@app.command("open")
def open_page(
    rollout: Annotated[str | None, typer.Argument(help="Open the page of this rollout.")] = None,
    group: Annotated[str | None, typer.Option(help="Open the page of this group.")] = None,
    url: ProxyUrl = None,
) -> None:
    """Open the web page of a running proxy in the browser, and print its address."""
    from proxy.cli.commands import open_page as open_in_browser

    if rollout is not None and group is not None:
        usage_error("specify either a rollout or --group")
    run(open_in_browser(address_of(url, None, None), rollout, group))


def main() -> None:
    """Run the `tokentape` command."""
    app()


if __name__ == "__main__":
    main()
