"""Rows of archived rollouts, one for each step: made from the records of the store, and turned into records again.

Numbers in a row are little-endian bytes, or None. A record that is not equal to its columns is in the row itself
(`take_apart`), so that every record returns from the archive unchanged, also a damaged one.
"""

from array import array
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Annotated, Any, Final, TypeAlias

import msgspec
import orjson
from msgspec import Struct

from proxy.rollouts.rollout import Marks, Milliseconds, Rollout, read_marks, read_rollout
from proxy.trajectory.arrays import (
    Prompt,
    SharedIds,
    ids_from_little_endian,
    logprobs_from_little_endian,
    to_little_endian,
)
from proxy.trajectory.blocks import ROOT, BlockReader, BlockWriter, KnownBlocks
from proxy.trajectory.codec import (
    LATEST_S,
    Record,
    UnreadableRecord,
    join_payload,
    make_record,
    open_frame,
    read_chains,
    split_payload,
    write_chains,
)
from proxy.trajectory.images import IMAGES, block_of, names_from
from proxy.trajectory.step import DEFAULT_POLICY
from storage.types import StoredEntity

Row: TypeAlias = dict[str, Any]

CLAIM: Final = "archive"  # the field of a rollout with the file that it is written to; no part of what is archived
_LARGEST: Final = 1e300
_PARENT_BYTES: Final = 16  # of a block: the name of the one before it
_FLOAT: Final = "f"


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a record: the JSON texts with their chains joined, and the numbers as little-endian bytes."""

    schema: int
    head: bytes  # the JSON of the record, unchanged
    request: dict[str, Any]
    sent: dict[str, Any]
    response: bytes  # the JSON of the record, unchanged
    prompts: tuple[Prompt, ...]
    ids: tuple[bytes, ...]  # int32
    logprobs: tuple[bytes, ...]  # float32
    rest: bytes = b""  # the experts and masks of all choices


def take_apart(record: bytes, reader: BlockReader, known: Container[bytes]) -> tuple[Parts, bool]:
    """Return the parts of a record, given the `known` blocks, and whether an equal record can be made of the parts.

    It cannot if the record has logprobs that need float64, or if another version wrote its JSON in another way. Raises
    UnreadableRecord if the record is damaged.
    """
    schema, packed = open_frame(record)
    try:
        raw = reader.expand(packed)
        parts = _parts(schema, raw, reader)
        try:
            return parts, _payload(parts, BlockWriter(known)) == raw
        except ValueError:
            return parts, False
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise UnreadableRecord(f"the record cannot be taken apart: {error!r}") from error


def put_together(parts: Parts, known: Container[bytes]) -> Record:
    """Return the record of these parts, with the blocks that are not `known` to be stored.

    Raises ValueError if the parts do not belong together.
    """
    writer = BlockWriter(known)
    return make_record(parts.schema, _payload(parts, writer), writer)


def chains_of(head: Mapping[str, Any]) -> set[bytes]:
    """Return the names of the last blocks of all chains that the head of a record names."""
    ends = [prompt["end"] for prompt in head["prompts"]]
    ends += [chain[1] for chains in head["chains"].values() for chain in chains.values() if len(chain) > 1]
    stored = {block for name in names_from(head.get("extra")) if (block := block_of(name)) is not None}
    return {bytes.fromhex(end) for end in ends} | stored


def _parts(schema: int, raw: bytes, reader: BlockReader) -> Parts:
    (head_text, request_text, sent_text, response), arrays_start = split_payload(raw)
    head = orjson.loads(head_text)
    widths = [4 if choice["code"] == _FLOAT else 8 for choice in head["choices"]]
    sizes = [prompt["tail"] for prompt in head["prompts"]]
    sizes += [4 * choice["ids"] for choice in head["choices"]]
    sizes += [width * choice["logprobs"] for width, choice in zip(widths, head["choices"], strict=True)]
    if min(sizes, default=0) < 0:
        raise ValueError("a length is negative")
    starts = list(accumulate(sizes, initial=arrays_start))
    pieces = [raw[start:end] for start, end in pairwise(starts)]
    links = [reader.link(bytes.fromhex(prompt["end"])) for prompt in head["prompts"]]
    prompts = tuple(SharedIds(link, tail) for link, tail in zip(links, pieces, strict=False))
    first, end = len(links), len(links) + len(widths)
    wide = zip(widths, pieces[end:], strict=True)
    logprobs = tuple(piece if width == 4 else _narrow(piece) for width, piece in wide)
    request, sent = orjson.loads(request_text), orjson.loads(sent_text)
    read_chains(request, sent, head["chains"], prompts, reader)
    ids, rest = tuple(pieces[first:end]), raw[starts[-1] :]
    return Parts(schema, head_text, request, sent, response, prompts, ids, logprobs, rest)


def _payload(parts: Parts, writer: BlockWriter) -> bytes:
    """Return the payload of the parts, and write its blocks. Raises ValueError if the head names other chains."""
    head = orjson.loads(parts.head)
    has_images = IMAGES in (head.get("extra") or {})
    texts, places, tails = write_chains(parts.request, parts.sent, parts.prompts, writer, has_images=has_images)
    if any(head[name] != found for name, found in places.items()):
        raise ValueError("the head names other chains")
    arrays = (*tails, *parts.ids, *parts.logprobs, parts.rest)
    return join_payload((parts.head, *texts, parts.response), arrays)


def _narrow(wide: bytes) -> bytes:
    return to_little_endian(array(_FLOAT, logprobs_from_little_endian("d", wide)))


@dataclass(frozen=True, slots=True)
class Saved:
    """A rollout or a group as it was archived. Fields, counts and marks have the same names as in the store."""

    name: str
    created_ms: int
    touched_ms: int
    fields: Mapping[str, bytes]
    counts: Mapping[str, int]
    marks: Mapping[str, bytes]

    @property
    def entity(self) -> StoredEntity:
        """The rollout or group as the store had it."""
        return StoredEntity(self.name, "archived", self.created_ms, self.touched_ms, self.fields, self.counts)


def saved_json(stored: StoredEntity, marks: Mapping[str, bytes]) -> bytes:
    """Return the JSON of a rollout or group, in which latin-1 represents the bytes of fields and marks."""
    fields = {name: value.decode("latin-1") for name, value in stored.fields.items() if name != CLAIM}
    texts = {name: value.decode("latin-1") for name, value in marks.items()}
    return orjson.dumps(
        {
            "name": stored.name,
            "created_ms": stored.created_ms,
            "touched_ms": stored.touched_ms,
            "fields": fields,
            "counts": stored.counts,
            "marks": texts,
        }
    )


class _SavedJson(Struct):
    name: str
    created_ms: Milliseconds
    touched_ms: Milliseconds
    fields: dict[str, str]
    counts: dict[str, Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]]
    marks: dict[str, str]


def read_saved(text: str) -> Saved:
    """Return what `saved_json` wrote. Raises ValueError, msgspec.ValidationError."""
    saved = msgspec.convert(orjson.loads(text), _SavedJson)
    fields, marks = (
        {name: value.encode("latin-1") for name, value in part.items()} for part in (saved.fields, saved.marks)
    )
    return Saved(saved.name, saved.created_ms, saved.touched_ms, fields, saved.counts, marks)


class RolloutRows:
    """Makes the rows of one rollout, in the order of its steps. `group`: the JSON of its group, if the file has none yet."""

    def __init__(
        self,
        stored: StoredEntity,
        marks: Mapping[str, bytes],
        blocks: Mapping[bytes, bytes],
        group: bytes | None = None,
    ) -> None:
        rollout = read_rollout(stored)
        self._marks = read_marks(marks)
        self._blocks = blocks
        self._known = KnownBlocks(blocks)
        self._reader = BlockReader(blocks)
        self._written: set[bytes] = set()  # blocks that are in earlier rows as they are
        self._facts = facts_of_row(rollout)
        self._first: Row = {"rollout": saved_json(stored, marks), "group": group}
        self.count = 0

    def row(self, record: bytes) -> Row:
        """Return the row of the next record."""
        row = {**self._facts, **self._first, "index": self.count}
        self._first = {}
        self.count += 1
        try:
            parts, is_equal = take_apart(record, self._reader, self._known)
            columns = _columns_of(parts)
        except (UnreadableRecord, TypeError):  # TypeError: joined, a request has more levels than orjson writes
            return {**row, "record": record, "blocks": self._copied(self._blocks)}
        head = orjson.loads(parts.head)
        row |= {**step_columns(head, self._marks), **columns}
        if is_equal:
            return row
        return {**row, "record_schema": None, "record": record, "blocks": self._copied(chains_of(head))}

    def empty(self) -> Row:
        """Return the only row of a rollout without steps."""
        return {**self._facts, **self._first}

    def _copied(self, ends: Iterable[bytes]) -> list[dict[str, bytes]]:
        """Return the blocks of the chains with these ends that no earlier row has."""
        copied = []
        for end in ends:
            name = end
            while name != ROOT and name not in self._written and name in self._blocks:
                self._written.add(name)
                copied.append({"name": name, "block": self._blocks[name]})
                name = self._blocks[name][:_PARENT_BYTES]
        return copied


def step_columns(head: Mapping[str, Any], marks: Marks) -> Row:
    """Return the columns of facts in the head that have the usual type."""
    name = _typed(head.get("step_id"), str)
    timing, engine, sampling = (_typed(head.get(part), dict) or {} for part in ("timing", "engine", "sampling"))
    received, last = _number(timing.get("received")), _number(timing.get("last_byte"))
    choices, problems = (_typed(head.get(part), list) or [] for part in ("choices", "problems"))
    return {
        "step_id": name,
        "received_at": None if received is None or not 0 <= received < LATEST_S else round(1000 * received),
        "duration_s": None if received is None or last is None else last - received,
        "status": _typed(head.get("status"), str),
        "delivered": head.get("delivered") is True and name not in marks.undelivered,
        "late": name in marks.late,
        "exact": not problems,
        "problems": [code for code in problems if isinstance(code, str)],
        "dialect": _typed(head.get("dialect"), str),
        "model": _typed(head.get("model_served"), str),
        "engine": _typed(engine.get("name"), str),
        "policy": _typed(head.get("policy", DEFAULT_POLICY), str),
        "policy_version": _typed(head.get("policy_version"), str),
        "temperature": _number(sampling.get("temperature")),
        "finish_reason": _typed(choices[0].get("finish_reason"), str) if choices else None,
    }


def record_of(row: Mapping[str, Any], known: Container[bytes]) -> Record:
    """Return the record of a row, with the blocks that are not `known` to be stored. Raises ValueError for another row."""
    if row["record_schema"] is None:
        blocks = {entry["name"]: entry["block"] for entry in row["blocks"] or () if entry["name"] not in known}
        return Record(row["record"], blocks, (), ())
    ids = [row["completion_ids"]] if row["completion_ids"] is not None else []
    logprobs = [row["logprobs"]] if row["logprobs"] is not None else []
    for choice in row["more_choices"] or ():
        ids.append(array("i", choice["ids"]).tobytes())
        logprobs.append(array("f", choice["logprobs"]).tobytes())
    prompts = [] if row["prompt_ids"] is None else [ids_from_little_endian(row["prompt_ids"])]
    prompts += [array("i", prompt) for prompt in row["more_prompts"] or ()]
    parts = Parts(
        schema=row["record_schema"],
        head=row["head"].encode(),
        request=orjson.loads(row["request"]),
        sent=orjson.loads(row["sent"]),
        response=row["response"].encode(),
        prompts=tuple(prompts),
        ids=tuple(ids),
        logprobs=tuple(logprobs),
        rest=row["rest"] or b"",
    )
    return put_together(parts, known)


def name_of(row: Mapping[str, Any]) -> str:
    """Return the name under which the record of a row is stored; a damaged record has a name by its position."""
    return row["step_id"] if row["step_id"] is not None else f"unreadable-{row['index']}"


def _columns_of(parts: Parts) -> Row:
    prompts, choices = parts.prompts, list(zip(parts.ids, parts.logprobs, strict=True))
    return {
        "prompt_ids": to_little_endian(prompts[0]) if prompts else None,
        "completion_ids": parts.ids[0] if choices else None,
        "logprobs": parts.logprobs[0] if choices else None,
        "more_prompts": [prompt.tolist() for prompt in prompts[1:]] or None,
        "more_choices": [{"ids": array("i", ids), "logprobs": array("f", found)} for ids, found in choices[1:]] or None,
        "request": orjson.dumps(parts.request),
        "sent": orjson.dumps(parts.sent),
        "response": parts.response,
        "head": parts.head,
        "record_schema": parts.schema,
        "rest": parts.rest or None,
    }


def facts_of_row(rollout: Rollout) -> Row:
    """Return the columns that are equal in all rows of a rollout."""
    return {
        "rollout_id": rollout.rollout_id,
        "group_id": rollout.group_id,
        "rollout_status": rollout.status,
        "reward": rollout.reward,
        "advantages": None if rollout.advantages is None else orjson.dumps(rollout.advantages),
        "metadata": orjson.dumps(rollout.metadata),
        "created_at": rollout.created_ms,
        "finished_at": rollout.finished_ms,
        "touched_ms": rollout.touched_ms,
    }


def _typed(value: Any, kind: type) -> Any:
    return value if type(value) is kind else None


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and abs(value) < _LARGEST else None
