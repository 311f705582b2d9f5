"""A record as its parts: the JSON texts with their chains joined, and the numbers of prompts and choices.

From the parts of a record, `put_together` makes an equal one, unless `take_apart` finds that it does not.
"""

from array import array
from collections.abc import Container, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final

import orjson

from proxy.trajectory import blocks
from proxy.trajectory.arrays import logprobs_from_little_endian, to_little_endian
from proxy.trajectory.blocks import BlockReader, BlockWriter
from proxy.trajectory.codec import LENGTHS, Record, UnreadableRecord, chain_fields, frame, join_fields, open_frame
from proxy.trajectory.images import IMAGES, block_of, data_in, names_from
from proxy.trajectory.shared_ids import SharedIds
from proxy.trajectory.step import Prompt, sent_messages

_FLOAT: Final = "f"


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a record. Numbers are little-endian bytes: ids int32, logprobs float32.

    `head` and `response` are the JSON of the record, unchanged; `rest` are the experts and masks of all choices.
    """

    schema: int
    head: bytes
    request: dict[str, Any]
    sent: dict[str, Any]
    response: bytes
    prompts: tuple[Prompt, ...]
    ids: tuple[bytes, ...]
    logprobs: tuple[bytes, ...]
    rest: bytes = b""


def take_apart(record: bytes, reader: BlockReader, known: Container[bytes]) -> tuple[Parts, bool]:
    """Return the parts of a record whose blocks are `known`, and whether an equal record can be made of them.

    It cannot if the record has logprobs that need float64, or if another version wrote its JSON in another way.

    Raises:
        UnreadableRecord: The record is damaged.
    """
    schema, packed = open_frame(record)
    try:
        raw = reader.expand(packed)
        parts = _parts(schema, raw, reader)
        return parts, _is_equal(parts, known, raw)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise UnreadableRecord(f"the record cannot be taken apart: {error!r}") from error


def put_together(parts: Parts, known: Container[bytes]) -> Record:
    """Return the record of these parts, with the blocks that are not `known` to be stored.

    Raises:
        ValueError: The parts do not belong together.
    """
    writer = BlockWriter(known)
    packed = writer.compress(_payload(parts, writer))
    return Record(frame(parts.schema, packed), writer.blocks, tuple(writer.leans_on), tuple(writer.ends))


def _is_equal(parts: Parts, known: Container[bytes], raw: bytes) -> bool:
    try:
        return _payload(parts, BlockWriter(known)) == raw
    except ValueError:
        return False


def chains_of(head: Mapping[str, Any]) -> set[bytes]:
    """Return the names of the last blocks of all chains that the head of a record names."""
    ends = [prompt["end"] for prompt in head["prompts"]]
    ends += [chain[1] for chains in head["chains"].values() for chain in chains.values() if len(chain) > 1]
    stored = {block for name in names_from(head.get("extra")) if (block := block_of(name)) is not None}
    return {bytes.fromhex(end) for end in ends} | stored


def _parts(schema: int, raw: bytes, reader: BlockReader) -> Parts:
    lengths = LENGTHS.unpack_from(raw)
    ends = accumulate(lengths, initial=LENGTHS.size)
    head_text, request_text, sent_text, response = [raw[start:end] for start, end in pairwise(ends)]
    head = orjson.loads(head_text)
    take = _Taker(raw, LENGTHS.size + sum(lengths)).take
    prompts = tuple(
        SharedIds(reader.link(bytes.fromhex(prompt["end"])), take(prompt["tail"])) for prompt in head["prompts"]
    )
    ids = tuple(take(4 * choice["ids"]) for choice in head["choices"])
    logprobs = tuple(
        take(4 * choice["logprobs"]) if choice["code"] == _FLOAT else _narrow(take(8 * choice["logprobs"]))
        for choice in head["choices"]
    )
    sent = orjson.loads(sent_text)
    if "sent" in head["chains"]:
        sent["set"] = join_fields(sent["set"], head["chains"]["sent"], prompts, reader)
    request = join_fields(orjson.loads(request_text), head["chains"]["request"], prompts, reader)
    return Parts(schema, head_text, request, sent, response, prompts, ids, logprobs, take(len(raw)))


def _payload(parts: Parts, writer: BlockWriter) -> bytes:
    """Return the payload of the parts, and write its blocks. Raises ValueError if the chains are not those of the head."""
    head = orjson.loads(parts.head)
    images = _images(head, parts)
    writer.write_images(images)
    request, request_chains = chain_fields(parts.request, parts.prompts, writer, images)
    chains = {"request": request_chains}
    sent = dict(parts.sent)
    if isinstance(sent.get("set"), dict):
        sent["set"], chains["sent"] = chain_fields(sent["set"], parts.prompts, writer, images)
    tails = []
    ends = []
    for prompt in parts.prompts:
        units, tail = blocks.cut(to_little_endian(prompt))
        ends.append({"end": writer.write(blocks.IDS, units).hex(), "tail": len(tail)})
        tails.append(tail)
    if chains != head["chains"] or ends != head["prompts"]:
        raise ValueError("the chains are not those of the head")
    texts = (parts.head, orjson.dumps(request), orjson.dumps(sent), parts.response)
    numbers = (*tails, *parts.ids, *parts.logprobs, parts.rest)
    return b"".join((LENGTHS.pack(*map(len, texts)), *texts, *numbers))


def _images(head: Mapping[str, Any], parts: Parts) -> dict[str, bytes]:
    """Return the names of the images of a call by their data."""
    has_images = IMAGES in (head.get("extra") or {})
    return data_in(sent_messages(parts.request, parts.sent)) if has_images else {}


def _narrow(wide: bytes) -> bytes:
    """Return float64 numbers as float32."""
    return to_little_endian(array(_FLOAT, logprobs_from_little_endian("d", wide)))


class _Taker:
    """Takes bytes from a position on, up to the end."""

    def __init__(self, raw: bytes, at: int) -> None:
        self._raw = raw
        self._at = at

    def take(self, size: int) -> bytes:
        """Return the next bytes. Raises ValueError for a negative number."""
        if size < 0:
            raise ValueError("a length is negative")
        start, self._at = self._at, self._at + size
        return self._raw[start : self._at]
