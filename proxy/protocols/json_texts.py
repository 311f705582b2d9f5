"""The JSON of requests and responses: what orjson does not read, the memory that parsing takes, and long lists parsed apart."""

import json
import re
from array import array
from hashlib import blake2b
from math import isfinite
from typing import Any, Final, NamedTuple

import msgspec
import orjson

from proxy.trajectory.arrays import Ids, pack_floats, pack_ids, pack_numbers

# Python engines may write NaN, Infinity, lone surrogates or numbers beyond a double. orjson refuses these; they are read here
# and written again as they came. Clients' bodies are not read here: they must be JSON.

# A number beyond a double is kept as this and its literal, in a string: as a float it would be written as `Infinity`.
_OVERFLOW: Final = "\ue000overflow:"
_WRITTEN_OVERFLOW: Final = re.compile(f'"{_OVERFLOW}([-+.0-9eE]+)"')


class NotJson(ValueError):
    """The bytes are no JSON, not even as Python writes it."""


def read_json(text: bytes) -> tuple[Any, bool]:
    """Return the value, and whether it is loose: it has NaN, an infinity, a lone surrogate or a number beyond a double.

    A lone surrogate becomes "?". A number beyond a double becomes a string, which no reader takes for a number;
    `write_loosely` writes its literal. Raises NotJson.
    """
    try:
        return orjson.loads(text), False
    except orjson.JSONDecodeError:
        pass
    try:
        spelled = json.dumps(_loads(text), ensure_ascii=False)  # noqa: TID251
        return _loads(spelled.encode("utf-8", "replace")), True
    except (ValueError, RecursionError) as error:
        raise NotJson(str(error)) from None


def write_loosely(value: Any) -> bytes:
    """Return compact JSON, as vLLM and SGLang write it, of a loose value; orjson writes others so.

    Raises RecursionError for a value that is nested too deeply.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))  # noqa: TID251
    return (_WRITTEN_OVERFLOW.sub(r"\1", text) if _OVERFLOW in text else text).encode()


def _loads(text: bytes) -> Any:
    return json.loads(text, parse_float=_number, parse_int=_integer)  # noqa: TID251 - what orjson does not read


def _number(literal: str) -> float | str:
    value = float(literal)
    return value if isfinite(value) else _OVERFLOW + literal


def _integer(literal: str) -> float | int | str:
    """Return the number as orjson reads it: an integer of 64 bits, else a float."""
    value = _number(literal)
    if isinstance(value, str) or abs(value) >= 2.0**64:
        return value
    exact = int(literal)
    return exact if -(2**63) <= exact < 2**64 else value


# The memory that parsing takes is estimated from counts of characters (in C, a gigabyte in a second). If a long request body
# begins like the body of the rollout's previous call, only the rest is hashed and counted; the digest and the weight are still
# of the whole text. Comparing bytes takes a fiftieth of the time of computing both.

# Bytes of memory for one character while a body is parsed (orjson 3.13, CPython 3.11, x86-64, measured): its
# own 16 bytes for each value, then a dict, a list, a boxed number with its slot, and half a string or key.
WEIGHTS: Final = {b"{": 248, b"[": 88, b",": 56}
QUOTE_WEIGHT: Final = 40
_ALL: Final = (*WEIGHTS.items(), (b'"', QUOTE_WEIGHT))
_LINE_WEIGHT: Final = 40  # an event of a stream has at least two line ends, and is an object


def most_weight(text: bytes | bytearray) -> int:
    """Return at least the bytes of memory that parsing a text takes: characters in strings count as if they were outside."""
    total = 0
    for character, weight in _ALL:
        if (
            character in text
        ):  # a part of a list of ids has commas only: searching takes a fifth of the time of counting
            total += weight * text.count(character)
    return total


def stream_weight(read: bytes) -> int:
    """Return at least the bytes of memory that a part of a stream takes: as received, joined, parsed, and as events."""
    return 2 * len(read) + most_weight(read) + _LINE_WEIGHT * (read.count(b"\n") + read.count(b"\r"))


LONG_TEXT: Final = 2**16  # bytes from which the comparison takes less time
_LIGHT_BYTES: Final = 2**20
_LIGHT_WEIGHT: Final = 2**22  # parsing so much takes as long as parsing 2**16 bytes of brackets
_PIECE_BYTES: Final = 2**14


class _Piece(NamedTuple):
    """A piece of a text, and the hash and the weight of the text to its end."""

    text: bytes
    state: Any
    weight: int


class LongText(NamedTuple):
    """A text in pieces, its digest, and the most memory that parsing it takes in bytes (`most_weight`)."""

    pieces: tuple[_Piece, ...]
    digest: str
    weight: int

    @property
    def size(self) -> int:
        """The approximate memory in bytes."""
        return len(self.pieces) * _PIECE_BYTES


def fresh_bytes(text: bytes, before: LongText) -> int:
    """Return about how many bytes of a text take time to process: only the bytes after `before`, if it has few values."""
    if len(text) > _LIGHT_BYTES or before.weight > _LIGHT_WEIGHT:
        return len(text)
    start = before.size - _PIECE_BYTES  # where its last piece is equal, most likely all are
    return len(text) - before.size if text.startswith(before.pieces[-1].text, start) else len(text)


def read_long(text: bytes, before: LongText | None) -> LongText:
    """Return a text in pieces; `before` is the text of the rollout's previous call."""
    pieces: list[_Piece] = []
    at = 0
    for piece in () if before is None else before.pieces:
        if not text.startswith(piece.text, at):
            break
        pieces.append(piece)
        at += _PIECE_BYTES
    state, weight = (pieces[-1].state, pieces[-1].weight) if pieces else (blake2b(digest_size=16), 0)
    for start in range(at, len(text) - len(text) % _PIECE_BYTES, _PIECE_BYTES):
        piece_text = text[start : start + _PIECE_BYTES]
        state = state.copy()
        state.update(piece_text)
        weight += most_weight(piece_text)
        pieces.append(_Piece(piece_text, state, weight))
    rest = text[len(pieces) * _PIECE_BYTES :]
    state = state.copy()
    state.update(rest)
    return LongText(tuple(pieces), state.hexdigest(), weight + most_weight(rest))


