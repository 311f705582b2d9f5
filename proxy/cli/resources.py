"""The commands `tokentape rollout`, `group`, `batch` and `policy`: each changes or shows one of them."""

import math
from http.client import NOT_FOUND
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import orjson
import typer

from proxy.cli.runner import Answer, Commands, Exit, GroupId, PolicyName, RolloutId, usage_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.cli.control import Control

_DEFAULT_POLICY: Final = "default"
_NEGATIVE_NUMBERS: Final = {"ignore_unknown_options": True}  # `rollout reward R -1`: else -1 is an unknown option
_MODES: Final = {None: "calls are sent", "wait": "new calls wait", "reject": "new calls are rejected"}

rollouts = Commands(name="rollout", help="Open, finish, reward, branch or delete a rollout.", no_args_is_help=True)
groups = Commands(
    name="group", help="Open, list, show or delete groups, or put one into the queue again.", no_args_is_help=True
)
batches = Commands(name="batch", help="Claim groups; acknowledge, release or extend a batch.", no_args_is_help=True)
policies = Commands(
    name="policy", help="List policies; announce a version; pause and resume calls.", no_args_is_help=True
)


def finite(number: float | None) -> float | None:
    """Return a number of the command line. Raises BadParameter for NaN and infinity."""
    if number is not None and not math.isfinite(number):
        raise typer.BadParameter(f"{number} is not a finite number")
    return number


def json_object(text: str) -> dict[str, Any]:
    """Return the JSON object in an option. Raises BadParameter."""
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise typer.BadParameter(f"it is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise typer.BadParameter("it must be a JSON object, such as '{\"task\": 7}'")
    return found


def fields_of(pairs: list[str] | None) -> dict[str, Any]:
    """Return `NAME=VALUE` as fields of a body: a value that is JSON as JSON, else as a text. Exits if one has no name."""
    fields: dict[str, Any] = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not (equals and name):
            usage_error(f"{pair}: use NAME=VALUE")
        try:
            fields[name] = orjson.loads(value)
        except orjson.JSONDecodeError:
            fields[name] = value
    return fields


BatchId = Annotated[str, typer.Argument(help="Batch ID.")]
Consumer = Annotated[str, typer.Option(help="Name of the consumer.")]
Fields = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Another field of the request (docs/http-api.md); repeatable."),
]
Metadata = Annotated[Any, typer.Option(help="JSON object to store with it.", metavar="JSON", parser=json_object)]
Reward = Annotated[float | None, typer.Option(help="Reward of the rollout.", callback=finite)]
OfGroup = Annotated[str | None, typer.Option(help="ID of the group.")]


def _rollout_line(rollout: "Mapping[str, Any]") -> str:
    """Return the status of a rollout, its rewards, and what replaces it."""
    line = f"rollout {rollout['rollout_id']!r}: {rollout['status']}"
    if rollout["reward"] is not None:
        line += f", reward {rollout['reward']:g}"
    for what, rewards in (("step", rollout["step_rewards"]), ("thread", rollout.get("thread_rewards"))):
        if rewards:
            line += f", {len(rewards)} {what}{'s' * (len(rewards) > 1)} with a reward"
    replacement = rollout.get("replaced_by")
    return line + (f"; replaced by {replacement['rollout_id']!r}" if replacement else "")


def _members_line(group: "Mapping[str, Any]") -> str:
    return f"group {group['group_id']!r}: {', '.join(repr(rollout['rollout_id']) for rollout in group['rollouts'])}"


def _agents_of(opened: "Mapping[str, Any]") -> list[str]:
    """Return the environment of an agent of each opened rollout."""
    return [
        f"OPENAI_BASE_URL={rollout['base_url']} OPENAI_API_KEY={rollout['api_key']}"
        for rollout in opened.get("rollouts", [opened])
    ]


@rollouts.verb("open")
async def open_rollout(
    control: "Control",
    rollout: Annotated[str | None, typer.Argument(help="Its ID; default a new one.")] = None,
    group: OfGroup = None,
    metadata: Metadata = None,
    fields: Fields = None,
) -> Answer:
    """Open a rollout, and print the base URL and the API key of its agent. The same options again return the same rollout."""
    options = {"rollout_id": rollout, "group_id": group, "metadata": metadata, **fields_of(fields)}
    opened: Any = await control.open_rollout(**options)
    return Answer(opened, f"rollout {opened['rollout_id']!r}: open", _agents_of(opened))


