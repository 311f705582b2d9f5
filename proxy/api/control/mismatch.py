"""The routes by which the ranks of a trainer report the sums of a batch's mismatch, and read what they mean together.

Parts can be reported through any process that shares the store, in any order and again. The sums are one small entity, which
expires 25 hours after the last part: an hour after the longest lease.
"""

import zlib
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final

import orjson
from aiohttp import web
from msgspec import Struct, convert

from proxy.api.context import CONTEXT, Context
from proxy.api.control.batches import batch_from
from proxy.api.control.schemas import PostMismatch
from proxy.api.http import json_response
from proxy.api.requests import body_from, rollout_id_from
from proxy.errors import Conflict, NotFound, UnprocessableRequest
from proxy.rollouts.group import Batch, read_group
from proxy.rollouts.mismatch import (
    ALL,
    contradiction,
    described,
    is_too_large,
    mean_size,
    merged,
    tokens_of,
    verdicts_of,
)
from proxy.rollouts.policy import read_announced
from proxy.rollouts.stored_fields import damage_of
from proxy.trajectory.facts import number_of
from storage.errors import FieldsChanged
from storage.types import StoredEntity

_FIELD: Final = "mismatch"
_MAX_VALUES: Final = 256  # of a dimension, over all parts


class _Part(Struct, frozen=True):
    rank: int
    rows: frozenset[str]  # hashes of rows


class _Report(Struct, frozen=True):
    """The parts of a batch that were counted, and their sums."""

    policy: str
    version: str
    parts: tuple[_Part, ...]
    sums: dict[str, Any]

    def with_part(self, part: _Part, version: str, sums: dict[str, Any]) -> "_Report | None":
        """Return the report with another part; None if it is counted already. Raises Conflict or UnprocessableRequest."""
        if version != self.version:
            raise UnprocessableRequest(
                f"Other parts of the batch have policy_version {self.version!r}, this one {version!r}.",
                param="policy_version",
            )
        if part in self.parts:
            return None
        overlapping = next((each for each in self.parts if each.rows & part.rows), None)
        if overlapping is not None:
            shared = len(overlapping.rows & part.rows)
            raise Conflict(
                f"{shared} rows of this part of rank {part.rank} are in another part, of rank {overlapping.rank}: each row "
                "counts once. Report the rows of each rank and micro batch once, for one forward pass.",
                param="rows",
            )
        return _Report(self.policy, self.version, (*self.parts, part), _checked(merged(self.sums, sums)))

    def written(self) -> bytes:
        """Return it as stored bytes."""
        parts = [[part.rank, sorted(part.rows)] for part in self.parts]
        return zlib.compress(orjson.dumps([self.policy, self.version, parts, self.sums]), 1)


def _read(stored: StoredEntity) -> _Report | None:
    """Return what is stored; None before the first part. Raises Damaged."""
    raw = stored.fields.get(_FIELD)
    if raw is None:
        return None
    with damage_of("mismatch", stored.name):
        try:
            policy, version, parts, sums = orjson.loads(zlib.decompress(raw))
        except zlib.error as error:
            raise ValueError(str(error)) from None
        return convert(
            {
                "policy": policy,
                "version": version,
                "parts": [{"rank": rank, "rows": rows} for rank, rows in parts],
                "sums": sums,
            },
            _Report,
        )


def _checked(sums: dict[str, Any]) -> dict[str, Any]:
    if is_too_large(sums):
        raise UnprocessableRequest("A sum is larger than 64 bits.", param="sums")
    for dimension, cells in sums["cells"].items():
        if len(cells) > _MAX_VALUES:
            raise UnprocessableRequest(f"{dimension} has more than {_MAX_VALUES} values.", param="sums")
    return sums


