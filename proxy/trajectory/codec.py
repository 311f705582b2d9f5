"""Encoding of a step as bytes, and decoding.

A record is `TT`, the number of the schema, a checksum of 8 bytes, and a zstd frame. Schema 4 has in that frame: the
lengths of four JSON texts (u32 each), the texts (head, request, sent, response), then the arrays, little-endian: the
tail of each prompt, the ids of each choice, the logprobs of each choice, and the experts and the mask of each choice
that has them. In `request` and in the fields that the proxy `set`, values that are likely to repeat are null; the
head's `chains` refers to their blocks. Experts and masks are null in `response`; the head's `again` has their
positions. The data of images are blocks of their own (`images`); a chain in JSON then has their places as its fourth
value. 0.1.0 writes schema 4; records of earlier schemas are refused.
"""

import re
import struct
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from itertools import accumulate, pairwise
from math import isfinite
from operator import attrgetter
from typing import Annotated, Any, Final, Literal

import orjson
from msgspec import DecodeError, Meta, Struct, convert
from msgspec.json import Decoder

from proxy.trajectory import blocks
from proxy.trajectory import experts_and_masks as extras
from proxy.trajectory.arrays import (
    Prompt,
    SharedIds,
    ids_from_little_endian,
    logprobs_from_little_endian,
    to_little_endian,
)
from proxy.trajectory.blocks import BlockReader, BlockWriter
from proxy.trajectory.images import IMAGES, data_in, piece_of, put_back, taken_out
from proxy.trajectory.step import (
    DEFAULT_POLICY,
    Choice,
    Dialect,
    EngineFacts,
    Span,
    Status,
    Step,
    Timing,
    sent_messages,
)

ODD: Final = "unparsed_event"
LATEST_S: Final = 2**38  # later than any call; its milliseconds are an integer that JSON writers accept
_EXTRA_TYPES: Final[Mapping[str, type[Any]]] = {"request_key": str, "retry_of": str, "attempt": int, "mask_claim": int}
_LARGEST: Final = 2**63 - 1
_DIGITS: Final = 20  # of the largest integer of 64 bits, and of the smallest one with its sign
_LONG_INTEGER: Final = re.compile(rb"-?[0-9]{19,}")  # also in a string or a fraction: then the slower reader decides
_ZEROS: Final = b"0" * 19
_AS_ZEROS: Final = bytes(ord("0") if chr(byte) in "0123456789" else byte for byte in range(256))
_JSON_INTEGERS: Final = range(-(2**63), 2**64)  # orjson reads others as floats, and writes none

_Count = Annotated[int, Meta(ge=0, le=_LARGEST)]
_TokenId = Annotated[int, Meta(ge=-_LARGEST, le=_LARGEST)]


class PromptHead(Struct, gc=False):
    """A prompt."""

    end: str  # the name of the last block of its chain in hex
    tail: _Count  # the number of bytes after that chain


class ChoiceHead(Struct):
    """A choice, with the numbers of its ids and logprobs."""

    index: _TokenId
    prompt: _TokenId
    finish_reason: str | None
    stop_reason: _TokenId | str | None
    spans: tuple[Span, ...]
    ids: _Count
    logprobs: _Count
    code: Literal["f", "d"]  # the type of the logprobs
    experts: list[Any] | None  # their form and number of bytes
    mask: list[Any] | None  # the numbers of its ids and offsets


class Head(Struct):
    """The head: facts of a step, its prompts and choices, and where the JSON of request and response continues."""

    step_id: str
    rollout_id: str
    dialect: Dialect
    endpoint: str
    engine: EngineFacts
    model_asked: str | None
    model_served: str | None
    usage: dict[str, Any] | None
    sampling: dict[str, Any] | None
    timing: Timing
    status: Status
    reason: str | None
    delivered: bool
    policy_version: str | None
    policy_version_end: str | None
    problems: tuple[str, ...]
    extra: dict[str, Any] | None
    prompts: list[PromptHead]
    choices: list[ChoiceHead]
    chains: dict[str, dict[str, list[str]]]
    again: list[list[Any]]
    policy: str = DEFAULT_POLICY


class _Sent(Struct):
    set: dict[str, Any] | None = None
    unset: list[str] | None = None


_HEADS: Final = Decoder(Head)


