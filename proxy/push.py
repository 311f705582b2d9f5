"""`tokentape export --push`: scored groups posted to an Atropos service (296a0bc), each group as one object.

Holds the reading of groups from a proxy, what keeps a group back, and the posting. The service checks types only and answers
200 to nearly everything: whole groups, even lengths and the meaning of its answers are seen to here.
"""

import gzip
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, urlencode

import aiohttp
import orjson
from rich.console import Console

from proxy.config import Settings
from proxy.download import Wanted, connected
from proxy.export import FORMATS, Inexpressible, Rows
from proxy.rollouts import FINISHED

FORMAT: Final = "scored_data"
_GZIP_FROM = 1024  # bytes; as Atropos' own environments do
_PER_TOKEN = ("tokens", "masks", "inference_logprobs", "advantages")
_PAGE = 1000


@dataclass(frozen=True, slots=True)
class Delivery:
    """Where groups go. `env_id` is what the service gave at `/register-env`.

    `group_size` rollouts make a whole group; None: as many as the group was opened with.
    """

    service: str
    group_size: int | None = None
    env_id: int | None = None
    force_partial: bool = False


@dataclass(frozen=True, slots=True)
class Member:
    """One rollout of a group: its rows, or none and why."""

    rollout_id: str
    status: str
    rows: Rows
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Scored:
    """A group as the proxy has it: its name, the size that it was opened with, and its rollouts."""

    name: str
    size: int | None
    members: list[Member]


@dataclass(frozen=True, slots=True)
class Judged:
    """What a group comes to: the object to post, if any, and every reason that speaks against it."""

    body: dict[str, Any] | None
    reasons: list[str]


async def push(
    url: str | None, settings: Settings | None, wanted: Wanted, to: Delivery, *, api_key: str | None, notes: Console
) -> bool:
    """Post the groups, and say of each what became of it; whether the service received every one.

    Raises OSError with a sentence if the proxy or the service refuses. What was posted before stays posted.
    """
    received_all = True
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    # The service has a session of its own: our key is not for it.
    async with connected(url, settings, api_key) as (session, proxy), aiohttp.ClientSession(timeout=timeout) as out:
        longest = await _longest(out, to.service)
        async for group in _groups(session, proxy, wanted):
            judged = judge(group, to, longest)
            for reason in judged.reasons:
                notes.print(f"group {group.name!r}: {reason}", markup=False, soft_wrap=True)
            told = "not posted" if judged.body is None else await _post(out, to.service, judged.body)
            notes.print(f"group {group.name!r}: {told}", markup=False, soft_wrap=True)
            received_all = received_all and told == "received"
    return received_all


def judge(group: Scored, to: Delivery, longest: int) -> Judged:
    """What to post of a group. `longest` is the service's max_token_len; 0 or less: no limit."""
    reasons, kept = [], []
    size = group.size if to.group_size is None else to.group_size
    if size is None:
        return Judged(None, ["calls brought it into being, so its size is not known; --group-size says it"])
    for member in group.members:
        why = _against(member, longest)
        if why is None:
            kept.append(member.rows)
        else:
            reasons.append(f"rollout {member.rollout_id!r} {why}")
    try:
        body = FORMATS[FORMAT].gather(kept)
        assert_even(body)
    except (Inexpressible, ValueError) as error:
        return Judged(None, [*reasons, str(error)])
    scores = body.get("scores", [])
    if not scores:
        return Judged(None, [*reasons, "nothing is left to post"])
    if len(scores) > 1 and len(set(scores)) == 1:  # an Atropos environment drops such a group too, by default
        return Judged(None, [*reasons, f"all its scores are equal ({scores[0]}), so it teaches nothing"])
    if len(scores) != size:
        reasons.append(f"it has {len(scores)} sequences to post, and a whole group has {size}")
    whole = len(group.members) == len(kept) == len(scores) == size
    if not whole and not to.force_partial:
        return Judged(None, [*reasons, "it is not a whole group; --force-partial posts it all the same"])
    return Judged({**body, **({} if to.env_id is None else {"env_id": to.env_id})}, reasons)


