"""What the ranks of a trainer reported of a batch: parts, and their sums, which processes add up in any order.

The report of a batch is one entity, changed by compare and set, which expires 25 hours after the last part: an hour after the
longest lease.
"""

import asyncio
import zlib
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final
from weakref import WeakValueDictionary

import msgspec
import orjson
from msgspec import Struct

from proxy.errors import Conflict, Damaged, UnprocessableRequest
from proxy.rollouts.mismatch import (
    ALL,
    MAX_VALUES,
    Rules,
    Sums,
    contradiction,
    described,
    mean_size,
    merged,
    tokens_of,
    verdicts_of,
)
from proxy.rollouts.rollout import damage_of, left_out
from proxy.telemetry.metrics import Metrics
from proxy.upstream.concurrency import in_thread
from storage.errors import FieldsChanged
from storage.redis.store import Store
from storage.types import StoredEntity

MAX_ROWS: Final = 20_000  # of a part
MAX_ROWS_OF_BATCH: Final = 100_000
_FIELD: Final = "mismatch"
_PREFIX: Final = "mismatch:"
_SHOWN: Final = 100
_LISTED: Final = 400  # batches and reports, among which the newest reports are

# All ranks report at the same time: parts that this process adds to the same report wait instead of being merged again.
_TURNS: Final[WeakValueDictionary[str, asyncio.Lock]] = WeakValueDictionary()


class Part(Struct, frozen=True, array_like=True):
    """Rows that a rank reported together, as hashes."""

    rank: int
    rows: frozenset[str]


class Report(Struct, frozen=True, array_like=True):
    """The parts of a batch that were counted, and their sums."""

    policy: str
    version: str
    parts: tuple[Part, ...]
    sums: Sums

    def with_part(self, part: Part, version: str, sums: Sums) -> "Report":
        """Return the report with another part; itself if that is counted. Raises Conflict or UnprocessableRequest."""
        if version != self.version:
            raise UnprocessableRequest(
                f"Other parts of the batch have policy_version {self.version!r}, this one {version!r}.",
                param="policy_version",
            )
        if part in self.parts:
            return self
        overlapping = next((each for each in self.parts if each.rows & part.rows), None)
        if overlapping is not None:
            shared = len(overlapping.rows & part.rows)
            raise Conflict(
                f"{shared} rows of this part of rank {part.rank} are in another part, of rank {overlapping.rank}: each row "
                "counts once. Report the rows of each rank and micro batch once, for one forward pass.",
                param="rows",
            )
        if sum(len(each.rows) for each in self.parts) + len(part.rows) > MAX_ROWS_OF_BATCH:
            raise UnprocessableRequest(f"The parts of a batch have at most {MAX_ROWS_OF_BATCH:,} rows.", param="rows")
        return Report(self.policy, self.version, (*self.parts, part), merged(self.sums, sums))

    def written(self) -> bytes:
        """Return it as stored bytes. Raises UnprocessableRequest for a sum or a number of values that is too large."""
        sums = self.sums
        counted = {**sums["cells"], "slopes": sums["slopes"], "support": sums["support"]}
        for name, values in counted.items():
            if len(values) > MAX_VALUES:  # type: ignore[arg-type]
                raise UnprocessableRequest(f"{name} has more than {MAX_VALUES} values.", param="sums")
        parts = [[part.rank, [*part.rows]] for part in self.parts]
        try:
            return zlib.compress(orjson.dumps([self.policy, self.version, parts, sums]), 1)
        except TypeError:
            raise UnprocessableRequest("A sum is larger than 64 bits.", param="sums") from None


