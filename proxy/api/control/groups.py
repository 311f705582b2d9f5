"""The routes of groups, of the branches of a rollout, and of what the newest groups earned."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from itertools import accumulate, zip_longest
from statistics import fmean
from typing import Any, Final

import orjson
from aiohttp import web
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from proxy.api.context import CONTEXT, Context
from proxy.api.control.export_query import ExportQuery, export_query_from
from proxy.api.control.exports import skipped_header
from proxy.api.control.group_rows import GroupRows, read_group_rows
from proxy.api.control.outcomes import earned_by
from proxy.api.control.rollouts import LIST_BUDGET_S, branch_step, check_opening, credentials, opened, shown_playback
from proxy.api.control.schemas import (
    ExportGroup,
    ListGroups,
    OpenBranches,
    OpenGroup,
    RequeueGroup,
    ShowTraining,
    ShowValues,
)
from proxy.api.requests import (
    body_from,
    json_response,
    named,
    page_from,
    query_from,
    rollout_from,
    rollout_id_from,
    validated,
)
from proxy.clock import new_id
from proxy.errors import NotFound, RequestTooLarge
from proxy.export.containers import Json
from proxy.rollouts.group import (
    STATUSES,
    Group,
    PolicyState,
    counted,
    find_group,
    find_groups,
    member_fields,
    member_names,
    members_of,
    read_group,
    read_members,
)
from proxy.rollouts.mismatch import Rules, newest_reports
from proxy.rollouts.policy import Announced, read_announced
from proxy.rollouts.rollout import Rollout, deadlines_of, first_due_ms, write_fields
from proxy.rollouts.steps import aside, decode_records
from proxy.rollouts.values import GROUP_MARK, note_playbacks, read_branches, read_values
from proxy.trajectory.advantages import normalized
from proxy.trajectory.json_bytes import to_json_bytes

_MAX_TERMS_BYTES: Final = 2**23  # written in one script, and read again for the response
_COUNTS: Final = ("steps", "exact", "flagged", "error", "sampled_tokens")


async def open_group(request: web.Request) -> web.Response:
    """`POST /groups`: open the group and all its rollouts, atomically. 201; 200 for the same body again; 409 for another."""
    return await opened_group(request, await body_from(request, OpenGroup))


async def opened_group(request: web.Request, opening: OpenGroup) -> web.Response:
    """Open a group and all its rollouts."""
    context = request.app[CONTEXT]
    name = opening.group_id or new_id(context.clock)
    terms = opening.rollout.model_dump(exclude_none=True, exclude_defaults=True)
    payload = {**opening.model_dump(exclude_none=True, exclude_defaults=True), "group_id": name, "rollout": terms}
    # In the bucket of the group, so that all can be opened together.
    ids = (new_id(context.clock) for _ in range(opening.size + opening.over_sample))
    members = [context.store.layout.in_bucket_of(name, it) for it in ids]
    values = {"size": opening.size, "members": members, "metadata": opening.metadata or None}
    replay = opening.replacement.model_dump(include={"ignore", "presets"}) if opening.replacement.playback else None
    own = {
        "over_sample": opening.over_sample or None,
        "replace": opening.replacement.attempts or None,
        "replay": replay,
    }
    fields = write_fields({**values, **own})
    fields["opened_with"] = orjson.dumps(payload, option=orjson.OPT_SORT_KEYS)
    defaults = context.settings.groups
    deadlines = deadlines_of({**terms, **payload}, idle_s=defaults.idle_s, start_s=defaults.start_s)
    taken = {} if opening.rollout.playback is None else await context.tapes.open(terms["playback"])
    terms_fields = taken | member_fields(payload, deadlines)
    terms_bytes = sum(map(len, terms_fields.values()))  # written for each rollout
    if len(members) * terms_bytes > _MAX_TERMS_BYTES:
        raise RequestTooLarge(
            f"{len(members)} rollouts with {terms_bytes} bytes of terms each exceed {_MAX_TERMS_BYTES} bytes. "
            "Put shared data into the group's `metadata`, and only small values into `rollout`."
        )
    rollouts, now_ms = dict.fromkeys(members, terms_fields), context.clock.now_ms()
    timer_ms = first_due_ms(deadlines, now_ms)
    stored = await context.store.open_group(name, fields, rollouts, now_ms=now_ms, timer_ms=timer_ms)
    check_opening(stored, fields, "Group", "its rollouts")
    group = read_group(stored)
    found = await asyncio.gather(*map(context.store.get, group.members))
    if taken and (first := next(filter(None, found), None)) is not None:
        await note_playbacks(context.store, context.clock, first, GROUP_MARK + name)
    shown = {
        **named(group, "group_id", "size"),
        "status": "open",
        **named(group, "metadata", "created_ms"),
        "rollouts": [opened(request, context, rollout) for rollout in found if rollout is not None],
    }
    return json_response(shown, status=201 if stored.created else 200)


async def list_groups(request: web.Request) -> web.Response:
    """`GET /groups?status=&policy=&limit=&cursor=`: newest first; with a filter, a page may have fewer groups than its limit.

    With `policy`, the groups that are open or for this policy; `status` is then that for the policy.
    With `totals`, each group has those of its rollouts; null for groups after the first 8,000 rollouts.
    """
    context = request.app[CONTEXT]
    asked = query_from(request, ListGroups)
    statuses = STATUSES if asked.status is None else (asked.status,)
    policy = None if asked.policy is None else context.policies.named(asked.policy).name
    cursor, end = asked.cursor, context.clock.monotonic() + LIST_BUDGET_S
    found: list[Group] = []
    unreadable: list[dict[str, str]] = []
    while True:
        page = await page_from(context.store.groups.list(cursor=cursor, limit=asked.limit))
        groups, damaged = await find_groups(context.store, page.names, context.metrics)
        unreadable += damaged
        now_ms, cursor = context.clock.now_ms(), page.cursor
        found = [
            group
            for group in groups
            if (group.status_at(now_ms) if policy is None else group.status_for(policy, now_ms)) in statuses
        ]
        if found or cursor is None or context.clock.monotonic() >= end:
            break
    shown = [_terms(context, group, now_ms) for group in found]
    if asked.totals:
        totals = [_totals(*each) async for each in _with_members(context, found, unreadable)]
        shown = [{**terms, "totals": total} for terms, total in zip_longest(shown, totals)]
    left = {"unreadable": unreadable} if unreadable else {}
    return json_response({"groups": shown, "cursor": cursor, **left})


def _totals(group: Group, rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Return the totals of a group's rollouts, and the mean reward of those that count; null if there is none."""
    rewards = [rollout.reward for rollout in counted(group, rollouts)[1] if rollout.reward is not None]
    drift = [sum(rollout.drift.kinds.values()) for rollout in rollouts if rollout.drift is not None]
    return {
        "reward": fmean(rewards) if rewards else None,
        **{name: sum(rollout.counts.get(name, 0) for rollout in rollouts) for name in _COUNTS},
        "drift": sum(drift) if drift else None,
    }