async def post_mismatch(request: web.Request) -> web.Response:
    """`POST /batches/{id}/mismatch`: count a part once. 409 if it overlaps another one, or the batch was released."""
    context = request.app[CONTEXT]
    body = await body_from(request, PostMismatch)
    try:
        batch = await batch_from(request, ending="acked")
        context.policies.named(batch.policy)
    except NotFound as unknown:
        raise UnprocessableRequest(unknown.message, param=unknown.param) from None
    sums: dict[str, Any] = body.sums.model_dump()
    why = contradiction(sums)
    if why is not None:
        raise UnprocessableRequest(f"The sums contradict each other: {why}.", param="sums")
    await _check_version(context, batch, body.policy_version)
    await _check_rows(context, batch, body.rows)
    hashes = frozenset(_hash_of(name, branch) for name, branches in body.rows.items() for branch in branches)
    report, counted = await _count(context, batch, _Part(body.rank, hashes), body.policy_version, sums)
    mean = mean_size(report.sums["cells"][ALL].get(ALL))
    if mean is not None:
        context.metrics.mismatch_abs_mean.labels(batch.policy).set(mean)
    return json_response({**_shown(batch.batch_id, report), "counted": counted})


async def show_mismatch(request: web.Request) -> web.Response:
    """`GET /batches/{id}/mismatch`: the sums of all parts, their means and the verdicts."""
    name = rollout_id_from(request)
    stored = await request.app[CONTEXT].store.mismatches.get(_entity(name))
    report = None if stored is None else _read(stored)
    if report is None:
        raise NotFound(f"Batch {name!r} has no mismatch: no part of it was reported.", param="batch_id")
    return json_response({**_shown(name, report), **described(report.sums), "sums": report.sums})


def _shown(batch_id: str, report: _Report) -> dict[str, Any]:
    return {
        "batch_id": batch_id,
        "policy": report.policy,
        "policy_version": report.version,
        "parts": [{"rank": part.rank, "rows": len(part.rows)} for part in report.parts],
        "tokens": tokens_of(report.sums),
        "verdicts": [verdict.as_dict() for verdict in verdicts_of(report.sums)],
    }


async def _check_version(context: Context, batch: Batch, version: str) -> None:
    """Raise UnprocessableRequest for a version that was not announced yet."""
    announced = read_announced(await context.store.announcements.read(), batch.policy)
    if announced.version is None or version == announced.version:
        return
    number, highest = number_of(version), announced.highest
    if number is None or highest is None or number > highest:
        raise UnprocessableRequest(
            f"policy_version {version!r} is unknown: policy {batch.policy!r} has version {announced.version!r}. Send the "
            "version of the weights of the forward pass, as it was announced.",
            param="policy_version",
        )


async def _check_rows(context: Context, batch: Batch, rows: Mapping[str, Any]) -> None:
    """Raise UnprocessableRequest for a rollout that is in no group of the batch, unless one was deleted since."""
    names = [waiting.group for waiting in batch.held]
    found = await context.store.groups.get_all(names, with_marks=True)
    groups = [read_group(*entry) for entry in found if entry is not None]
    if len(groups) < len(names):
        return
    members = {name for group in groups for name in group.members}
    stranger = next((name for name in rows if name not in members), None)
    if stranger is not None:
        raise UnprocessableRequest(f"Rollout {stranger!r} is not in batch {batch.batch_id!r}.", param="rows")


async def _count(
    context: Context, batch: Batch, part: _Part, version: str, sums: dict[str, Any]
) -> tuple[_Report, bool]:
    """Add a part to those that are stored; return all of them, and whether it was counted now."""
    store, name = context.store.mismatches, _entity(batch.batch_id)
    while True:
        now_ms = context.clock.now_ms()
        stored = await store.open(name, {}, now_ms=now_ms)
        known = _read(stored)
        first = _Report(batch.policy, version, (part,), _checked(sums))
        report = first if known is None else known.with_part(part, version, sums)
        if report is None:
            assert known is not None
            return known, False
        try:
            expect = {_FIELD: stored.fields.get(_FIELD)}
            if await store.update_if(name, {_FIELD: report.written()}, expect=expect, now_ms=now_ms) is not None:
                return report, True
        except FieldsChanged:
            continue


def _entity(batch_id: str) -> str:
    return f"mismatch:{batch_id}"


def _hash_of(rollout_id: str, branch: int) -> str:
    return blake2b(f"{branch}\0{rollout_id}".encode(), digest_size=8).hexdigest()