def part_from(rank: int, rows: Mapping[str, Sequence[int]], given: Mapping[str, Any]) -> tuple[Part, Sums]:
    """Return a part and its sums, checked. Raises UnprocessableRequest."""
    if sum(map(len, rows.values())) > MAX_ROWS:
        raise UnprocessableRequest(f"A part has at most {MAX_ROWS:,} rows; report these in several.", param="rows")
    try:
        sums = msgspec.convert(given, Sums)
    except msgspec.ValidationError as error:
        raise UnprocessableRequest(f"sums: {error}. Send what tokentape.mismatch returns.", param="sums") from None
    why = contradiction(sums)
    if why is not None:
        raise UnprocessableRequest(f"The sums contradict each other: {why}.", param="sums")
    hashes = frozenset(_hash_of(name, branch) for name, branches in rows.items() for branch in branches)
    if len(hashes) != sums["sequences"][0]:
        raise UnprocessableRequest(
            f"The sums contradict each other: they are of {sums['sequences'][0]} rows, and rows has {len(hashes)}.",
            param="sums",
        )
    return Part(rank, hashes), sums


async def count(store: Store, batch_id: str, report: Report, *, now_ms: int) -> tuple[Report | None, Report]:
    """Add a report of one part to what is stored of its batch; return what was there before, and what is there now.

    Both are the same if the part is counted already. Raises Conflict, UnprocessableRequest, or Damaged.
    """
    name = _PREFIX + batch_id
    turn = _TURNS.setdefault(name, asyncio.Lock())
    async with turn:
        stored = await store.mismatches.open(name, {}, now_ms=now_ms)
        while True:
            known, total, written = await in_thread(_added, stored, report)
            if total is known:
                return known, total
            expect = {_FIELD: stored.fields.get(_FIELD)}
            try:
                if await store.mismatches.update_if(name, {_FIELD: written}, expect=expect, now_ms=now_ms) is not None:
                    return known, total
                stored = await store.mismatches.open(name, {}, now_ms=now_ms)  # it has expired
            except FieldsChanged as changed:  # another process added a part, or this one did and lost the response
                stored = changed.rollout


def _added(stored: StoredEntity, report: Report) -> tuple[Report | None, Report, bytes]:
    known, (part,) = _read(stored), report.parts
    total = report if known is None else known.with_part(part, report.version, report.sums)
    return known, total, b"" if total is known else total.written()


async def read(store: Store, batch_id: str) -> Report | None:
    """Return what was reported of a batch. Raises Damaged."""
    stored = await store.mismatches.get(_PREFIX + batch_id)
    return None if stored is None else await in_thread(_read, stored)


async def newest_reports(store: Store, policy: str, rules: Rules, metrics: Metrics) -> dict[str, Any]:
    """Return a summary of each of the newest reports of a policy, of at most 100, newest first, and the means of the newest.

    Damaged ones are omitted.
    """
    names = (await store.mismatches.list(limit=_LISTED)).names
    found = await store.mismatches.get_each([name for name in names if name.startswith(_PREFIX)][:_SHOWN])
    return await in_thread(_summarized, [stored for stored in found if stored is not None], policy, rules, metrics)


def _summarized(found: Sequence[StoredEntity], policy: str, rules: Rules, metrics: Metrics) -> dict[str, Any]:
    batches, means = [], None
    for stored in found:
        try:
            report = _read(stored)
        except Damaged as damaged:
            left_out([damaged], metrics)
            continue
        if report is None or report.policy != policy:
            continue
        means = means or described(report.sums)
        batches.append(
            {
                "batch_id": stored.name.removeprefix(_PREFIX),
                "policy_version": report.version,
                "tokens": tokens_of(report.sums),
                "abs_mean": mean_size(report.sums["cells"][ALL].get(ALL)),
                "verdicts": [verdict.verdict for verdict in verdicts_of(report.sums, rules)],
            }
        )
    return {"batches": batches, "newest": means}


def _read(stored: StoredEntity) -> Report | None:
    """Return what is stored; None before the first part. Raises Damaged."""
    raw = stored.fields.get(_FIELD)
    if raw is None:
        return None
    with damage_of("mismatch", stored.name.removeprefix(_PREFIX)):
        try:
            return msgspec.json.decode(zlib.decompress(raw), type=Report)
        except zlib.error as error:
            raise ValueError(str(error)) from None


def _hash_of(rollout_id: str, branch: int) -> str:
    return blake2b(f"{branch}\0{rollout_id}".encode(), digest_size=8).hexdigest()