async def _with_members(
    context: Context, groups: Sequence[Group], unreadable: list[dict[str, str]]
) -> AsyncIterator[tuple[Group, list[Rollout]]]:
    """Yield groups with their rollouts until these are 8,000; add what is unreadable to `unreadable`."""
    sizes = accumulate(len(group.members) for group in groups)
    read = [group for group, size in zip(groups, sizes, strict=True) if size <= _MAX_ROLLOUTS]
    for start in range(0, len(read), _AT_ONCE):
        part = read[start : start + _AT_ONCE]
        found = await asyncio.gather(*(read_members(context.store, group, context.metrics) for group in part))
        for group, (members, damaged) in zip(part, found, strict=True):
            unreadable += damaged
            yield group, members


async def show_group(request: web.Request) -> web.Response:
    """`GET /groups/{id}`: the group with its members, their statuses, rewards, counts and drift."""
    context = request.app[CONTEXT]
    group = await group_from(request)
    if group.is_open:
        await context.finisher.settle(group)  # a crash may have interrupted its completion
        group = await group_from(request)
    rollouts, unreadable = await read_members(context.store, group, context.metrics)
    shown = shown_group(context, group, rollouts, context.clock.now_ms())
    if unreadable:
        shown["unreadable"] = unreadable
    for entry, rollout in zip(shown["rollouts"], rollouts, strict=True):
        if rollout.rollout_id in group.replaced.values():  # no other response has its key
            entry.update(credentials(request, context, rollout))
    return json_response(shown)


