"""The commands that change or show one thing of the control API: rollouts, groups, policies, engines, and the web page."""

import math
from typing import Annotated, Final, Literal

import typer

from proxy.cli.exit_codes import Exit
from proxy.cli.invoke import address_of, run, usage_error
from proxy.cli.options import (
    DEFAULT_URL,
    AsJson,
    Commands,
    GroupId,
    PolicyName,
    ProxyKey,
    ProxyUrl,
    RolloutId,
    StoreUrl,
)

_DEFAULT_POLICY: Final = "default"
_NEGATIVE_NUMBERS: Final = {"ignore_unknown_options": True}  # `rollout reward R -1`: else -1 is an unknown option

rollouts = Commands(name="rollout", help="Finish, reward or delete a rollout.", no_args_is_help=True)
groups = Commands(name="group", help="List groups; show one, or put it into the queue again.", no_args_is_help=True)
policies = Commands(
    name="policy", help="List policies; announce a version; pause and resume calls.", no_args_is_help=True
)
GROUPS: Final = (rollouts, groups, policies)


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
    from proxy.cli.actions import finish_rollout as finish  # noqa: PLC0415 - keeps `--help` fast

    body = {"status": status, "reward": _finite(reward), "metadata": _json_object("--metadata", metadata)}
    run(finish(address_of(url, None, api_key), rollout, body, as_json=as_json))


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
    from proxy.cli.actions import reward_rollout as set_reward  # noqa: PLC0415 - keeps `--help` fast

    if reward is None and not step and not thread:
        usage_error("specify the reward of the rollout, of steps with --step, or of threads with --thread")
    steps = dict(_named_reward("--step", text) for text in step or ())
    threads = dict(_named_reward("--thread", text) for text in thread or ())
    body = {"reward": _finite(reward), "step_rewards": steps or None, "thread_rewards": threads or None}
    run(set_reward(address_of(url, None, api_key), rollout, body, as_json=as_json))


@rollouts.command("delete")
def delete_rollout(
    rollout: RolloutId, url: ProxyUrl = DEFAULT_URL, api_key: ProxyKey = None, *, as_json: AsJson = False
) -> None:
    """Delete a rollout and all its steps. If it does not exist, print that nothing was deleted, and exit with 0."""
    from proxy.cli.actions import delete_rollout as delete  # noqa: PLC0415 - keeps `--help` fast

    run(delete(address_of(url, None, api_key), rollout, as_json=as_json))


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
    from proxy.cli.console import output  # noqa: PLC0415 - keeps `--help` fast
    from proxy.cli.show import print_list  # noqa: PLC0415

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
    from proxy.cli.console import output  # noqa: PLC0415 - keeps `--help` fast
    from proxy.cli.show import print_group  # noqa: PLC0415

    run(print_group(address_of(url, store, api_key), output(), group, as_json=as_json))


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
    from proxy.cli.actions import requeue_group as requeue  # noqa: PLC0415 - keeps `--help` fast

    body = {"max_staleness": max_staleness, "policy": policy}
    run(requeue(address_of(url, None, api_key), group, body, as_json=as_json))


@policies.command("list")
def list_policies(url: ProxyUrl = DEFAULT_URL, api_key: ProxyKey = None, *, as_json: AsJson = False) -> None:
    """List the policies with their versions, and whether their calls are paused."""
    from proxy.cli.console import output  # noqa: PLC0415 - keeps `--help` fast
    from proxy.cli.show import print_policies  # noqa: PLC0415

    run(print_policies(address_of(url, None, api_key), output(), as_json=as_json))


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
    from proxy.cli.actions import set_policy as announce  # noqa: PLC0415 - keeps `--help` fast

    body = {"version": version, "run": run_id, "new_epoch": new_epoch or None}
    run(announce(address_of(url, None, api_key), policy, body, as_json=as_json))


@policies.command("pause")
def pause_policy(
    policy: PolicyName = _DEFAULT_POLICY,
    mode: Annotated[
        Literal["wait", "reject"], typer.Option(help="What new calls do: wait until `resume`, or get 429.")
    ] = "wait",
    drain_s: Annotated[float, typer.Option(min=0, help="Seconds to wait until no call is in flight.")] = 0,
    url: ProxyUrl = DEFAULT_URL,
    api_key: ProxyKey = None,
    *,
    abort: Annotated[bool, typer.Option("--abort", help="Abort calls that are in flight after --drain-s.")] = False,
    as_json: AsJson = False,
) -> None:
    """Pause new calls in all processes of the store. With --drain-s, exit with 3 if calls are still in flight after it."""
    from proxy.cli.actions import pause_policy as pause  # noqa: PLC0415 - keeps `--help` fast

    body = {"mode": mode, "in_flight": "abort" if abort else "keep"}
    address = address_of(url, None, api_key)
    is_drained = run(pause(address, policy, body, _finite(drain_s) or 0.0, as_json=as_json))
    if not is_drained and (drain_s or abort):
        raise typer.Exit(Exit.FOUND)


@policies.command("resume")
def resume_policy(
    policy: PolicyName = _DEFAULT_POLICY,
    url: ProxyUrl = DEFAULT_URL,
    api_key: ProxyKey = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Resume the calls of a policy."""
    from proxy.cli.actions import resume_policy as resume  # noqa: PLC0415 - keeps `--help` fast

    run(resume(address_of(url, None, api_key), policy, as_json=as_json))


def engines(url: ProxyUrl = DEFAULT_URL, api_key: ProxyKey = None, *, as_json: AsJson = False) -> None:
    """Check the engines of a running proxy, and show their health, versions, calls and last failures."""
    from proxy.cli.console import output  # noqa: PLC0415 - keeps `--help` fast
    from proxy.cli.show import print_engines  # noqa: PLC0415

    run(print_engines(address_of(url, None, api_key), output(), as_json=as_json))


def open_page(
    rollout: Annotated[str | None, typer.Argument(help="Open the page of this rollout.")] = None,
    group: Annotated[str | None, typer.Option(help="Open the page of this group.")] = None,
    url: ProxyUrl = DEFAULT_URL,
) -> None:
    """Open the web page of a running proxy in the browser, and print its address."""
    from proxy.cli.actions import open_page as open_in_browser  # noqa: PLC0415 - keeps `--help` fast

    if rollout is not None and group is not None:
        usage_error("specify either a rollout or --group")
    run(open_in_browser(url, rollout, group))


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
    import orjson  # noqa: PLC0415 - keeps `--help` fast

    if text is None:
        return None
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        usage_error(f"{option} is not JSON: {error}")
    if not isinstance(found, dict):
        usage_error(f"{option} must be a JSON object, such as '{{\"task\": 7}}'")
    return found