def read_head(text: bytes) -> Head:
    """Return the head in this JSON.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: A required value is missing or has another type.
    """
    head = _in_one_pass(text)
    return _repaired(orjson.loads(text)) if head is None else head


def flagged(problems: tuple[str, ...], found: Iterable[str]) -> tuple[str, ...]:
    """Return the problems with the found ones that are not among them."""
    return (*problems, *(code for code in found if code not in problems))


def object_of(value: Any) -> dict[str, Any]:
    """Return a required object. Raises TypeError."""
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, found {type(value).__name__}")
    return value


def sent_of(value: Any) -> dict[str, Any]:
    """Return the changes of a request: an object `set` and a list of names `unset`, where it has them.

    Raises:
        ValueError, TypeError: They have another type.
    """
    convert(value, _Sent)
    return object_of(value)


def _in_one_pass(text: bytes) -> Head | None:
    """Return the head; None if a value has another type, or is out of range."""
    try:
        head = _HEADS.decode(text)
    except (DecodeError, RecursionError):
        return None
    timing = head.timing
    for time in (timing.received, timing.sent, timing.first_byte, timing.last_byte, timing.stored):
        if time is not None and abs(time) >= LATEST_S:
            return None
    if _ZEROS in text.translate(_AS_ZEROS) and _has_long_integer(text):  # a fiftieth of the time of the search
        return None
    for name, value in (head.extra or {}).items():
        if type(value) is not _EXTRA_TYPES.get(name, type(value)):
            return None
    for choice in head.choices:
        for span in choice.spans or ():
            if not (0 <= span.start <= span.end <= choice.ids and 0 <= span.epoch <= _LARGEST):
                return None
    return head


def _has_long_integer(text: bytes) -> bool:
    found = _LONG_INTEGER.findall(text)
    return any(len(digits) > _DIGITS or int(digits) not in _JSON_INTEGERS for digits in found)


def _repaired(given: Any) -> Head:
    """Return the head of these values, which `_in_one_pass` refuses."""
    odd: dict[str, None] = {}  # problems
    head = dict(given)
    head |= {name: _kept(head[name], str, odd) for name in ("model_asked", "model_served", "reason")}
    head |= {name: _kept(head[name], dict, odd) for name in ("usage", "sampling", "extra")}
    head |= {name: _version(head[name], odd) for name in ("policy_version", "policy_version_end")}
    extra = head["extra"] or {}
    head["extra"] = {name: value for name, value in extra.items() if type(value) is _EXTRA_TYPES.get(name, type(value))}
    head["engine"] = {**head["engine"], "version": _kept(head["engine"]["version"], str, odd)}
    head["timing"] = {name: _time(value) for name, value in head["timing"].items()}
    head["choices"] = [_choice(choice, odd) for choice in head["choices"]]
    found = convert(head, Head)
    found.problems = flagged(found.problems, odd)
    return found


def _kept(value: Any, kind: type[Any], odd: dict[str, None]) -> Any:
    if value is None or type(value) is kind:
        return value
    odd[ODD] = None
    return None


def _version(value: Any, odd: dict[str, None]) -> Any:
    return str(value) if type(value) is int else _kept(value, str, odd)


def _choice(value: Any, odd: dict[str, None]) -> dict[str, Any]:
    finish, stop, ids = _kept(value["finish_reason"], str, odd), value["stop_reason"], value["ids"]
    if type(stop) is not int or abs(stop) > _LARGEST:
        stop = _kept(stop, str, odd)
    given = value["spans"] or []
    spans = [_span(span, odd) for span in given] if isinstance(given, list) else [None]
    if not all(span is not None and 0 <= span["start"] <= span["end"] <= ids for span in spans):
        odd["version_spans"], spans = None, []
    return {**value, "finish_reason": finish, "stop_reason": stop, "spans": spans}


def _span(value: Any, odd: dict[str, None]) -> dict[str, Any] | None:
    start, end = (value.get("start"), value.get("end")) if isinstance(value, dict) else (None, None)
    if type(start) is not int or type(end) is not int:
        return None
    epoch = value.get("epoch", 0)
    if type(epoch) is not int or not 0 <= epoch <= _LARGEST:
        odd[ODD], epoch = None, 0
    return {"start": start, "end": end, "policy_version": _version(value.get("policy_version"), odd), "epoch": epoch}