async def requeue_group(request: web.Request) -> web.Response:
    """`POST /groups/{id}/requeue`: put a group that was dropped or is done into the queue of a policy again.

    409 while it is open or claimed; one that is in the queue is unchanged. `requeued` counts, also in the claimed group.
    """
    context = request.app[CONTEXT]
    body = await body_from(request, RequeueGroup)
    policy = context.policies.claimed(body.policy).name
    group = await context.finisher.requeue(await group_from(request), policy, max_staleness=body.max_staleness)
    return json_response(_terms(context, group, context.clock.now_ms()))


async def delete_group(request: web.Request) -> web.Response:
    """`DELETE /groups/{id}`: delete the group and all its rollouts; 204, also if it does not exist."""
    await drop_group(request.app[CONTEXT], rollout_id_from(request))
    return web.Response(status=204)


async def export_group(request: web.Request) -> web.Response:
    """`GET /groups/{id}/export?format=…`: in JSON the group as one value in the trainer's format, otherwise its rows."""
    context = request.app[CONTEXT]
    conditions, query = export_query_from(request, ExportGroup)
    query = await query.begin(context)
    group = await group_from(request)
    if conditions.members == "all":
        group, rollouts = counted(group, await members_of(context.store, group))
    else:
        members, unreadable = await read_members(context.store, group, context.metrics)
        group, rollouts = counted(group, members)
        whys = {entry["rollout_id"]: entry["why"] for entry in unreadable}
        readable = tuple(name for name in group.members if name not in whys)
        group = structs.replace(group, members=readable, unneeded={**group.unneeded, **whys})
    gathered = await read_group_rows(context, query, group, rollouts, conditions)
    skipped = gathered.skipped if gathered.reason is None else [{"why": gathered.reason.why}]
    body = await _rendered(query, gathered)
    return web.Response(
        body=body,
        content_type=query.container.content_type,
        headers=skipped_header(skipped, is_empty=not gathered.members),
    )


async def _rendered(query: ExportQuery, gathered: GroupRows) -> bytes:
    """Write a group in its container: as one JSON value, in an object with the report if one is requested; or as rows.

    The `rows` of the report are parallel to the rows, or to the entries of the lists of a format that is one object.
    """
    whole = await gathered.whole(query)
    why = None if gathered.reason is None else gathered.reason.why
    report = {"skipped": gathered.skipped, "why": why, "rows": gathered.about(query)}
    if query.container is Json:
        shown = {"group": whole, "report": report} if query.report else whole
        return await aside(gathered.count, lambda: to_json_bytes(shown))
    if isinstance(whole, list):
        rows = whole if query.container.nests else [row for item in whole for row in query.form.flat(item)]
    else:
        rows = [whole] if gathered.count else []
    return await aside(gathered.count, lambda: b"".join(query.pieces(rows, report)))


async def drop_group(context: Context, group_id: str) -> None:
    """Delete the rollouts of a group, then the group, so that a retry finds what is left."""
    stored = await context.store.groups.get(group_id)
    if stored is not None:
        for name in member_names(stored, await context.store.groups.marks(group_id)):
            await context.store.delete(name)
        await context.store.groups.delete(group_id)


async def group_from(request: web.Request) -> Group:
    """Return the group that the path names. Raises NotFound."""
    name = rollout_id_from(request)
    group = await find_group(request.app[CONTEXT].store, name)
    if group is None:
        raise NotFound(f"Group {name!r} not found.", param="group_id")
    return group


def shown_group(context: Context, group: Group, rollouts: Sequence[Rollout], now_ms: int) -> dict[str, Any]:
    """Return the JSON of a group. `rewards` are in the order of its rollouts."""
    shown = []
    for rollout in rollouts:
        # Why TokenTape finished it, and what replaces it, where there are such.
        ending = {"reason": rollout.reason, "replaced_by": group.replaced.get(rollout.rollout_id)}
        entry = {
            **named(rollout, "rollout_id", "status", "reward"),
            **shown_playback(rollout),
            **{name: rollout.counts.get(name, 0) for name in _COUNTS},
            "drift": None if rollout.drift is None else rollout.drift.kinds,
            **named(rollout, "task", "errors", "created_ms", "began_ms", "touched_ms", "finished_ms"),
            **{name: value for name, value in ending.items() if value is not None},
        }
        shown.append(entry)
    return {
        **_terms(context, group, now_ms),
        "rollouts": shown,
        "rewards": [rollout.reward for rollout in rollouts],
    }