# The long lists of a response that the client does not receive are token ids and logprobs. Parsed as a whole, a response is a
# dict with an object for each prompt id and six for each sampled token. Here the lists are cut out of its bytes and become
# arrays. Prompt ids that repeat the prompt of the rollout's previous call are not parsed again.
#
# Contract: a response that is read here has the same tokens, the same problems and, without these lists, the same JSON as one
# that is parsed as a whole, with one exception: a number beyond a double is not noticed in a skipped field of a logprob entry.
# What is not recognized stays in the JSON. The format is vLLM's (0.32.0).

_PROMPT: Final = b'"prompt_token_ids":'
_TOKENS: Final = b'"tokens":'  # of a tokenize response
_SAMPLED: Final = b'"token_ids":'
_LOGPROBS: Final = b'"logprobs":'
_AFTER_LOGPROBS: Final = b',"finish_reason":'
_NAMED_BY_ID: Final = b'"token_id:'  # a token that is named by its id, which is compared with the sampled one
_PARSED_BYTES: Final = 2**14  # of a list at once: the objects of more ids do not fit into the processor's cache


class KnownPrompt(NamedTuple):
    """Prompt ids, and their JSON without brackets."""

    text: bytes
    ids: Ids


class _Entry(msgspec.Struct, gc=False):
    """The logprobs entry of a token; its other fields are skipped."""

    logprob: float