def _time(value: Any) -> float | None:
    is_time = type(value) in (int, float) and isfinite(value) and abs(value) < LATEST_S
    return value if is_time else None


SCHEMA: Final = 4

_MAGIC: Final = b"TT"
_WRAPPINGS: Final = 24  # levels around a response in the control API; orjson writes 254 in total
_HEADER: Final = 11  # magic, schema, checksum
_LENGTHS: Final = struct.Struct("<4I")
_OTHERWISE: Final = frozenset({"prompts", "choices", "policy"})  # in the head, but not as they are in a step
_FACTS: Final = tuple(
    name for name in Head.__struct_fields__ if name in {field.name for field in fields(Step)} - _OTHERWISE
)
_facts_of: Final = attrgetter(*_FACTS)
_TIMING: Final = tuple(field.name for field in fields(Timing))
_times_of: Final = attrgetter(*_TIMING)
_ids_of: Final = attrgetter("ids")
_logprobs_of: Final = attrgetter("logprobs")


class UnreadableRecord(ValueError):
    """The record is damaged, of a newer schema, or a block that it needs is missing."""


@dataclass(frozen=True, slots=True)
class Record:
    """An encoded step. Once it is stored, all blocks of its chains are: `names` and the names of `blocks` count as known."""

    record: bytes
    blocks: Mapping[bytes, bytes]  # to be stored with it
    leans_on: tuple[bytes, ...]  # blocks that must be stored already
    names: tuple[bytes, ...]  # the last block of each chain


_SHORT_TEXT: Final = blocks.UNIT_BYTES // 6  # characters: each takes at most six bytes in JSON


def encode(step: Step, known: Container[bytes] = frozenset()) -> Record:
    """Return a step as a record with the blocks that are not `known` to be stored.

    `index` is not encoded: the store assigns it. NaN in JSON of clients and engines becomes null; in logprobs it is kept.
    Raises TypeError if orjson cannot write a value: more than 254 levels, or an integer of more than 64 bits.
    """
    writer = BlockWriter(known)
    texts, places, arrays = write_chains(step.request, step.sent, step.prompts, writer, has_images=IMAGES in step.extra)
    arrays += map(to_little_endian, map(_ids_of, step.choices))
    arrays += map(to_little_endian, map(_logprobs_of, step.choices))
    choices, has_extras = _choice_heads(step.choices)
    response = step.response
    again: list[list[Any]] = []
    if has_extras:
        arrays += [raw for choice in step.choices for raw in extras.bytes_of(choice)]
        response, again = extras.left_out(step.response, step.choices)
    engine, timing = step.engine, step.timing
    head = dict(zip(_FACTS, _facts_of(step), strict=True))
    head["engine"] = {"name": engine.name, "kind": engine.kind, "version": engine.version, "url": engine.url}
    head["timing"] = dict(zip(_TIMING, _times_of(timing), strict=True))
    head["prompts"] = places["prompts"]
    head["choices"] = choices
    head["chains"] = places["chains"]
    head["again"] = again
    if step.policy != DEFAULT_POLICY:
        head["policy"] = step.policy
    for _ in range(_WRAPPINGS):
        response = [response]  # type: ignore[assignment]
    bounded = orjson.dumps(response)[_WRAPPINGS:-_WRAPPINGS]
    return make_record(SCHEMA, join_payload((orjson.dumps(head), *texts, bounded), arrays), writer)


def encode_leniently(step: Step, known: Container[bytes] = frozenset()) -> tuple[Step, Record]:
    """Return the step as it is stored, and its record; the tokens are stored in any case.

    If JSON cannot represent the response, it is omitted, and if needed the other JSON of clients and engines too. The
    step is then flagged `unparsed_event`.
    """
    with suppress(TypeError):
        return step, encode(step, known)
    odd = replace(step, response=None, problems=tuple(dict.fromkeys((*step.problems, "unparsed_event"))))
    with suppress(TypeError):
        return odd, encode(odd, known)
    bare = replace(odd, request={}, sent={}, usage=None, sampling={}, extra={})
    return bare, encode(bare, known)