def _terms(context: Context, group: Group, now_ms: int) -> dict[str, Any]:
    """Return the JSON of a group without its rollouts. With named policies, it has the state for each of them."""
    of_all = [(policy, _state(state, now_ms)) for policy, state in group.states.items()]
    alone = of_all[0][1] if len(of_all) == 1 else {}
    return {
        **named(group, "group_id", "size"),
        "status": group.status_at(now_ms),
        "members": len(group.members),
        "finished": len(group.finished & set(group.members)),
        "policy_version": None,
        **named(group, "metadata", "created_ms", "complete_ms", *(("over_sample",) if group.over_sample else ())),
        **alone,
        **({"policies": dict(of_all)} if context.policies.has_named else {}),
    }


def _state(state: PolicyState, now_ms: int) -> dict[str, Any]:
    status = state.status_at(now_ms)
    return {
        "status": status,
        "policy_version": state.oldest,
        **({"policy_epoch": state.epoch} if state.epoch else {}),
        **(named(state, "batch_id", "consumer", "lease_ms") if status == "claimed" else {}),
        **(named(state, "why", "code") if status == "dropped" else {}),
        **(named(state, "requeued", "acked") if state.requeued else {}),
    }


_MAX_ROLLOUTS: Final = 8000  # that one response reads: about a second
_AT_ONCE: Final = 16
_REFUSED: Final = "tokentape_refused_groups_total"
_WARNED: Final = "tokentape_ratio_warning_tokens_total"
_RESUMED: Final = "tokentape_resumed_calls_total"
_CUT: Final = "tokentape_cut_tokens_total"
_WAITS: Final = "tokentape_resume_wait_seconds"  # _sum, _count
_COUNTED: Final = (f"{_REFUSED}{{", f"{_WARNED}{{", f"{_RESUMED}{{", f"{_CUT}{{", f"{_WAITS}_sum", f"{_WAITS}_count")


async def show_training(request: web.Request) -> web.Response:
    """`GET /training?policy=&limit=`: one entry for each of the newest groups, newest first, and their totals.

    At most `limit` groups and 8,000 of their rollouts are read; `covered` has how many.
    """
    context = request.app[CONTEXT]
    asked = query_from(request, ShowTraining)
    names = [policy.name for policy in context.policies]
    policy = context.policies.named(asked.policy or next(iter(context.policies.trained), names[0])).name
    announced = read_announced(await context.store.announcements.read(), policy)
    page = await context.store.groups.list(limit=asked.limit)
    stored, unreadable = await find_groups(context.store, page.names, context.metrics)
    groups = [group for group in stored if _is_of(group, policy)]
    entries = [
        _entry(group, members, policy, announced, context.clock.now_ms())
        async for group, members in _with_members(context, groups, unreadable)
    ]
    compared = [entry["equal"] for entry in entries if entry["equal"] is not None]
    rules = Rules(**dict(context.settings.mismatch))
    return json_response(
        {
            "policy": policy,
            "policies": names,
            **named(announced, "version", "epoch"),
            "groups": entries,
            "statuses": Counter(entry["status"] for entry in entries),
            **await _counted(context, policy),
            "mismatch": await newest_reports(context.store, policy, rules, context.metrics),
            "dropped": Counter(entry["code"] for entry in entries if entry["status"] == "dropped"),
            "equal": fmean(compared) if compared else None,
            "covered": {"groups": len(entries), "rollouts": sum(entry["members"] for entry in entries)},
            "older": page.cursor is not None or len(entries) < len(groups),
            **({"unreadable": unreadable} if unreadable else {}),
        }
    )


async def _counted(context: Context, policy: str) -> dict[str, Any]:
    """Return what this process has counted since it started, which the workers of a process sum.

    `refused`: groups of the policy that claims have refused, by reason; `warnings`: tokens of the warnings of claims, by code.
    Of all policies, `interrupted`: calls that their engines or updates ended early, by result and by why they were not resumed;
    their sampled tokens that were kept and lost; and for how long they waited until they were sent again, in seconds.
    """
    lines = (await context.worker_metrics.exposition()).decode().splitlines()
    text = "\n".join(line for line in lines if line.startswith(_COUNTED))
    samples = [sample for family in text_string_to_metric_families(text + "\n") for sample in family.samples]

    def sums(name: str, label: str, **labels: str) -> dict[str, int]:
        found: Counter[str] = Counter()
        for sample in samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                found[sample.labels[label]] += int(sample.value)
        return {value: count for value, count in found.items() if count}

    reasons = sums(_RESUMED, "reason")
    reasons.pop("none", None)
    waits = {sample.name: sample.value for sample in samples if sample.name.startswith(_WAITS)}
    interrupted = {
        "calls": sums(_RESUMED, "result"),
        "reasons": reasons,
        "tokens": sums(_CUT, "result"),
        "waits": int(waits.get(f"{_WAITS}_count", 0)),
        "waited_s": waits.get(f"{_WAITS}_sum", 0.0),
    }
    return {
        "refused": sums(_REFUSED, "reason", policy=policy),
        "warnings": sums(_WARNED, "warning", policy=policy),
        "interrupted": interrupted,
    }