def assert_even(body: Mapping[str, Any]) -> None:
    """Raise ValueError if a rollout's arrays are not all of one length: the service would take them with a 200."""
    columns = {name: body[name] for name in _PER_TOKEN if body.get(name) is not None}
    counts = {name: len(column) for name, column in columns.items()} | {"scores": len(body.get("scores", []))}
    if columns and len(set(counts.values())) > 1:
        raise ValueError(f"its fields do not speak of the same number of sequences: {counts}")
    for place in range(counts["scores"] if columns else 0):
        lengths = {name: len(column[place]) for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the arrays of its sequence {place} are not of one length: {lengths}")


def _against(member: Member, longest: int) -> str | None:
    """Why a rollout cannot be posted; None if it can."""
    if member.status not in FINISHED:
        return f"is {member.status}, not finished; finish it first"
    if member.why is not None:
        return member.why
    lengths = [len(tokens) for row in member.rows.rows for tokens in row["tokens"]]
    if not lengths or not all(lengths):
        return "is empty: it has no tokens to train on"
    if 0 < longest <= max(lengths):  # an environment drops what is as long as the limit too
        return f"is too long: it has {max(lengths)} tokens, and the service takes fewer than {longest}"
    return None


async def _groups(session: aiohttp.ClientSession, url: str, wanted: Wanted) -> AsyncIterator[Scored]:
    """The groups that are asked for, newest first, each with its rollouts in its own order."""
    names = [wanted.group] if wanted.group is not None else [name async for name in _names(session, url)]
    for name in names:
        group = await _asked(session, "GET", f"{url}/groups/{quote(name, safe='')}")
        members = [await _member(session, url, rollout, wanted.include) for rollout in group["rollouts"]]
        yield Scored(name, group["size"], members)


async def _names(session: aiohttp.ClientSession, url: str) -> AsyncIterator[str]:
    """Every group that the proxy lists, newest first."""
    query = {"limit": str(_PAGE)}
    while True:
        page = await _asked(session, "GET", f"{url}/groups?{urlencode(query)}")
        for group in page["groups"]:
            yield group["group_id"]
        if not page["cursor"]:
            return
        query["cursor"] = page["cursor"]


async def _member(session: aiohttp.ClientSession, url: str, rollout: Mapping[str, Any], include: str) -> Member:
    """A rollout with its rows. What the format cannot say of it (409: no reward) is kept as the reason."""
    name = rollout["rollout_id"]
    query = urlencode({"format": FORMAT, "include": include, "container": "ndjson"})
    place = f"{url}/rollouts/{quote(name, safe='')}/export?{query}"
    async with session.get(place) as answer:
        body = await answer.read()
        if answer.status == 409:
            return Member(name, rollout["status"], Rows([], []), f"cannot be said: {body.decode(errors='replace')}")
        if answer.status != 200:
            raise OSError(f"{place} answered {answer.status}: {body.decode(errors='replace').strip()}")
        skipped = answer.headers.get("X-Export-Skipped")
    rows = [orjson.loads(line) for line in body.splitlines()]
    why = f"is empty: no step of it can be exported ({skipped})" if not rows else None
    return Member(name, rollout["status"], Rows(rows, []), why)


async def _longest(session: aiohttp.ClientSession, service: str) -> int:
    """The service's max_token_len; -1 before a trainer registered."""
    found = await _asked(session, "GET", f"{service.rstrip('/')}/info")
    length = found.get("max_token_len")
    return length if isinstance(length, int) else -1


async def _post(session: aiohttp.ClientSession, service: str, group: Mapping[str, Any]) -> str:
    """Post one group; what the service did with it, in its own word where it received it."""
    body, headers = orjson.dumps(group), {"Content-Type": "application/json"}
    if len(body) >= _GZIP_FROM:
        body, headers = gzip.compress(body), {**headers, "Content-Encoding": "gzip"}
    found = await _asked(session, "POST", f"{service.rstrip('/')}/scored_data", body, headers)
    status = found.get("status")
    if status == "buffered":
        return f"buffered, not received: the service holds {found.get('buffer_size')} sequences of unfit groups back"
    return "received" if status == "received" else f'answered with {found}, which is not "received"'


async def _asked(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The object that the service answers. Raises OSError with a sentence otherwise."""
    try:
        async with session.request(method, url, data=body, headers=headers) as answer:
            read = await answer.read()
            if answer.status != 200:
                raise OSError(f"{url} answered {answer.status}: {read.decode(errors='replace').strip()}")
    except aiohttp.ClientError as error:
        raise OSError(f"{url} cannot be reached: {error}") from error
    try:
        found = orjson.loads(read)
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise OSError(f"{url} answered no JSON object: is an Atropos service there?")
    return found
