"""The tape of a playback: the recorded steps of a rollout, found by what their calls asked for.

Two calls ask for the same if they have the same dialect, the same messages and the same values of the fields that change what
is sampled. Messages are compared as the engine's chat request has them, by their role, texts, name and tool calls, whose
arguments are compared as JSON. Ids of tool calls are compared by the place of the call in its reply, and the results of one
reply in the order of its calls: clients make ids of their own, and run tools at the same time. Replies are compared without
their reasoning, which many agents drop. Text of a message or of a tool's description that a pattern to ignore matches counts as
equal.

The digest of a list of messages continues the digest of the list without the last one, as the blocks of a record do. So each
stored message is digested once, however many steps repeat it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import orjson

from proxy.trajectory.blocks import MESSAGES, ROOT, BlockReader
from proxy.trajectory.codec import StoredCall, UnreadableRecord, decode, read_call
from proxy.trajectory.conversations import calls_of, canonical_calls, role_of, split_thoughts, text_of
from proxy.trajectory.step import EngineFacts

# The fields of a client's request that change what is sampled, of all dialects. Others are the client's own (metadata, ids of
# items, cache keys), change the format of the response only, or name the model, which the source's is sampled by in any case.
_SAMPLED_BY: Final = frozenset(
    {
        "tools", "tool_choice", "functions", "function_call", "parallel_tool_calls", "toolConfig", "response_format",
        "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "ebnf", "json_schema",
        "text", "output_config", "output_format", "temperature", "top_p", "top_k", "min_p", "typical_p", "presence_penalty",
        "frequency_penalty", "repetition_penalty", "length_penalty", "logit_bias", "bad_words", "allowed_token_ids", "n",
        "best_of", "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "max_new_tokens", "stop",
        "stop_sequences", "stop_token_ids", "ignore_eos", "reasoning", "reasoning_effort", "thinking",
        "thinking_token_budget", "chat_template", "chat_template_kwargs", "documents", "echo", "suffix", "logprobs",
        "top_logprobs", "add_generation_prompt", "continue_final_message", "truncate_prompt_tokens", "generationConfig",
        "generation_config", "tool_config", "sampling_params", "mm_processor_kwargs", "image_data", "video_data", "audio_data",
        "session_params", "input_embeds", "prompt_embeds", "use_beam_search", "grammar", "n_predict", "repeat_penalty",
        "include_stop_str_in_output", "add_special_tokens", "custom_params", "custom_logit_processor", "vllm_xargs",
    }
)  # fmt: skip
_PROMPTS: Final = ("prompt", "text", "input_ids", "token_ids")  # of calls without messages
_SIZE: Final = 16
_MOST_SHOWN: Final = 500  # characters of a value that differs
_BYTES_PER_PLACE: Final = 600  # an estimate: the objects of a message's digest, and of a step
_BYTES_PER_BLOCK_BYTE: Final = 6  # an estimate: a compressed byte of a block, and of what it is read as


def _digest(*parts: bytes) -> bytes:
    digest = blake2b(digest_size=_SIZE)
    for part in parts:
        digest.update(b"%d " % len(part) + part)
    return digest.digest()


def blanked(text: str, patterns: Sequence[Sequence[str]]) -> str:
    """Return a text without what the patterns match, each as the parts between its `*`. Linear in the text."""
    for parts in patterns:
        if parts[0] in text:
            text = _blanked(text, parts)
    return text


def _blanked(text: str, parts: Sequence[str]) -> str:
    kept: list[str] = []
    done = at = 0
    line_end = -1
    while at <= len(text) and (start := text.find(parts[0], at)) >= 0:
        if start > line_end:
            line_end = text.find("\n", start)
            line_end = len(text) if line_end < 0 else line_end
        end = start + len(parts[0])
        for part in parts[1:]:
            found = text.find(part, end, line_end) if part else end
            if found < 0:
                break
            end = found + len(part)
        else:
            end = end if parts[-1] else line_end
            kept += (text[done:start], "\0")
            done = at = max(end, start + 1)
            continue
        at = line_end + 1  # the parts that follow this start follow the later ones of the line as well
    return "".join((*kept, text[done:]))


@dataclass(slots=True, eq=False)
class Place:
    """A list of messages: its last one, and the place before it."""

    before: "Place | None"
    length: int
    digest: bytes
    name: bytes = ROOT  # of the last block of a stored chain
    base: bytes = b""  # the digest before the tool results at the end
    results: int = 0  # the sum of the digests of these results, which is the same in any order
    calls: Mapping[str, int] = field(default_factory=dict)  # the places of the latest reply's calls by their ids
    is_reply: bool = False


START: Final = Place(None, 0, bytes(_SIZE), base=bytes(_SIZE))


def after(place: Place, message: Any, patterns: Sequence[Sequence[str]], name: bytes = ROOT) -> Place:
    """Return the place of a list with one more message."""
    role, length = role_of(message), place.length + 1
    if role == "tool":
        call_id = message.get("tool_call_id")
        at = place.calls.get(call_id) if isinstance(call_id, str) else None
        which = b"" if at is None else b"%d" % at
        result = _digest(which, _content(message, patterns))
        results = (place.results + int.from_bytes(result, "big")) % 2 ** (8 * _SIZE)
        digest = _digest(place.base, results.to_bytes(_SIZE, "big"))
        return Place(place, length, digest, name, place.base, results, place.calls)
    calls = place.calls
    if role == "assistant":
        _, said = split_thoughts(text_of(message))
        parts = [blanked(said, patterns).strip(), *(part for call in canonical_calls(message) for part in call)]
        digest = _digest(place.digest, b"assistant", *(part.encode("utf-8", "surrogatepass") for part in parts))
        names = [call.get("id") for call in calls_of(message)]
        calls = {call_id: at for at, call_id in reversed(list(enumerate(names))) if isinstance(call_id, str)}
    elif isinstance(message, dict):
        own = orjson.dumps([role, message.get("name")])
        digest = _digest(place.digest, own, _content(message, patterns))
    else:
        digest = _digest(place.digest, b"", orjson.dumps(message))
    return Place(place, length, digest, name, digest, 0, calls, role == "assistant")


def _content(message: Mapping[str, Any], patterns: Sequence[Sequence[str]]) -> bytes:
    """Return the content of a message as bytes; text parts are compared as one text, with a line end between them."""
    content = message.get("content") or ""
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        strings = [text for text in texts if isinstance(text, str)]
        if len(strings) < len(content):
            other = [it for it in enumerate(content) if not (isinstance(it[1], dict) and it[1].get("type") == "text")]
            return b"\n".join(
                (blanked("\n".join(strings), patterns).encode("utf-8", "surrogatepass"), orjson.dumps(other))
            )
        content = "\n".join(strings)
    if isinstance(content, str):
        return blanked(content, patterns).encode("utf-8", "surrogatepass")
    return orjson.dumps(content)


class Asked(NamedTuple):
    """What a call asks for."""

    key: bytes
    fields: Mapping[str, Any]
    messages: Sequence[Any]
    places: Sequence[Place]  # of each beginning of the messages, the shortest first; `START` if there are none


class TapeStep(NamedTuple):
    """A step of a tape."""

    position: int  # in the rollout
    step_id: str
    key: bytes
    place: Place  # of its messages
    is_answerable: bool
    is_delivered: bool
    is_rejection: bool = False  # the engine rejected the call


class Tape:
    """The steps of a rollout, with its blocks. Not thread-safe."""

    def __init__(self, ignore: Sequence[str] = ()) -> None:
        self.steps: list[TapeStep] = []
        self._patterns = [pattern.split("*") for pattern in ignore]
        self._by_key: dict[bytes, list[TapeStep]] = {}
        self._by_id: dict[str, TapeStep] = {}
        self._by_chain: dict[bytes, Place] = {ROOT: START}
        self._by_digest: dict[bytes, Place] = {}
        self._last_asked: dict[bytes, int] = {}  # the position of the latest step with these messages, by their digest
        self._known_fields: dict[bytes, bytes] = {}
        self.reader = BlockReader({})
        self.engine: EngineFacts | None = None  # of the first step
        self.size = 0  # the approximate memory in bytes

    def __len__(self) -> int:
        return len(self.steps)

    def extend(self, records: Sequence[bytes], blocks: Mapping[bytes, bytes], undelivered: frozenset[str]) -> None:
        """Add the next records of the rollout. `blocks`: all of its blocks."""
        self.reader = BlockReader(blocks)
        for record in records:
            step = self._read(record, len(self.steps), undelivered)
            self.steps.append(step)
            if step.step_id:
                self._by_key.setdefault(step.key, []).append(step)
                self._by_id[step.step_id] = step
                self._last_asked[step.place.digest] = step.position
        self.size = _BYTES_PER_BLOCK_BYTE * self.reader.size
        self.size += _BYTES_PER_PLACE * (len(self.steps) + len(self._by_digest))

    def step(self, step_id: str) -> TapeStep | None:
        """Return the step with this id."""
        return self._by_id.get(step_id)

    def equal(self, key: bytes, end: int) -> list[TapeStep]:
        """Return the steps of the first `end` ones that have this key and can be answered, the delivered ones first."""
        found = [step for step in self._by_key.get(key, ()) if step.position < end and step.is_answerable]
        return sorted(found, key=lambda step: not step.is_delivered)

    def asked_as(self, key: bytes) -> list[TapeStep]:
        """Return all steps with this key."""
        return self._by_key.get(key, [])

    def ask(self, dialect: str, request: Mapping[str, Any], body: Mapping[str, Any]) -> Asked:
        """Return what a call asks for. `request` is the client's body; `body` has the messages for the engine."""
        fields = self.compared(
            {name: value for name, value in request.items() if name in _SAMPLED_BY and value is not None}
        )
        messages = body.get("messages")
        if not isinstance(messages, list):
            prompt = _prompt_of(request)
            return Asked(_key(dialect, _fields_digest(fields), _dump(prompt)), {**fields, **prompt}, [], [START])
        places = list(self._places(messages))
        return Asked(_key(dialect, _fields_digest(fields), places[-1].digest), fields, messages, places)

    def replied(self, step: TapeStep, replies: Sequence[Any]) -> frozenset[bytes]:
        """Return the digests of the messages of a step with each of its replies."""
        return frozenset(after(step.place, reply, self._patterns).digest for reply in replies)

    def inherited_length(self, asked: Asked, end: int) -> int:
        """Return how many messages of a call are before its first live reply: to a call that the first `end` steps lack.

        Such a reply may have the text of the source's. Its tokens and thoughts are still its own.
        """
        for place in asked.places:
            if place.is_reply and place.before is not None and self._last_asked.get(place.before.digest, -1) >= end:
                return place.length - 1
        return len(asked.messages)

    def restored(self, asked: Asked, length: int) -> list[Any]:
        """Return the messages of a call, as the tape has those of the first `length` that are equal but for what is ignored."""
        for place in reversed(asked.places[: length + 1]):
            if (known := self._by_digest.get(place.digest)) is not None:
                ids = {at: call_id for call_id, at in known.calls.items()}
                names = {call_id: ids[at] for call_id, at in place.calls.items() if at in ids}
                rest = asked.messages[place.length :]
                return [*self.reader.read(MESSAGES, known.name), *_with_call_ids(rest, names)]
        return list(asked.messages)

    def nearest(self, asked: Asked, steps: Sequence[TapeStep]) -> tuple[TapeStep, int] | None:
        """Return the step of these with the longest common beginning of messages, and its length; None without any."""
        shared = {place.digest: place.length for place in asked.places}
        lengths: dict[int, int] = {id(START): 0}
        best: tuple[TapeStep, int] | None = None
        for step in steps:
            path, place = [], step.place
            while id(place) not in lengths and place.digest not in shared and place.before is not None:
                path.append(place)
                place = place.before
            length = lengths.get(id(place), shared.get(place.digest, 0))
            lengths.update((id(each), length) for each in (*path, place))
            if best is None or length > best[1]:
                best = step, length
        return best

    def messages(self, step: TapeStep) -> tuple[Any, ...]:
        """Return the messages of a step."""
        return self.reader.read(MESSAGES, step.place.name)

    def _places(self, messages: Sequence[Any]) -> Iterator[Place]:
        place = START
        yield place
        for message in messages:
            place = after(place, message, self._patterns)
            yield place

    def _read(self, record: bytes, index: int, undelivered: frozenset[str]) -> TapeStep:
        """Return a step; one that cannot be read has no id, and is never found."""
        try:
            call = read_call(record, self.reader)
            place = self._stored_place(call)
            fields = self._stored_fields(call)
            prompt = b"" if call.messages is not None else _dump(_prompt_of(decode(record, self.reader).request))
        except UnreadableRecord:
            return TapeStep(index, "", b"", START, is_answerable=False, is_delivered=False)
        head = call.head
        self.engine = self.engine or head.engine
        end = place.digest if call.messages is not None else prompt
        is_delivered = head.delivered and head.step_id not in undelivered
        key, is_rejection = _key(head.dialect, fields, end), head.status == "error"
        return TapeStep(index, head.step_id, key, place, call.is_answerable, is_delivered, is_rejection)

    def _stored_place(self, call: StoredCall) -> Place:
        known, fresh = self.reader.since(MESSAGES, call.messages or ROOT, self._by_chain)
        place = self._by_chain[known]
        for name, message in fresh:
            place = self._by_chain[name] = after(place, message, self._patterns, name)
            self._by_digest.setdefault(place.digest, place)
        return place

    def compared(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return fields without what the patterns match in the descriptions of tools."""
        tools = fields.get("tools")
        if not self._patterns or not isinstance(tools, list):
            return fields
        return {**fields, "tools": [_described(tool, self._patterns) for tool in tools]}

    def _stored_fields(self, call: StoredCall) -> bytes:
        """Return the digest of the fields of a stored call. Those of equal calls are read once: tools may be long."""
        given = call.fields(_SAMPLED_BY)
        name = _dump(given)
        if name not in self._known_fields:
            self._known_fields[name] = _fields_digest(self.compared(call.read(given, self.reader)))
        return self._known_fields[name]


def _with_call_ids(messages: Sequence[Any], names: Mapping[str, str]) -> Iterator[Any]:
    """Return messages in which the results at the beginning have these ids of their calls."""
    are_results = True
    for message in messages:
        are_results = are_results and role_of(message) == "tool"
        call_id = message.get("tool_call_id") if are_results else None
        known = names.get(call_id) if isinstance(call_id, str) else None
        yield message if known is None else {**message, "tool_call_id": known}


def _described(tool: Any, patterns: Sequence[Sequence[str]]) -> Any:
    name = "function" if isinstance(tool, dict) and isinstance(tool.get("function"), dict) else None
    own = tool if name is None else tool[name]
    if not isinstance(own, dict) or not isinstance(text := own.get("description"), str):
        return tool
    own = {**own, "description": blanked(text, patterns)}
    return own if name is None else {**tool, name: own}


def _prompt_of(request: Mapping[str, Any]) -> dict[str, Any]:
    return {name: request[name] for name in _PROMPTS if request.get(name) is not None}


def _key(dialect: str, fields: bytes, end: bytes) -> bytes:
    return _digest(dialect.encode(), fields, end)


def _fields_digest(fields: Mapping[str, Any]) -> bytes:
    return _digest(_dump({name: value for name, value in fields.items() if value is not None}))


def _dump(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)


def difference(messages: Sequence[Any], recorded: Sequence[Any], at: int) -> tuple[str, str | None, str | None]:
    """Return where two lists of messages differ, of which the first `at` are equal: the path, and both values, cut.

    A value is None where a list has ended.
    """
    path = f"messages[{at}]"
    if at >= len(messages) or at >= len(recorded):
        ended = [shown(given[at]) if at < len(given) else None for given in (messages, recorded)]
        return path, ended[0], ended[1]
    theirs, ours = messages[at], recorded[at]
    if isinstance(theirs, dict) and isinstance(ours, dict):
        if theirs.get("role") == ours.get("role") and canonical_calls(theirs) != canonical_calls(ours):
            return f"{path}.tool_calls", *from_difference(theirs.get("tool_calls"), ours.get("tool_calls"))
        for name in ("role", "name", "content"):
            if theirs.get(name) != ours.get(name):
                return f"{path}.{name}", *from_difference(theirs.get(name), ours.get(name))
    return path, *from_difference(theirs, ours)


def from_difference(value: Any, recorded: Any) -> tuple[str, str]:
    """Return two values as text, from shortly before the first character that differs."""
    one, other = _text(value), _text(recorded)
    low, high = 0, min(len(one), len(other))
    while low < high:  # bisect: slices compare fast
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    start = max(0, low - _MOST_SHOWN // 5) if low >= _MOST_SHOWN else 0
    return one[start : start + _MOST_SHOWN], other[start : start + _MOST_SHOWN]


def shown(value: Any) -> str:
    """Return a value as text, cut."""
    return _text(value)[:_MOST_SHOWN]


def _text(value: Any) -> str:
    return (
        value if isinstance(value, str) else orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
    )
