"""`tokentape export --push`: scored groups posted to an Atropos service (296a0bc), each group as one object.

Holds the reading of groups from a proxy, what keeps a group back, and the posting. The service checks types only and answers
200 to nearly everything: whole groups, even lengths and the meaning of its answers are seen to here.
"""

import gzip
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final
from urllib.parse import quote, urlencode

import aiohttp
import orjson
from rich.console import Console

from proxy.cli.console import notes, print_json, visible
from proxy.cli.export import ExportRequest, connected
from proxy.config.settings import Settings
from proxy.export import FORMATS, Inexpressible, Rows
from proxy.export.atropos import IGNORED
from proxy.rollouts.rollout import FINISHED

FORMAT: Final = "scored_data"
_GZIP_FROM = 1024  # bytes; as Atropos' own environments do
_PER_TOKEN = ("tokens", "masks", "inference_logprobs", "advantages")
_PAGE = 1000


@dataclass(frozen=True, slots=True)
class Delivery:
    """Where groups go. `env_id` is what the service gave at `/register-env`.

    `group_size` rollouts make a whole group; None: as many as the group was opened with. `max_len`: no sequence may have
    more tokens.
    """

    service: str
    group_size: int | None = None
    env_id: int | None = None
    force_partial: bool = False
    max_len: int | None = None


@dataclass(frozen=True, slots=True)
class Member:
    """One rollout of a group: its rows, or none and why."""

    rollout_id: str
    status: str
    rows: Rows
    why: str | None = None
    left_out: str | None = None  # steps that gave no row, and why


@dataclass(frozen=True, slots=True)
class Scored:
    """A group as the proxy has it: its name, the size that it was opened with, and its rollouts.

    `taken` says that a consumer is done with it, or that it was dropped from the queue.
    """

    name: str
    size: int | None
    members: list[Member]
    taken: str | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """What a group comes to: the object to post, if any, and every reason that speaks against it."""

    body: dict[str, Any] | None
    reasons: list[str]


@dataclass(frozen=True, slots=True)
class Pushed:
    """What became of a group, and what spoke against it."""

    group_id: str
    told: str
    reasons: list[str]

    @property
    def is_received(self) -> bool:
        """Whether the service has it."""
        return self.told == "received"


class _Unsaid(OSError):
    """The request was sent, and no answer came."""


async def push(
    url: str | None,
    settings: Settings | None,
    wanted: ExportRequest,
    to: Delivery,
    *,
    api_key: str | None,
    notes: Console,
) -> list[Pushed]:
    """Post the groups, and say of each what became of it.

    Raises OSError with a sentence if the proxy refuses, or if there is no such service. A group that is refused does not
    keep back the others.
    """
    told_of: Counter[str] = Counter()
    pushed: list[Pushed] = []
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    # The service has a session of its own: our key is not for it. A connection for each post: one that the service closes
    # while it idles would leave it unknown whether the next group arrived.
    own = aiohttp.TCPConnector(force_close=True)
    async with (
        connected(url, settings, api_key) as (session, proxy),
        aiohttp.ClientSession(timeout=timeout, connector=own) as out,
    ):
        longest = await _longest(out, to.service)
        async for group in _groups(session, proxy, wanted):
            judged = judge(group, to, longest)
            for reason in judged.reasons:
                notes.print(f"group {group.name!r}: {visible(reason)}", markup=False, soft_wrap=True)
            told = "not posted" if judged.body is None else await _post(out, to.service, judged.body)
            notes.print(f"group {group.name!r}: {visible(told)}", markup=False, soft_wrap=True)
            told_of[told if told in {"received", "not posted"} else "posted and not received"] += 1
            pushed.append(Pushed(group.name, told, judged.reasons))
    summary = ", ".join(f"{count} {what}" for what, count in told_of.items()) or "there is no group"
    notes.print(f"groups: {summary}", markup=False, soft_wrap=True)
    return pushed


def judge(group: Scored, to: Delivery, longest: int) -> Judged:
    """What to post of a group. `longest` is the service's max_token_len; 0 or less: no limit."""
    reasons, kept = [], []
    size = group.size if to.group_size is None else to.group_size
    if group.taken is not None:
        return Judged(None, [f"it is {group.taken} already; --group names it if it is to be posted all the same"])
    if size is None:
        return Judged(None, ["calls brought it into being, so its size is not known; --group-size says it"])
    for member in group.members:
        why = _against(member, longest, to.max_len)
        reasons += [f"rollout {member.rollout_id!r}: left out are {member.left_out}"] if member.left_out else []
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