class _Logprobs(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    content: list[_Entry]


_LOGPROBS_DECODER: Final = msgspec.json.Decoder(_Logprobs)


class _Cut(NamedTuple):
    """A list in the bytes of a response, its value, and the path of its key."""

    start: int
    end: int
    name: str
    value: Any


def prompt_of(ids: Ids, known: KnownPrompt | None) -> KnownPrompt:
    """Return ids with their JSON. If they begin with the known ids, only the rest is written."""
    if known is not None and known.ids is ids:
        return known
    count = 0 if known is None else len(known.ids)
    if known is None or not count or ids[:count] != known.ids:
        return KnownPrompt(orjson.dumps(ids.tolist())[1:-1], ids)
    more = orjson.dumps(ids[count:].tolist())[1:-1]
    return KnownPrompt(b"%b,%b" % (known.text, more) if more else known.text, ids)


def repeats(body: bytes | bytearray, known: KnownPrompt | None, key: bytes = _PROMPT) -> int:
    """Return where the known prompt ends in a response, by comparing bytes without parsing; 0 if it is not there."""
    start = body.find(key) + len(key)
    is_there = known is not None and start >= len(key) and body.startswith(known.text, start + 1)
    return start + 1 + len(known.text) if known is not None and is_there else 0


def repeated_tokens(body: bytes | bytearray, known: KnownPrompt | None) -> int:
    """Return where the known prompt ends in a tokenize response; 0 if it is not there."""
    return repeats(body, known, _TOKENS)


def cut_tokens(body: bytes, known: KnownPrompt | None) -> tuple[bytes, KnownPrompt] | None:
    """Return a tokenize response with null in place of its ids, and the ids; None if they are not recognized."""
    cut = _prompt(body, known, _TOKENS)
    return None if cut is None else (b"".join((body[: cut.start], b"null", body[cut.end :])), cut.value)


def read_lists(
    body: bytes, known: KnownPrompt | None, *, sampled: bool = True
) -> tuple[dict[str, Any], KnownPrompt | None] | None:
    """Return a response with arrays in place of its lists, and its prompt; None if no list is recognized.

    Logprobs become `{"token_logprobs": …}`, as in completions. `known`: the prompt of the rollout's previous call. `sampled`:
    whether there may be lists of a choice, not only the prompt.
    """
    cuts: list[_Cut] = []
    for find in (_prompt, _logprobs, _ids) if sampled else (_prompt,):
        cut = find(body, known)
        if cut is not None:
            cuts.append(cut)
            body = b"".join((body[: cut.start], b"null", body[cut.end :]))
    if not cuts:
        return None
    try:
        response: dict[str, Any] = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    prompt = cuts[0].value if isinstance(cuts[0].value, KnownPrompt) else None
    return (response, prompt) if _put_back(response, cuts) else None


def _put_back(response: Any, cuts: list[_Cut]) -> bool:
    """Set the values of lists where null was parsed; return whether each key is where it is expected."""
    choices = response.get("choices") if isinstance(response, dict) else None
    choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
    for cut in cuts:
        is_prompt = isinstance(cut.value, KnownPrompt)
        place = response if is_prompt else choice
        if not isinstance(place, dict) or cut.name not in place or place[cut.name] is not None:
            return False
        place[cut.name] = cut.value.ids if is_prompt else cut.value
    return True


def _prompt(body: bytes, known: KnownPrompt | None, key: bytes = _PROMPT) -> _Cut | None:
    """Return the ids of this key. If they begin with the known prompt, its JSON is compared and shared, not parsed."""
    start = body.find(key) + len(key)
    if start < len(key) or not body.startswith(b"[", start):
        return None
    first = start + 1
    if known is not None and not body.startswith(known.text, first):
        known = None
    known_end = first + (0 if known is None else len(known.text))
    end = body.find(b"]", known_end)
    if end < 0 or body.find(key, end) >= 0:  # the key occurs once: a list that contains it has no ids
        return None
    try:
        if known is not None and end == known_end:
            return _Cut(start, end + 1, "prompt_token_ids", known)
        text = body[first:end]
        is_longer = known is not None and known.text and body.startswith(b",", known_end)
        if known is not None and is_longer and (more := _parsed(body[known_end + 1 : end])):
            return _Cut(start, end + 1, "prompt_token_ids", KnownPrompt(text, known.ids + more))
        return _Cut(start, end + 1, "prompt_token_ids", KnownPrompt(text, _parsed(text)))
    except ValueError:
        return None


def _logprobs(body: bytes, _known: KnownPrompt | None) -> _Cut | None:
    """Return the logprobs. They end where their JSON does: only then is it complete, and valid."""
    start, end = _once(body, _LOGPROBS), body.rfind(_AFTER_LOGPROBS)
    if not 0 < start <= end:
        return None
    text = body[start:end]
    if text.rfind(_NAMED_BY_ID) >= 0:
        return None
    try:
        text.decode()  # msgspec 0.22 does not check fields that it skips
        logprobs = [entry.logprob for entry in _LOGPROBS_DECODER.decode(text).content]
    except ValueError:  # includes msgspec.DecodeError
        return None
    return _Cut(start, end, "logprobs", {"token_logprobs": pack_floats(logprobs)})


def _ids(body: bytes, _known: KnownPrompt | None) -> _Cut | None:
    start = _once(body, _SAMPLED)
    end = body.find(b"]", start)
    if start < 0 or end < 0 or not body.startswith(b"[", start):
        return None
    try:
        return _Cut(start, end + 1, "token_ids", _parsed(body[start + 1 : end]))
    except ValueError:
        return None


def _once(body: bytes, name: bytes) -> int:
    """Return where the value of a key begins; -1 if it does not occur, or twice. Quotes within a JSON string are escaped.

    Python 3.11 searches backwards in a quarter of the time: few places of a response begin like a key, and many end like one.
    """
    start = body.rfind(name)
    return start + len(name) if start >= 0 and body.rfind(name, 0, start) < 0 else -1


def _parsed(text: bytes) -> Ids:
    """Return the ids of a JSON list without its brackets. Raises ValueError."""
    pack = pack_ids if b"e" in text else pack_numbers  # only true and false have an e
    if len(text) <= _PARSED_BYTES:
        return pack(orjson.loads(b"[%b]" % text))
    ids, at, end = array("i"), 0, 0
    while end >= 0:
        end = text.find(b",", at + _PARSED_BYTES)
        part = pack(orjson.loads(b"[%b]" % (text[at:end] if end >= 0 else text[at:])))
        if not part and (at or end >= 0):
            raise ValueError("an id is missing before or after a comma")
        ids += part
        at = end + 1
    return ids