def _is_of(group: Group, policy: str) -> bool:
    """Return whether a policy has steps in a group, or may get some: the group is open."""
    return group.is_open or policy in group.states


def _entry(group: Group, rollouts: list[Rollout], policy: str, announced: Announced, now_ms: int) -> dict[str, Any]:
    """Return what a group earned; unknown values are null. The version is the one that sampled the group's oldest token."""
    state = group.states.get(policy)
    earned = earned_by(counted(group, rollouts)[1])
    rewards = earned.rewards
    advantages = [value for (value,) in normalized([[reward] for reward in rewards])] if len(rewards) > 1 else []
    mean = fmean(rewards) if rewards else None
    of_policy: tuple[Any, ...] = (None,) * 4
    if state is not None:
        of_policy = state.code, state.oldest, state.epoch, announced.staleness(state.oldest, state.epoch)
    return {
        "group_id": group.group_id,
        "status": group.status_for(policy, now_ms) or "open",
        **dict(zip(("code", "version", "epoch", "staleness"), of_policy, strict=True)),
        **named(group, "created_ms", "complete_ms"),
        "members": len(rollouts),
        "rewards": len(rewards),
        "reward": mean,
        "spread": None if mean is None else fmean((reward - mean) ** 2 for reward in rewards) ** 0.5,
        "equal": len(set(rewards)) == 1 if len(rewards) > 1 else None,
        "advantages": [min(advantages), max(advantages)] if advantages else None,
        "tokens": fmean(earned.tokens) if earned.tokens else None,
    }


async def open_branches(request: web.Request) -> web.Response:
    """`POST /rollouts/{id}/branches`: open a group of playbacks of a rollout before a step, as `POST /groups` does.

    Playbacks before the first step have an empty tape, and are sampled at once.
    """
    context, rollout = request.app[CONTEXT], await rollout_from(request)
    body = await body_from(request, OpenBranches)
    own = {"before", "count", "ignore", "presets"}
    terms: dict[str, Any] = {"of": rollout.rollout_id, "ignore": body.ignore, "presets": body.presets}
    if body.before is not None:
        terms["before"] = body.before
    else:
        first = await context.store.read(rollout.rollout_id, 0, 1)
        steps = await decode_records(context.store, rollout, first, 0, whole=False)
        terms |= {"before": steps[0].step_id if steps else None, "on_mismatch": "sample"}
    given = body.model_dump(exclude=own, exclude_none=True, exclude_defaults=True)
    group = {**given, "size": body.count, "rollout": {**given.get("rollout", {}), "playback": terms}}
    return await opened_group(request, validated(OpenGroup, group))


async def list_branches(request: web.Request) -> web.Response:
    """`GET /rollouts/{id}/branches`: the rollouts that play a rollout back, each with its step there and its reward.

    Without those that failed and were replaced, or are surplus.
    """
    context, rollout = request.app[CONTEXT], await rollout_from(request)
    branches = [
        {
            **named(branch.rollout, "rollout_id", "group_id", "status", "reward"),
            **branch_step(branch.playback),
            "branched": branch.has_branched,
        }
        for branch in await read_branches(context.store, rollout, context.metrics)
    ]
    return json_response({"rollout_id": rollout.rollout_id, "branches": branches})


async def show_values(request: web.Request) -> web.Response:
    """`GET /rollouts/{id}/values`: the mean reward of the branches before each step that has some, in the order of the steps.

    409 if branches were sampled by other policy versions than the step, unless `any_version`.
    """
    context = request.app[CONTEXT]
    asked, rollout = query_from(request, ShowValues), await rollout_from(request)
    values = await read_values(context.store, rollout, context.metrics, any_version=asked.any_version)
    return json_response({"rollout_id": rollout.rollout_id, "values": [value.as_dict() for value in values]})