def _against(member: Member, longest: int, max_len: int | None) -> str | None:
    """Why a rollout cannot be posted; None if it can."""
    if member.status not in FINISHED:
        return f"is {member.status}, not finished; finish it first"
    if member.why is not None:
        return member.why
    lengths = [len(tokens) for row in member.rows.rows for tokens in row["tokens"]]
    if not lengths or not all(lengths):
        return "is empty: it has no tokens to train on"
    if not all(any(kept != IGNORED for kept in mask) for row in member.rows.rows for mask in row["masks"]):
        return "has a sequence of which nothing is trained"
    if max_len is not None and max(lengths) > max_len:
        return f"is too long: it has {max(lengths)} tokens, and --max-len is {max_len}"
    if 0 < longest <= max(lengths):  # an environment drops what is as long as the limit too
        return f"is too long: it has {max(lengths)} tokens, and the service takes fewer than {longest}"
    return None


async def _groups(session: aiohttp.ClientSession, url: str, wanted: ExportRequest) -> AsyncIterator[Scored]:
    """The groups that are asked for, newest first, each with its rollouts in its own order."""
    names = [wanted.group] if wanted.group is not None else [name async for name in _names(session, url)]
    for name in names:
        group = await _asked(session, "GET", f"{url}/groups/{quote(name, safe='')}")
        members = [await _member(session, url, rollout, wanted.include) for rollout in group["rollouts"]]
        taken = group["status"] if wanted.group is None and group["status"] in {"done", "dropped"} else None
        yield Scored(name, group["size"], members, taken)


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
    return Member(name, rollout["status"], Rows(rows, []), why, skipped if rows else None)


async def _longest(session: aiohttp.ClientSession, service: str) -> int:
    """The service's max_token_len; -1 before a trainer registered."""
    found = await _asked(session, "GET", f"{service.rstrip('/')}/info")
    length = found.get("max_token_len")
    if not isinstance(length, int):
        raise OSError(f"{service}/info says no max_token_len: is an Atropos service there?")
    return length


async def _post(session: aiohttp.ClientSession, service: str, group: Mapping[str, Any]) -> str:
    """Post one group; what the service did with it, in its own word where it received it."""
    body, headers = orjson.dumps(group), {"Content-Type": "application/json"}
    if len(body) >= _GZIP_FROM:
        body, headers = gzip.compress(body), {**headers, "Content-Encoding": "gzip"}
    try:
        found = await _asked(session, "POST", f"{service.rstrip('/')}/scored_data", body, headers)
    except _Unsaid as error:
        return f"posted, and it is not known whether it was received: {error}"
    except OSError as error:
        return f"not received: {error}"
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
    """The object that the service answers. Raises OSError with a sentence otherwise, `_Unsaid` if it went without a word."""
    try:
        async with session.request(method, url, data=body, headers=headers, allow_redirects=False) as answer:
            read = await answer.read()
            if answer.status != 200:
                raise OSError(f"{url} answered {answer.status}: {read.decode(errors='replace').strip()}")
    except aiohttp.ClientConnectorError as error:
        raise OSError(f"{url} cannot be reached: {error}") from error
    except (aiohttp.ClientError, TimeoutError) as error:
        raise _Unsaid(f"{url} broke off: {str(error) or type(error).__name__}") from error
    try:
        found = orjson.loads(read)
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise OSError(f"{url} answered no JSON object: is an Atropos service there?")
    return found


async def push_all(
    url: str | None,
    settings: Settings | None,
    wanted: ExportRequest,
    to: Delivery,
    *,
    api_key: str | None,
    as_json: bool,
) -> bool:
    """Post the groups; whether the service received every one. Raises OSError with a sentence."""
    pushed = await push(url, settings, wanted, to, api_key=api_key, notes=notes())
    is_received = all(group.is_received for group in pushed)
    if as_json:
        print_json({"received": is_received, "groups": [asdict(group) for group in pushed]})
    return is_received
