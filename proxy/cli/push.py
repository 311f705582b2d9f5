"""`tokentape export --push`: posts groups to an Atropos service.

The service (296a0bc) validates only types and returns 200 for almost every request, so groups are checked here to be complete,
with arrays of equal lengths, and its responses are interpreted.
"""

import gzip
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from http.client import CONFLICT
from typing import Any, Final

import aiohttp
import orjson
from rich.console import Console

from proxy.cli.console import print_json, visible
from proxy.cli.control import Control, ControlAddress, Refused, connected
from proxy.cli.export import ExportRequest
from proxy.export import FORMATS, Inexpressible, Rows
from proxy.export.atropos import IGNORED
from proxy.rollouts.rollout import FINISHED

FORMAT: Final = "scored_data"
MIN_GZIP_BYTES = 1024  # as in Atropos' environments
_PER_TOKEN = ("tokens", "masks", "inference_logprobs", "advantages")
PAGE_SIZE = 1000


@dataclass(frozen=True, slots=True)
class PushOptions:
    """The Atropos service and what may be posted to it.

    `env_id` is the ID returned by `/register-env`. A complete group has `group_size` rollouts; None means the size that the
    group was opened with. `max_len` is the maximum number of tokens per sequence.
    """

    service: str
    group_size: int | None = None
    env_id: int | None = None
    force_partial: bool = False
    max_len: int | None = None


@dataclass(frozen=True, slots=True)
class Member:
    """A rollout of a group: its rows, or the reason why it has none."""

    rollout_id: str
    status: str
    rows: Rows
    problem: str | None = None
    skipped: str | None = None  # number of steps without a row, and why


class _NoResponse(OSError):
    """The request was sent, but no response was received."""


async def post_groups(
    address: ControlAddress, request: ExportRequest, options: PushOptions, out: Console, *, as_json: bool
) -> bool:
    """Post the groups, print the result of each, and return whether the service received all of them.

    A rejected group does not prevent the next one from being posted.

    Raises:
        OSError: A request to the proxy failed, or the service is unreachable or not an Atropos service.
    """
    results: list[dict[str, Any]] = []
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    # A separate session: the service must not receive our API key. A connection per request: if the service closed an idle
    # one, it would be unknown whether the group was received.
    connector = aiohttp.TCPConnector(force_close=True)
    async with connected(address) as control, aiohttp.ClientSession(timeout=timeout, connector=connector) as service:
        max_token_len = await _max_token_len(service, options.service)
        every = [group["group_id"] async for group in control.groups(page=PAGE_SIZE)] if request.group is None else []
        for name in every if request.group is None else [request.group]:
            group = await control.group(name)
            if request.group is None and group["status"] in {"done", "dropped"}:
                body, reasons = None, [f"its status is already {group['status']}; use --group to post it anyway"]
            else:
                members = [await _member(control, rollout, request) for rollout in group["rollouts"]]
                body, reasons = prepare(group["size"], members, options, max_token_len)
            result = "not posted" if body is None else await _post(service, options.service, body)
            for line in (*reasons, result):
                out.print(f"group {name!r}: {visible(line)}", markup=False, soft_wrap=True)
            results.append({"group_id": name, "result": result, "reasons": reasons})
    counts = Counter(
        found["result"] if found["result"] in {"received", "not posted"} else "posted but not received"
        for found in results
    )
    summary = ", ".join(f"{count} {result}" for result, count in counts.items()) or "none"
    out.print(f"groups: {summary}", markup=False, soft_wrap=True)
    is_received = all(found["result"] == "received" for found in results)
    if as_json:
        print_json({"received": is_received, "groups": results})
    return is_received