@rollouts.verb("finish")
async def finish_rollout(
    control: "Control",
    rollout: RolloutId,
    status: Annotated[
        Literal["completed", "failed", "aborted", "truncated"], typer.Option(help="How the rollout ended.")
    ] = "completed",
    reward: Reward = None,
    metadata: Metadata = None,
) -> Answer:
    """Finish a rollout: further calls are rejected. Repeating the command changes nothing."""
    finished = await control.finish_rollout(rollout, status, reward=reward, metadata=metadata)
    return Answer(finished, _rollout_line(finished))


@rollouts.verb("reward", context_settings=_NEGATIVE_NUMBERS)
async def reward_rollout(
    control: "Control",
    rollout: RolloutId,
    reward: Annotated[
        float | None, typer.Argument(help="Reward of the rollout.", show_default=False, callback=finite)
    ] = None,
    step: Annotated[
        list[str] | None,
        typer.Option(help="Reward of a step, as STEP_ID=NUMBER; repeatable.", metavar="STEP_ID=NUMBER"),
    ] = None,
    thread: Annotated[
        list[str] | None,
        typer.Option(help="Reward of a thread, as THREAD=NUMBER; repeatable.", metavar="THREAD=NUMBER"),
    ] = None,
) -> Answer:
    """Set the reward of a rollout, of its steps, of its threads. Repeating the command changes nothing."""
    if reward is None and not step and not thread:
        usage_error("specify the reward of the rollout, of steps with --step, or of threads with --thread")
    steps = dict(_named_reward("--step", text) for text in step or ())
    threads = dict(_named_reward("--thread", text) for text in thread or ())
    rewards = {"reward": reward, "step_rewards": steps or None, "thread_rewards": threads or None}
    rewarded = await control.patch_rollout(rollout, **rewards)
    return Answer(rewarded, _rollout_line(rewarded))


@rollouts.verb("branch")
async def branch_rollout(
    control: "Control",
    rollout: RolloutId,
    before: Annotated[str | None, typer.Option(help="Step that is sampled again; default: the first one.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Number of rollouts.")] = 1,
    group: OfGroup = None,
    preset: Annotated[list[str] | None, typer.Option(help="Agent whose dates and ids are ignored; repeatable.")] = None,
) -> Answer:
    """Open rollouts that repeat a rollout up to a step, for agents that run from their start. --json prints their keys."""
    opened = await control.branches(rollout, before, count, group_id=group, presets=preset)
    return Answer(opened, _members_line(opened))


@rollouts.verb("delete")
async def delete_rollout(control: "Control", rollout: RolloutId) -> Answer:
    """Delete a rollout and all its steps. If it does not exist, print that nothing was deleted, and exit with 0."""
    return await _deleted(control, "rollout", rollout)


@groups.verb("open")
async def open_group(
    control: "Control",
    size: Annotated[int, typer.Argument(min=1, help="Number of rollouts.")],
    group: OfGroup = None,
    metadata: Metadata = None,
    fields: Fields = None,
) -> Answer:
    """Open a group and its rollouts, and print the base URL and the API key of each agent."""
    body = {"size": size, "group_id": group, "metadata": metadata, **fields_of(fields)}
    opened = await control.send("POST", "/groups", body)
    return Answer(opened, _members_line(opened), _agents_of(opened))