def decode(record: bytes, reader: BlockReader, index: int | None = None, *, whole: bool = True) -> Step:
    """Return the step of a record, which has this `index` in its rollout.

    Without `whole`, `request` and `sent` are empty and `response` is None, for readers that need tokens only. Messages are
    shared between all steps of a reader and must not be changed. Raises UnreadableRecord if the record is damaged,
    incomplete or of an unknown version.
    """
    schema, packed = open_frame(record)
    try:
        return _decode(packed, reader, index, whole=whole)
    except blocks.BrokenChain as error:
        raise UnreadableRecord(f"the record is unreadable: {error}") from error
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise UnreadableRecord(f"the record does not match schema {schema}: {error!r}") from error


@dataclass(frozen=True, slots=True)
class StoredCall:
    """What a record says about its call; long values are the names of their chains until they are read."""

    head: Head
    request: Mapping[str, Any]  # null for long values
    messages: (
        bytes | None
    )  # the name of the last block of the messages that were sent; None for a call without messages
    is_answerable: bool  # its response is complete, or an error that the client would get again

    def fields(self, names: Container[str]) -> dict[str, Any]:
        """Return these fields of the client's request, and the chains of long ones."""
        chains = self.head.chains.get("request", {})
        given = {name: value for name, value in self.request.items() if name in names and value is not None}
        return {**given, **{name: tuple(chain) for name, chain in chains.items() if name in names}}

    def read(self, fields: Mapping[str, Any], reader: BlockReader) -> dict[str, Any]:
        """Return what `fields` returned, with the values of long fields. Raises UnreadableRecord."""
        read = {name: value for name, value in fields.items() if not isinstance(value, tuple)}
        chains = {name: list(value) for name, value in fields.items() if isinstance(value, tuple)}
        try:
            _join_fields(read, chains, (), reader)
        except (ValueError, TypeError, LookupError) as error:
            raise UnreadableRecord(f"the request is unreadable: {error!r}") from error
        return read


def read_call(record: bytes, reader: BlockReader) -> StoredCall:
    """Return what a record says about its call, without its tokens, messages and long values. Raises UnreadableRecord."""
    schema, packed = open_frame(record)
    try:
        (head_text, request_text, sent_text, response_text), _ = split_payload(reader.expand(packed))
        head, request, sent = (
            read_head(head_text),
            object_of(orjson.loads(request_text)),
            sent_of(orjson.loads(sent_text)),
        )
        is_sent = "messages" in (sent.get("set") or ()) or "messages" in (sent.get("unset") or ())
        kind, *where = head.chains.get("sent" if is_sent else "request", {}).get("messages") or ("",)
        messages = bytes.fromhex(where[0]) if kind == "messages" else None
        status = orjson.loads(response_text).get("status") if head.status == "error" else None
        is_rejected = type(status) is int and 400 <= status < 500
        is_complete = head.status == "complete" and response_text != b"null"
        return StoredCall(head, request, messages, is_complete or is_rejected)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise UnreadableRecord(f"the record does not match schema {schema}: {error!r}") from error


def frame(schema: int, packed: bytes) -> bytes:
    """Return the record of a compressed payload."""
    checksum = blake2b(packed, digest_size=8, person=b"record", salt=bytes([schema])).digest()
    return b"".join((_MAGIC, bytes([schema]), checksum, packed))


def make_record(schema: int, payload: bytes, writer: BlockWriter) -> Record:
    """Return the record of a payload with its blocks, which the writer has written."""
    packed = writer.compress(payload)
    return Record(frame(schema, packed), writer.blocks, tuple(writer.leans_on), tuple(writer.ends))


def open_frame(record: bytes) -> tuple[int, bytes]:
    """Return the schema and the compressed payload of a record. Raises UnreadableRecord."""
    if len(record) < _HEADER or not record.startswith(_MAGIC):
        raise UnreadableRecord(f"{len(record)} bytes are not a record")
    schema, packed = record[2], record[_HEADER:]
    if schema != SCHEMA:
        writer = "a version before 0.1.0 wrote it" if schema < SCHEMA else "use a newer version"
        raise UnreadableRecord(f"record schema {schema} is not supported: this version reads schema {SCHEMA}; {writer}")
    if record != frame(schema, packed):
        raise UnreadableRecord("the record is damaged: checksum mismatch")
    return schema, packed


def expanded_size_of(record: bytes) -> int:
    """Return the number of bytes to which a record expands; 0 for a damaged one."""
    return blocks.expanded_size(record, _HEADER)