def prepare(
    opened_size: int | None, members: Sequence[Member], options: PushOptions, max_token_len: int
) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the object to post for a group, or None, and the problems that were found.

    `opened_size` is the size that the group was opened with. `max_token_len` is the limit of the service; 0 or less means no
    limit.
    """
    reasons, kept = [], []
    size = opened_size if options.group_size is None else options.group_size
    if size is None:
        return None, ["its size is unknown because calls created it; use --group-size"]
    for member in members:
        problem = _problem(member, max_token_len, options.max_len)
        reasons += [f"rollout {member.rollout_id!r}: skipped {member.skipped}"] if member.skipped else []
        if problem is None:
            kept.append(member.rows)
        else:
            reasons.append(f"rollout {member.rollout_id!r} {problem}")
    try:
        body = FORMATS[FORMAT].gather(kept)
        assert_even(body)
    except (Inexpressible, ValueError) as error:
        return None, [*reasons, str(error)]
    scores = body.get("scores", [])
    if not scores:
        return None, [*reasons, "it has no sequences to post"]
    if len(scores) > 1 and len(set(scores)) == 1:  # an Atropos environment drops such a group too, by default
        return None, [*reasons, f"all scores are equal ({scores[0]}), so it has no learning signal"]
    if len(scores) != size:
        reasons.append(f"it has {len(scores)} sequences to post; a complete group has {size}")
    is_complete = len(members) == len(kept) == len(scores) == size
    if not is_complete and not options.force_partial:
        return None, [*reasons, "it is incomplete; use --force-partial to post it anyway"]
    return {**body, **({} if options.env_id is None else {"env_id": options.env_id})}, reasons


def assert_even(body: Mapping[str, Any]) -> None:
    """Raise ValueError if the arrays of a sequence differ in length; the service would accept them with a 200."""
    columns = {name: body[name] for name in _PER_TOKEN if body.get(name) is not None}
    counts = {name: len(column) for name, column in columns.items()} | {"scores": len(body.get("scores", []))}
    if columns and len(set(counts.values())) > 1:
        raise ValueError(f"its fields have different numbers of sequences: {counts}")
    for index in range(counts["scores"] if columns else 0):
        lengths = {name: len(column[index]) for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the arrays of sequence {index} have different lengths: {lengths}")


def _problem(member: Member, max_token_len: int, max_len: int | None) -> str | None:
    """Return why a rollout cannot be posted, or None if it can."""
    if member.status not in FINISHED:
        return f"has status {member.status}; finish it first"
    if member.problem is not None:
        return member.problem
    lengths = [len(tokens) for row in member.rows.rows for tokens in row["tokens"]]
    if not lengths or not all(lengths):
        return "is empty: it has no tokens to train on"
    if not all(any(kept != IGNORED for kept in mask) for row in member.rows.rows for mask in row["masks"]):
        return "has a sequence without trained tokens"
    if max_len is not None and max(lengths) > max_len:
        return f"is too long: it has {max(lengths)} tokens, and --max-len is {max_len}"
    if 0 < max_token_len <= max(lengths):  # an environment also drops sequences that are as long as the limit
        return f"is too long: it has {max(lengths)} tokens, and the service accepts fewer than {max_token_len}"
    return None


async def _member(control: Control, rollout: Mapping[str, Any], request: ExportRequest) -> Member:
    """Return a rollout with its rows. A 409 (e.g. it has no reward) becomes its problem."""
    name, status = rollout["rollout_id"], rollout["status"]
    (path,) = replace(request, format=FORMAT, rollouts=(name,), container="ndjson").paths()
    try:
        async with control.response(path) as response:
            skipped = response.headers.get("X-Export-Skipped")
            rows = [orjson.loads(line) for line in (await response.read()).splitlines()]
    except Refused as error:
        if error.status != CONFLICT:
            raise
        return Member(name, status, Rows([], []), f"cannot be exported: {error.reason}")
    problem = f"is empty: none of its steps can be exported ({skipped})" if not rows else None
    return Member(name, status, Rows(rows, []), problem, skipped if rows else None)


async def _max_token_len(session: aiohttp.ClientSession, service: str) -> int:
    """Return the service's max_token_len; -1 before a trainer has registered."""
    info = await _request(session, "GET", f"{service.rstrip('/')}/info")
    length = info.get("max_token_len")
    if not isinstance(length, int):
        raise OSError(f"{service}/info has no max_token_len; check that it is an Atropos service")
    return length


async def _post(session: aiohttp.ClientSession, service: str, group: Mapping[str, Any]) -> str:
    """Post one group and return the result; "received" means success."""
    body, headers = orjson.dumps(group), {"Content-Type": "application/json"}
    if len(body) >= MIN_GZIP_BYTES:
        body, headers = gzip.compress(body), {**headers, "Content-Encoding": "gzip"}
    try:
        response = await _request(session, "POST", f"{service.rstrip('/')}/scored_data", body, headers)
    except _NoResponse as error:
        return f"posted, but it is unknown whether it was received: {error}"
    except OSError as error:
        return f"not received: {error}"
    status = response.get("status")
    if status == "buffered":
        return (
            f"buffered, not received: the service buffers {response.get('buffer_size')} sequences of incomplete groups"
        )
    return "received" if status == "received" else f"not received: the response is {response}"


async def _request(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the JSON object of the response.

    Raises:
        _NoResponse: The request was sent, but no response was received.
        OSError: The connection failed, the status is not 200, or the body is not a JSON object.
    """
    try:
        async with session.request(method, url, data=body, headers=headers, allow_redirects=False) as response:
            text = await response.read()
            if response.status != 200:
                raise OSError(f"{url} returned {response.status}: {text.decode(errors='replace').strip()}")
    except aiohttp.ClientConnectorError as error:
        raise OSError(f"{url} is unreachable: {error}") from error
    except (aiohttp.ClientError, TimeoutError) as error:
        raise _NoResponse(f"{url} closed the connection: {str(error) or type(error).__name__}") from error
    try:
        parsed = orjson.loads(text)
    except orjson.JSONDecodeError:
        parsed = None
    if not isinstance(parsed, dict):
        raise OSError(f"{url} did not return a JSON object; check that it is an Atropos service")
    return parsed
