"""The long lists of a response that the client does not receive: token ids and logprobs, parsed apart from the rest.

Parsed as a whole, a response is a dict with an object for each prompt id and six for each sampled token. Here the lists are cut
out of its bytes and become arrays. Prompt ids that repeat the prompt of the rollout's previous call are not parsed again.

Contract: a response that is read here has the same tokens, the same problems and, without these lists, the same JSON as one
that is parsed as a whole, with one exception: a number beyond a double is not noticed in a skipped field of a logprob entry.
What is not recognized stays in the JSON. The format is vLLM's (0.32.0).
"""

from array import array
from typing import Any, Final, NamedTuple

import msgspec
import orjson

from proxy.trajectory.arrays import Ids, pack_floats, pack_ids, pack_numbers

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
