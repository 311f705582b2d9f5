"""The commands `tokentape rollout`, `group` and `policy`: each changes or shows one of them.

Each command imports its implementation when it runs, so that `--help` and shell completion are fast.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Final, Literal

import typer

from proxy.cli.runner import (
    DEFAULT_URL,
    AsJson,
    Commands,
    Exit,
    GroupId,
    PolicyName,
    ProxyKey,
    ProxyUrl,
    RolloutId,
    StoreUrl,
    address_of,
    run,
    usage_error,
)

_DEFAULT_POLICY: Final = "default"
_NEGATIVE_NUMBERS: Final = {"ignore_unknown_options": True}  # `rollout reward R -1`: else -1 is an unknown option

rollouts = Commands(name="rollout", help="Finish, reward, branch or delete a rollout.", no_args_is_help=True)
groups = Commands(name="group", help="List groups; show one, or put it into the queue again.", no_args_is_help=True)
policies = Commands(
    name="policy", help="List policies; announce a version; pause and resume calls.", no_args_is_help=True
)


@rollouts.command("finish")
def finish_rollout(
    rollout: RolloutId,
    status: Annotated[
        Literal["completed", "failed", "aborted", "truncated"], typer.Option(help="How the rollout ended.")
    ] = "completed",
    reward: Annotated[float | None, typer.Option(help="Reward of the rollout.")] = None,
    metadata: Annotated[str | None, typer.Option(help="JSON object to store with the rollout.")] = None,
    url: ProxyUrl = DEFAULT_URL,
    api_key: ProxyKey = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Finish a rollout: further calls are rejected. Repeating the command changes nothing."""
    from proxy.cli.commands import change, rollout_line

    body: Any = {"status": status, "reward": _finite(reward), "metadata": _json_object("--metadata", metadata)}
    address = address_of(url, None, api_key)
    run(change(address, lambda control: control.finish_rollout(rollout, **body), rollout_line, as_json=as_json))