def join_payload(texts: Sequence[bytes], arrays: Iterable[bytes]) -> bytes:
    """Return the payload of these four JSON texts and arrays."""
    return b"".join([_LENGTHS.pack(*map(len, texts)), *texts, *arrays])


def split_payload(raw: bytes) -> tuple[list[bytes], int]:
    """Return the JSON texts of a payload, and where its arrays begin. Raises ValueError."""
    if len(raw) < _LENGTHS.size:
        raise ValueError("missing bytes")
    ends = list(accumulate(_LENGTHS.unpack_from(raw), initial=_LENGTHS.size))
    return [raw[start:end] for start, end in pairwise(ends)], ends[-1]


def _choice_heads(choices: tuple[Choice, ...]) -> tuple[list[dict[str, Any]], bool]:
    """Return the heads of the choices, and whether one has experts or a mask. orjson takes longer to write a dataclass."""
    heads, has_extras = [], False
    for choice in choices:
        head = {
            "index": choice.index,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "prompt": choice.prompt,
            "spans": list(map(Span.as_dict, choice.spans)),
            "ids": len(choice.ids),
            "logprobs": len(choice.logprobs),
            "code": choice.logprobs.typecode,
            "experts": None,
            "mask": None,
        }
        if choice.routed_experts is not None or choice.sampling_mask is not None:
            head |= extras.head_of(choice)
            has_extras = True
        heads.append(head)
    return heads, has_extras


def write_chains(
    request: Mapping[str, Any],
    sent: Mapping[str, Any],
    prompts: tuple[Prompt, ...],
    writer: BlockWriter,
    *,
    has_images: bool,
) -> tuple[tuple[bytes, bytes], dict[str, Any], list[bytes]]:
    """Write the images, the prompts and the long values of a step as chains.

    Return the JSON of what remains of the request and the changes, `prompts` and `chains` of the head, and the prompts' tails.
    Raises TypeError for what orjson cannot write.
    """
    images = data_in(sent_messages(request, sent)) if has_images else {}
    if images:
        writer.write_images(images)
    chains, ends, tails = {}, [], []
    for prompt in prompts:
        units, tail = blocks.cut(to_little_endian(prompt))
        ends.append({"end": writer.write(blocks.IDS, units).hex(), "tail": len(tail)})
        tails.append(tail)
    rest, chains["request"] = _chain_fields(request, prompts, writer, images)
    changes = dict(sent)
    if isinstance(changes.get("set"), dict):
        changes["set"], chains["sent"] = _chain_fields(changes["set"], prompts, writer, images)
    texts = orjson.dumps(rest), orjson.dumps(changes)
    return texts, {"prompts": ends, "chains": chains}, tails