@groups.verb("list", store=True)
async def list_groups(
    control: "Control",
    status: Annotated[str | None, typer.Option(help="Only groups with this status: open, complete, claimed, …")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of rows.")] = 50,
) -> Answer:
    """List groups, newest first."""
    from proxy.cli.commands import listed

    return await listed(control, "groups", limit, status=status)


@groups.verb("show", store=True)
async def show_group(control: "Control", group: GroupId) -> Answer:
    """Show a group: its state, and its rollouts with their rewards."""
    shown = await control.group(group)
    return Answer(shown, tables={"groups": [shown], "members": shown["rollouts"]})


@groups.verb("requeue")
async def requeue_group(
    control: "Control",
    group: GroupId,
    max_staleness: Annotated[
        int | None, typer.Option(min=0, help="`max_staleness` of its next delivery, instead of that of the claim.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="Policy whose queue it is put into, if several are trained.")
    ] = None,
) -> Answer:
    """Put a group that was dropped or acknowledged into the queue again. One that was acknowledged is trained again."""
    queued = await control.requeue_group(group, max_staleness=max_staleness, policy=policy)
    return Answer(queued, f"group {group!r}: {queued['status']}")


@groups.verb("delete")
async def delete_group(control: "Control", group: GroupId) -> Answer:
    """Delete a group and its rollouts. If it does not exist, print that nothing was deleted, and exit with 0."""
    return await _deleted(control, "group", group)


@batches.verb("claim")
async def claim_batch(  # noqa: PLR0917 - each parameter is a named option
    control: "Control",
    consumer: Consumer,
    number: Annotated[int, typer.Option("--groups", min=1, help="Maximum number of groups.")] = 1,
    form: Annotated[str | None, typer.Option("--format", help="Format of the rows, which --json prints.")] = None,
    policy: Annotated[str | None, typer.Option(help="Policy that is trained, if there are several.")] = None,
    wait_s: Annotated[float, typer.Option(min=0, help="Seconds to wait for groups.", callback=finite)] = 0,
    lease_s: Annotated[float, typer.Option(help="Seconds after which others can claim them.", callback=finite)] = 60,
    fields: Fields = None,
) -> Answer:
    """Claim complete groups for training. Acknowledge the batch before its lease expires."""
    named = {"consumer": consumer, "groups": number, "policy": policy}
    options = {**named, "format": form, "wait_s": wait_s, "lease_s": lease_s, **fields_of(fields)}
    claimed = await control.claim_batch(**options)
    lines = [f"{group['group_id']}  {len(group['rows'])} rows" for group in claimed["groups"]]
    out = [f"{len(claimed[how])} {how}" for how in ("refused", "dropped") if claimed.get(how)]
    what = f"batch {claimed['batch_id']!r}, for {lease_s:g} s" if lines else "no group is complete"
    return Answer(claimed, "; ".join([what, *out]), lines)


@batches.verb("ack")
async def ack_batch(
    control: "Control",
    batch: BatchId,
    *,
    delete: Annotated[bool, typer.Option("--delete", help="Delete its groups and their rollouts.")] = False,
) -> Answer:
    """Acknowledge a batch: its groups are trained, and leave the queue."""
    return _batch(batch, await control.ack_batch(batch, delete=delete or None), "acknowledged")


@batches.verb("release")
async def release_batch(control: "Control", batch: BatchId) -> Answer:
    """Release a batch: its groups return to the queue."""
    return _batch(batch, await control.release_batch(batch), "released")


@batches.verb("extend")
async def extend_batch(
    control: "Control",
    batch: BatchId,
    lease_s: Annotated[float, typer.Option(help="Seconds from now.", callback=finite)] = 60,
) -> Answer:
    """Extend the lease of a batch."""
    return _batch(batch, await control.extend_batch(batch, lease_s=lease_s), f"extended by {lease_s:g} s")


def _batch(batch: str, result: "Mapping[str, Any]", done: str) -> Answer:
    lost = f"; lost to another consumer: {', '.join(map(repr, result['lost']))}" if result.get("lost") else ""
    return Answer(result, f"batch {batch!r}: {done}{lost}")


@policies.verb("list")
async def list_policies(control: "Control") -> Answer:
    """List the policies with their versions, and whether their calls are paused."""
    found = await control.policies()
    return Answer(found, tables={"policies": found["policies"]})


@policies.verb("set", context_settings=_NEGATIVE_NUMBERS)
async def set_policy(
    control: "Control",
    version: Annotated[str, typer.Argument(help="Version of the weights.")],
    policy: PolicyName = _DEFAULT_POLICY,
    run_id: Annotated[
        str | None, typer.Option("--run", help="ID of the training run; another one begins a new epoch.")
    ] = None,
    *,
    new_epoch: Annotated[
        bool, typer.Option("--new-epoch", help="Begin an epoch: the run continues from an earlier version.")
    ] = False,
) -> Answer:
    """Announce the version of the weights to all processes of the store; steps record it."""
    announced = await control.put_policy(version, policy=policy, run=run_id, new_epoch=new_epoch)
    epoch = f", epoch {announced['epoch']}" if announced.get("epoch") else ""
    return Answer(announced, f"policy {policy!r}: version {announced['version']}{epoch}")


@policies.verb("pause")
async def pause_policy(
    control: "Control",
    policy: PolicyName = _DEFAULT_POLICY,
    mode: Annotated[
        Literal["wait", "reject"], typer.Option(help="What new calls do: wait until `resume`, or get 429.")
    ] = "wait",
    drain_s: Annotated[
        float, typer.Option(min=0, help="Seconds to wait until no call is in flight.", callback=finite)
    ] = 0,
    *,
    abort: Annotated[bool, typer.Option("--abort", help="Abort calls that are in flight after --drain-s.")] = False,
    interrupt: Annotated[
        bool, typer.Option("--interrupt", help="Interrupt calls at once; they are resumed after the pause.")
    ] = False,
    endpoint: Annotated[
        list[str] | None, typer.Option(help="Hold only this endpoint: its calls move to others; repeatable.")
    ] = None,
) -> Answer:
    """Pause new calls in all processes of the store. With --drain-s, exit with 3 if calls are still in flight after it."""
    if abort and (interrupt or endpoint):
        usage_error("specify either --abort, or --interrupt and --endpoint")
    in_flight: Any = "resume" if interrupt or endpoint else "abort" if abort else "keep"
    paused = await control.pause(mode, drain_s=drain_s, in_flight=in_flight, endpoints=endpoint, policy=policy)
    is_left = not paused["drained"] and (drain_s or in_flight != "keep")
    return Answer(paused, _mode_line(policy, paused), code=Exit.FOUND if is_left else Exit.DONE)


@policies.verb("resume")
async def resume_policy(
    control: "Control",
    policy: PolicyName = _DEFAULT_POLICY,
    endpoint: Annotated[list[str] | None, typer.Option(help="Release only this endpoint; repeatable.")] = None,
    version: Annotated[str | None, typer.Option(help="Version of the weights of --endpoint.")] = None,
) -> Answer:
    """Resume the calls of a policy, and release its endpoints that are held."""
    resumed = await control.resume(policy=policy, endpoints=endpoint, version=version)
    return Answer(resumed, _mode_line(policy, resumed))


def _mode_line(name: str, policy: "Mapping[str, Any]") -> str:
    """Return what happens to the calls of a policy, and after a pause how many are in flight."""
    line = f"policy {name!r}: {_MODES.get(policy['mode'], str(policy['mode']))}"
    if policy.get("held"):
        line += f", {', '.join(policy['held'])} held"
    if "drained" not in policy:
        return line
    return f"{line}, " + ("no calls in flight" if policy["drained"] else f"{policy['in_flight']} calls in flight")


async def _deleted(control: "Control", noun: str, name: str) -> Answer:
    """Delete a rollout or a group. A request before finds out if it exists, since the response to a deletion does not."""
    from proxy.cli.control import Refused
    from tokentape.control_api import path_of

    path, exists = path_of(f"{noun}s", name), True
    try:
        await control.send("GET", path)
    except Refused as refused:
        exists = refused.status != NOT_FOUND  # a damaged one can be deleted
    if exists:
        await control.send("DELETE", path)
    note = f"{noun} {name!r}: {'deleted' if exists else 'does not exist; nothing was deleted'}"
    return Answer({f"{noun}_id": name, "deleted": exists}, note)


def _named_reward(option: str, text: str) -> tuple[str, float]:
    name, equals, number = text.rpartition("=")
    try:
        reward = float(number)
    except ValueError:
        reward = math.nan
    if not (equals and name and math.isfinite(reward)):
        usage_error(f"{option} {text}: use {'STEP_ID' if option == '--step' else 'THREAD'}=NUMBER")
    return name, reward