@rollouts.command("reward", context_settings=_NEGATIVE_NUMBERS)
def reward_rollout(
    rollout: RolloutId,
    reward: Annotated[float | None, typer.Argument(help="Reward of the rollout.", show_default=False)] = None,
    step: Annotated[
        list[str] | None,
        typer.Option(help="Reward of a step, as STEP_ID=NUMBER; repeatable.", metavar="STEP_ID=NUMBER"),
    ] = None,
    thread: Annotated[
        list[str] | None,
        typer.Option(help="Reward of a thread, as THREAD=NUMBER; repeatable.", metavar="THREAD=NUMBER"),
    ] = None,
    url: ProxyUrl = DEFAULT_URL,
    api_key: ProxyKey = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Set the reward of a rollout, of its steps, of its threads. Repeating the command changes nothing."""
    from proxy.cli.commands import change, rewards_line

    if reward is None and not step and not thread:
        usage_error("specify the reward of the rollout, of steps with --step, or of threads with --thread")
    steps = dict(_named_reward("--step", text) for text in step or ())
    threads = dict(_named_reward("--thread", text) for text in thread or ())
    body = {"reward": _finite(reward), "step_rewards": steps or None, "thread_rewards": threads or None}
    address = address_of(url, None, api_key)
    run(change(address, lambda control: control.patch_rollout(rollout, **body), rewards_line, as_json=as_json))


@rollouts.command("branch")
def branch_rollout(
    rollout: RolloutId,
    before: Annotated[str | None, typer.Option(help="Step that is sampled again; default: the first one.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Number of rollouts.")] = 1,
    *,
    group: Annotated[str | None, typer.Option(help="ID of their group.")] = None,
    preset: Annotated[list[str] | None, typer.Option(help="Agent whose dates and ids are ignored; repeatable.")] = None,
    url: ProxyUrl = DEFAULT_URL,
    api_key: ProxyKey = None,
    as_json: AsJson = False,
) -> None:
    """Open rollouts that repeat a rollout up to a step, for agents that run from their start. --json prints their keys."""
    from proxy.cli.commands import branches_line, change

    options: dict[str, Any] = {"group_id": group, "presets": preset}
    address = address_of(url, None, api_key)
    run(
        change(
            address, lambda control: control.branches(rollout, before, count, **options), branches_line, as_json=as_json
        )
    )


@rollouts.command("delete")
def delete_rollout(
    rollout: RolloutId, url: ProxyUrl = DEFAULT_URL, api_key: ProxyKey = None, *, as_json: AsJson = False
) -> None:
    """Delete a rollout and all its steps. If it does not exist, print that nothing was deleted, and exit with 0."""
    from proxy.cli.commands import change, delete, deletion_line

    address = address_of(url, None, api_key)
    run(change(address, lambda control: delete(control, rollout), deletion_line, as_json=as_json))


@groups.command("list")
def list_groups(
    url: ProxyUrl = DEFAULT_URL,
    store: StoreUrl = None,
    status: Annotated[str | None, typer.Option(help="Only groups with this status: open, complete, claimed, …")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of rows.")] = 50,
    api_key: ProxyKey = None,
    *,
    as_json: AsJson = False,
) -> None:
    """List groups, newest first."""
    from proxy.cli.commands import print_list
    from proxy.cli.console import output

    run(print_list(address_of(url, store, api_key), output(), "groups", limit, as_json=as_json, status=status))


@groups.command("show")
def show_group(
    group: GroupId,
    url: ProxyUrl = DEFAULT_URL,
    store: StoreUrl = None,
    api_key: ProxyKey = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Show a group: its state, and its rollouts with their rewards."""
    from proxy.cli.commands import print_group, read
    from proxy.cli.console import output

    address, printed = address_of(url, store, api_key), partial(print_group, output())
    run(read(address, lambda control: control.group(group), printed, as_json=as_json))


@groups.command("requeue")
def requeue_group(
    group: GroupId,
    max_staleness: Annotated[
        int | None, typer.Option(min=0, help="`max_staleness` of its next delivery, instead of that of the claim.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="Policy whose queue it is put into, if several are trained.")
    ] = None,
    url: ProxyUrl = DEFAULT_URL,
    api_key: ProxyKey = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Put a group that was dropped or acknowledged into the queue again. One that was acknowledged is trained again."""
    from proxy.cli.commands import change

    run(
        change(
            address_of(url, None, api_key),
            lambda control: control.requeue_group(group, max_staleness=max_staleness, policy=policy),
            lambda queued: f"group {group!r}: {queued['status']}",
            as_json=as_json,
        )
    )


@policies.command("list")
def list_policies(url: ProxyUrl = DEFAULT_URL, api_key: ProxyKey = None, *, as_json: AsJson = False) -> None:
    """List the policies with their versions, and whether their calls are paused."""
    from proxy.cli.commands import print_rows, read
    from proxy.cli.console import output

    printed = partial(print_rows, output(), "policies")
    run(read(address_of(url, None, api_key), lambda control: control.policies(), printed, as_json=as_json))


@policies.command("set", context_settings=_NEGATIVE_NUMBERS)
def set_policy(
    version: Annotated[str, typer.Argument(help="Version of the weights.")],
    policy: PolicyName = _DEFAULT_POLICY,
    run_id: Annotated[
        str | None, typer.Option("--run", help="ID of the training run; another one begins a new epoch.")
    ] = None,
    url: ProxyUrl = DEFAULT_URL,
    api_key: ProxyKey = None,
    *,
    new_epoch: Annotated[
        bool, typer.Option("--new-epoch", help="Begin an epoch: the run continues from an earlier version.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Announce the version of the weights to all processes of the store; steps record it."""
    from proxy.cli.commands import change

    def line(announced: Mapping[str, Any]) -> str:
        epoch = f", epoch {announced['epoch']}" if announced.get("epoch") else ""
        return f"policy {policy!r}: version {announced['version']}{epoch}"

    run(
        change(
            address_of(url, None, api_key),
            lambda control: control.put_policy(version, policy=policy, run=run_id, new_epoch=new_epoch),
            line,
            as_json=as_json,
        )
    )


@policies.command("pause")
def pause_policy(  # noqa: PLR0913 - each parameter is a named option
    policy: PolicyName = _DEFAULT_POLICY,
    mode: Annotated[
        Literal["wait", "reject"], typer.Option(help="What new calls do: wait until `resume`, or get 429.")
    ] = "wait",
    drain_s: Annotated[float, typer.Option(min=0, help="Seconds to wait until no call is in flight.")] = 0,
    url: ProxyUrl = DEFAULT_URL,
    api_key: ProxyKey = None,
    *,
    abort: Annotated[bool, typer.Option("--abort", help="Abort calls that are in flight after --drain-s.")] = False,
    interrupt: Annotated[
        bool, typer.Option("--interrupt", help="Interrupt calls at once; they are resumed after the pause.")
    ] = False,
    endpoint: Annotated[
        list[str] | None, typer.Option(help="Hold only this endpoint: its calls move to others; repeatable.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Pause new calls in all processes of the store. With --drain-s, exit with 3 if calls are still in flight after it."""
    from proxy.cli.commands import change, mode_line

    if abort and (interrupt or endpoint):
        usage_error("specify either --abort, or --interrupt and --endpoint")
    in_flight = "resume" if interrupt or endpoint else "abort" if abort else "keep"
    body: Any = {"mode": mode, "in_flight": in_flight, "drain_s": _finite(drain_s), "endpoints": endpoint}
    paused = run(
        change(
            address_of(url, None, api_key),
            lambda control: control.pause(policy=policy, **body),
            lambda paused: f"policy {policy!r}: {mode_line(paused)}",
            as_json=as_json,
        )
    )
    if not paused["drained"] and (drain_s or in_flight != "keep"):
        raise typer.Exit(Exit.FOUND)


@policies.command("resume")
def resume_policy(
    policy: PolicyName = _DEFAULT_POLICY,
    url: ProxyUrl = DEFAULT_URL,
    api_key: ProxyKey = None,
    *,
    endpoint: Annotated[list[str] | None, typer.Option(help="Release only this endpoint; repeatable.")] = None,
    version: Annotated[str | None, typer.Option(help="Version of the weights of --endpoint.")] = None,
    as_json: AsJson = False,
) -> None:
    """Resume the calls of a policy, and release its endpoints that are held."""
    from proxy.cli.commands import change, mode_line

    run(
        change(
            address_of(url, None, api_key),
            lambda control: control.resume(policy=policy, endpoints=endpoint, version=version),
            lambda resumed: f"policy {policy!r}: {mode_line(resumed)}",
            as_json=as_json,
        )
    )


def _finite(number: float | None) -> float | None:
    if number is not None and not math.isfinite(number):
        usage_error(f"{number} is not a finite number")
    return number


def _named_reward(option: str, text: str) -> tuple[str, float]:
    name, equals, number = text.rpartition("=")
    try:
        reward = float(number)
    except ValueError:
        reward = math.nan
    if not (equals and name and math.isfinite(reward)):
        usage_error(f"{option} {text}: use {'STEP_ID' if option == '--step' else 'THREAD'}=NUMBER")
    return name, reward


def _json_object(option: str, text: str | None) -> dict[str, object] | None:
    import orjson

    if text is None:
        return None
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        usage_error(f"{option} is not JSON: {error}")
    if not isinstance(found, dict):
        usage_error(f"{option} must be a JSON object, such as '{{\"task\": 7}}'")
    return found