def _chain_fields(
    fields: Mapping[str, Any], prompts: tuple[Prompt, ...], writer: BlockWriter, images: Mapping[str, bytes]
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return the fields with null for values that are stored in chains, and the chain of each.

    `images`: the names of the call's images by their data, which the writer has written.
    """
    left, chains = dict(fields), {}
    for name, value in fields.items():
        if isinstance(value, str):
            chain = None if len(value) < _SHORT_TEXT else _chain_of(name, value, prompts, writer, {})
        elif name == "messages" and isinstance(value, list):
            # orjson 3.13 keeps a buffer of 4 kB, however short a text is: copied, it takes its own size.
            texts = map(bytes, map(memoryview, map(orjson.dumps, value)))  # type: ignore[arg-type]
            pieces = [piece_of(message, images) for message in value] if images else list(texts)
            chain = ["messages", writer.write(blocks.MESSAGES, pieces).hex()]
        elif isinstance(value, list | dict):
            chain = _chain_of(name, value, prompts, writer, images)
        else:
            continue
        if chain:
            left[name], chains[name] = None, chain
    return left, chains


def _chain_of(
    name: str, value: Any, prompts: tuple[Prompt, ...], writer: BlockWriter, images: Mapping[str, bytes]
) -> list[str] | None:
    """Return the chain of a value as JSON; None if it is short."""
    value, places = taken_out(value, images) if images else (value, [])
    text = orjson.dumps(value)
    if name == "prompt" and prompts and isinstance(value, list):
        # Compare as JSON, in which 1, 1.0 and true differ.
        if text == orjson.dumps(prompts[0].tolist()):
            return ["prompt"]
        if text == orjson.dumps([ids.tolist() for ids in prompts]):
            return ["prompts"]
    units, tail = blocks.cut(text)
    if not units and not places:
        return None
    # A cut can split a character, so the tail is bytes; latin-1 can represent all bytes.
    chain = ["json", writer.write(blocks.JSON, units).hex(), tail.decode("latin-1")]
    return [*chain, orjson.dumps(places).decode()] if places else chain


def read_chains(
    request: dict[str, Any],
    sent: dict[str, Any],
    chains: Mapping[str, dict[str, list[str]]],
    prompts: tuple[Prompt, ...],
    reader: BlockReader,
) -> None:
    """Undo `write_chains` in the request and the changes."""
    _join_fields(request, chains["request"], prompts, reader)
    if "sent" in chains:
        _join_fields(sent["set"], chains["sent"], prompts, reader)


def _join_fields(
    left: dict[str, Any], chains: dict[str, list[str]], prompts: tuple[Prompt, ...], reader: BlockReader
) -> None:
    for name, (kind, *where) in chains.items():
        match kind:
            case "messages":
                left[name] = list(reader.read(blocks.MESSAGES, bytes.fromhex(where[0])))
            case "prompt":
                left[name] = prompts[0].tolist()
            case "prompts":
                left[name] = [ids.tolist() for ids in prompts]
            case _:
                pieces = reader.read(blocks.JSON, bytes.fromhex(where[0]))
                left[name] = orjson.loads(b"".join((*pieces, where[1].encode("latin-1"))))
                if len(where) > 2:
                    put_back(left[name], orjson.loads(where[2]), reader.image)


def _decode(packed: bytes, reader: BlockReader, index: int | None, *, whole: bool) -> Step:
    raw = reader.expand(packed)
    (head_text, request_text, sent_text, response_text), start = split_payload(raw)
    head = read_head(head_text)
    prompts, choices = _arrays(head, raw, start, reader)
    request: dict[str, Any] = {}
    sent: dict[str, Any] = {}
    response = None
    if whole:
        request, sent = object_of(orjson.loads(request_text)), sent_of(orjson.loads(sent_text))
        read_chains(request, sent, head.chains, prompts, reader)
        response = orjson.loads(response_text)
        if response is not None and not isinstance(response, dict):
            response = None
            head.problems = flagged(head.problems, (ODD,))
        extras.put_back(response, head.again, choices)
    facts = dict(zip(_FACTS, _facts_of(head), strict=True))
    facts["sampling"], facts["extra"] = head.sampling or {}, head.extra or {}
    return Step(
        request=request,
        sent=sent,
        response=response,
        prompts=prompts,
        choices=choices,
        policy=head.policy,
        index=index,
        **facts,
    )


def _arrays(head: Head, raw: bytes, start: int, reader: BlockReader) -> tuple[tuple[Prompt, ...], tuple[Choice, ...]]:
    """Return the prompts and choices of a record, which contains their arrays from byte `start` to its end."""

    def take(size: int) -> bytes:
        nonlocal start
        begin, start = start, start + size
        if not begin <= start <= len(raw):
            raise ValueError("missing bytes")
        return raw[begin:start]

    prompts = tuple([SharedIds(reader.link(bytes.fromhex(it.end)), take(it.tail)) for it in head.prompts])
    ids = [ids_from_little_endian(take(4 * it.ids)) for it in head.choices]
    logprobs = [
        logprobs_from_little_endian(it.code, take((4 if it.code == "f" else 8) * it.logprobs)) for it in head.choices
    ]
    choices = tuple([
        Choice(
            index=it.index,
            ids=own_ids,
            logprobs=own_logprobs,
            finish_reason=it.finish_reason,
            stop_reason=it.stop_reason,
            prompt=it.prompt if it.prompt >= 0 else len(prompts),  # negative: no prompt, and -1 must not mean the last one
            spans=it.spans,
            routed_experts=None if it.experts is None else extras.read_experts(it.experts, take),
            sampling_mask=None if it.mask is None else extras.read_mask(it.mask, take),
        )
        for it, own_ids, own_logprobs in zip(head.choices, ids, logprobs, strict=True)
    ])  # fmt: skip
    if start != len(raw):
        raise ValueError("trailing bytes")
    return prompts, choices
