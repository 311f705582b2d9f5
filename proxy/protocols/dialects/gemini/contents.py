"""Translation of `systemInstruction` and `contents` to chat messages, with media, function calls and thought signatures.

Adjacent contents of the model are one message: official SDKs keep each chunk of a stream as a separate content.

Invariant: a function's result is never assigned to the wrong call. Clients may omit ids: a result without an id belongs to the
next call of its function without a result, as in Google's API.
"""

from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final
from urllib.parse import urlsplit

import orjson

from proxy.protocols.dialects.base import Json
from proxy.protocols.dialects.translation import (
    SampledCalls,
    a_flag,
    a_text,
    an_object,
    at,
    chat_call,
    chat_content,
    decoded,
    optional,
    refusal,
    required,
    serialize,
    snake_case,
    text_part,
)
from proxy.protocols.dialects.translation import objects as objects_of_list
from proxy.trajectory.json_bytes import parse_text

_MARK: Final = b"tokentape"  # nine bytes: twelve characters of base64
_MARK_TEXT: Final = b64encode(_MARK).decode()


@dataclass(frozen=True, slots=True)
class Signature:
    """The content of a thought signature: what a client returns with a part and cannot change. It is not encrypted."""

    call_id: str | None = None  # of the part's function call: clients may omit ids
    thoughts: str | None = None  # before the part: some clients do not receive them, and others do not send them back


NONE: Final = Signature()


def sign(*, call_id: str | None = None, thoughts: str | None = None) -> str:
    """Return a signature."""
    fields = {"id": call_id, "thoughts": thoughts}
    return b64encode(
        _MARK + orjson.dumps({name: value for name, value in fields.items() if value is not None})
    ).decode()


def read_signature(value: Any, path: str) -> Signature:
    """Return the content of a signature; an empty one if it is from elsewhere (Google, or a client's placeholder).

    Google's Python SDK encodes signatures again, with the alphabet for URLs.
    """
    text = a_text(value, path).rstrip("=")
    if not text.startswith(_MARK_TEXT):
        return NONE
    try:
        text = text.replace("-", "+").replace("_", "/")
        fields = parse_text(b64decode(text + "=" * (-len(text) % 4), validate=True)[len(_MARK) :].decode())
    except ValueError:
        return NONE
    if not isinstance(fields, dict):
        return NONE
    found = {name: value for name in ("id", "thoughts") if isinstance(value := fields.get(name), str) and value}
    return Signature(found.get("id"), found.get("thoughts"))


_ROLES: Final = {None: "user", "user": "user", "function": "user", "model": "model"}
_KINDS: Final = (
    "text", "inlineData", "fileData", "functionCall", "functionResponse", "executableCode", "codeExecutionResult", "toolCall",
    "toolResponse",
)  # fmt: skip
_KIND_OF: Final = {spelled: kind for kind in _KINDS for spelled in (kind, snake_case(kind))}

Parts = list[tuple[Json, str]]
Content = tuple[str, Parts, str]  # role, parts with their paths, path


def objects(value: Any, path: str) -> list[tuple[Json, str]]:
    """Return the objects of a list, or the one in place of it (as in Google's examples), each with its path."""
    return objects_of_list([value] if isinstance(value, dict) else value, path)


def system_message(body: Mapping[str, Any]) -> list[Json]:
    """Return the system message, if there is one; its texts are separate lines, as vLLM 0.32 joins parts of a content."""
    value = optional(an_object, body, "systemInstruction")
    if value is None:
        return []
    texts = [required(a_text, part, "text", path) for part, path in _parts(value, "systemInstruction")]
    text = "\n".join(text for text in texts if text)
    return [{"role": "system", "content": text}] if text else []


def read_contents(body: Mapping[str, Any], thought: str, sampled: Mapping[str, Mapping[str, Any]]) -> list[Json]:
    """Return the chat messages of the contents. `sampled`: functions of earlier calls by id. Raises UnprocessableRequest."""
    contents: list[Content] = []
    for value, path in optional(objects, body, "contents") or ():
        role, role_path = at(value, "role", path)
        if role is not None and a_text(role, role_path) not in _ROLES:
            raise refusal(role_path, f"must be user or model, not {role[:64]!r}")
        contents.append((_ROLES[role or None], _parts(value, path), path))
    if not contents:
        raise refusal("contents", "must have at least one content")
    messages: list[Json] = []
    known = SampledCalls(sampled)
    calls: Sequence[Json] = ()
    for role, run in groupby(contents, lambda content: content[0]):
        turn = list(run)
        if role == "model":
            messages.append(_model_message(turn, thought, known, len(messages)))
            calls = messages[-1].get("tool_calls") or ()
        else:
            messages += _user_messages(turn, calls)
            calls = ()
    if calls:
        raise refusal(contents[-1][2], "calls functions; add their functionResponse parts in a content of the user")
    return messages


def kind_of(part: Mapping[str, Any], path: str) -> str | None:
    """Return which kind of data a part has, None if it has none. Raises UnprocessableRequest if it has several kinds."""
    kinds = [_KIND_OF[name] for name, value in part.items() if value is not None and name in _KIND_OF]
    if len(kinds) > 1:
        raise refusal(path, f"must have one kind of data, not {' and '.join(kinds)}")
    return kinds[0] if kinds else None


def call_ids_from(body: Mapping[str, Any]) -> list[str]:
    """Return the ids of the calls in the contents, by which sampled texts are looked up. The body may be invalid."""
    found: list[str] = []
    for part in _parts_unchecked(body):
        call = part.get("functionCall") or part.get("function_call")
        if not isinstance(call, dict):
            continue
        signature = part.get("thoughtSignature") or part.get("thought_signature")
        name = call.get("id") or (read_signature(signature, "").call_id if isinstance(signature, str) else None)
        if isinstance(name, str):
            found.append(name)
    return found


def _parts_unchecked(body: Mapping[str, Any]) -> Iterator[Json]:
    contents = body.get("contents")
    for content in contents if isinstance(contents, list) else [contents]:
        parts = content.get("parts") if isinstance(content, dict) else None
        yield from (part for part in (parts if isinstance(parts, list) else [parts]) if isinstance(part, dict))


def _parts(content: Json, path: str) -> Parts:
    parts = required(objects, content, "parts", path)
    if not parts:
        raise refusal(f"{path}.parts", "must have at least one part")
    return parts


def _user_messages(turn: Sequence[Content], calls: Sequence[Json]) -> list[Json]:
    """Return the messages of adjacent contents of the user: results of the calls first, then each content's other parts."""
    responses, messages = [], []
    for _, parts, _path in turn:
        chat_parts = []
        for part, path in parts:
            if kind_of(part, path) == "functionResponse":
                responses.append(required(read_response, part, "functionResponse", path))
            else:
                chat_parts.append(_user_part(part, path))
        if chat_parts:
            left = [part for part in chat_parts if part.get("text") != ""] or chat_parts[:1]
            messages.append({"role": "user", "content": chat_content(left)})
    if not calls and not responses:
        return messages
    return [*tool_messages(calls, responses, turn[0][2]), *messages]


def _user_part(part: Json, path: str) -> Json:
    kind = kind_of(part, path)
    if kind == "text" and not optional(a_flag, part, "thought", path):
        return text_part(required(a_text, part, "text", path))
    if kind == "inlineData":
        return required(inline_part, part, kind, path)
    if kind == "fileData":
        return required(file_part, part, kind, path)
    raise refusal(path, f"{_named(kind)} cannot be translated to chat in a content of the user")


def _named(kind: str | None) -> str:
    if kind is None:
        return "a part without data"
    return "a thought" if kind == "text" else kind


def _model_message(turn: Sequence[Content], thought: str, sampled: SampledCalls, number: int) -> Json:
    """Return the message of adjacent contents of the model; `number` is its index.

    Its texts are joined without a separator: they are pieces of one sampled text. Reasoning that the client does not send back
    is in the signatures.
    """
    thoughts: list[str] = []
    texts: list[str] = []
    signed: str | None = None
    calls: dict[str, Json] = {}
    for part, path in (entry for _, parts, _path in turn for entry in parts):
        kind = kind_of(part, path)
        signature = optional(read_signature, part, "thoughtSignature", path)
        signed = (signature or NONE).thoughts or signed
        if kind == "text":
            is_thought = optional(a_flag, part, "thought", path)
            (thoughts if is_thought else texts).append(required(a_text, part, "text", path))
        elif kind == "functionCall":
            unnamed = (signature or NONE).call_id or f"call_{number}_{len(calls)}"
            call = _call(required(an_object, part, kind, path), unnamed, sampled, f"{path}.{kind}")
            if call["id"] in calls:
                raise refusal(f"{path}.{kind}.id", f"{call['id'][:64]!r} is the id of another call of this turn")
            calls[call["id"]] = call
        elif kind is not None or signature is None:
            raise refusal(path, f"{_named(kind)} cannot be translated to chat in a content of the model")
    text = "".join(texts)
    message: Json = {"role": "assistant", "content": text or ("" if texts and not calls else None)}
    if reasoning := "".join(thoughts) or signed:
        message[thought] = reasoning
    if calls:
        message["tool_calls"] = list(calls.values())
    return message


def _call(call: Json, unnamed: str, sampled: SampledCalls, path: str) -> Json:
    name = required(a_text, call, "name", path)
    call_id = optional(a_text, call, "id", path) or unnamed
    arguments = sampled.restored(optional(an_object, call, "args", path) or {}, name, call_id, f"{path}.args")
    return chat_call(call_id, name, arguments)


@dataclass(frozen=True, slots=True)
class FunctionResponse:
    """A result."""

    path: str
    name: str
    call_id: str | None  # None if the client omits it
    text: str
    media: Sequence[Json]  # its chat parts


def read_response(value: Any, path: str) -> FunctionResponse:
    """Return a function response. Raises UnprocessableRequest."""
    an_object(value, path)
    if optional(a_flag, value, "willContinue", path):
        raise refusal(f"{path}.willContinue", "results in several parts are not supported")
    response = optional(an_object, value, "response", path)
    media = []
    for part, part_path in optional(objects, value, "parts", path) or ():
        inline = optional(inline_part, part, "inlineData", part_path)
        media.append(required(file_part, part, "fileData", part_path) if inline is None else inline)
    return FunctionResponse(
        path=path,
        name=required(a_text, value, "name", path),
        call_id=optional(a_text, value, "id", path) or None,
        text="" if response is None else _text(response, f"{path}.response"),
        media=media,
    )


def tool_messages(calls: Sequence[Json], responses: Sequence[FunctionResponse], path: str) -> list[Json]:
    """Return the tool messages of the calls, in the order of the calls, which templates without ids require.

    Their media are in a user message after them. Raises UnprocessableRequest unless each call has exactly one result.
    """
    if len(calls) != len(responses):
        raise refusal(
            path,
            f"the model's turn before has {len(calls)} function calls, and this turn {len(responses)} function responses",
        )
    results = _assigned(calls, responses)
    messages: list[Json] = [
        {"role": "tool", "tool_call_id": call["id"], "content": results[call["id"]].text} for call in calls
    ]
    media = [part for call in calls for part in results[call["id"]].media]
    return [*messages, {"role": "user", "content": media}] if media else messages


def _assigned(calls: Sequence[Json], responses: Sequence[FunctionResponse]) -> dict[str, FunctionResponse]:
    """Return the results by the ids of their calls. Results with the id of a call are assigned first."""
    left = {call["id"]: call["function"]["name"] for call in calls}
    results: dict[str, FunctionResponse] = {}
    unassigned: list[FunctionResponse] = []
    for response in responses:
        if response.call_id in results:
            raise refusal(f"{response.path}.id", f"{response.call_id[:64]!r} is the id of another function response")
        if response.call_id is None or response.call_id not in left:
            unassigned.append(response)
        elif left.pop(response.call_id) != response.name:
            raise refusal(f"{response.path}.name", f"is not the name of call {response.call_id[:64]!r}")
        else:
            results[response.call_id] = response
    waiting: dict[str, deque[str]] = {}
    for call_id, name in left.items():
        waiting.setdefault(name, deque()).append(call_id)
    for response in unassigned:
        results[_next(waiting.get(response.name), response)] = response
    return results


def _next(waiting: deque[str] | None, response: FunctionResponse) -> str:
    """Return the id of the call for a result that names no known call: the first of `waiting`, its function's open calls."""
    if not waiting:
        raise refusal(response.path, f"no call of {response.name[:64]!r} in the turn before is without a result")
    if response.call_id is not None and len(waiting) > 1:  # an id that belongs to none of them
        raise refusal(f"{response.path}.id", f"{response.call_id[:64]!r} is not the id of a call in the turn before")
    return waiting.popleft()


def _text(response: Json, path: str) -> str:
    """Return the text for the model: the value of `output` if it is the only field, as Google documents, else all as JSON."""
    value: Any = response["output"] if response.keys() == {"output"} else response
    if isinstance(value, str):
        return value
    return serialize(value, path)  # as arguments, which are written as Python's JSON


_AUDIO_FORMATS: Final = {"mpeg": "mp3", "mp3": "mp3", "x-wav": "wav", "wave": "wav", "wav": "wav"}
_GOOGLE: Final = ".googleapis.com"  # hosts the Files API; engines cannot read its files


def inline_part(value: Any, path: str) -> Json:
    """Return data in the request as a chat part; a text is a text part. Raises UnprocessableRequest for other types."""
    blob = an_object(value, path)
    kind, subtype = _mime_type(blob, path)
    # Google's Python SDK writes base64 with the alphabet for URLs, which data URLs and audio do not have.
    data = required(a_text, blob, "data", path).replace("-", "+").replace("_", "/")
    if kind == "text":
        text = decoded(data)
        if text is None:
            raise refusal(f"{path}.data", "must be UTF-8 in base64")
        return text_part(text)
    if kind == "audio":
        return {"type": "input_audio", "input_audio": {"data": data, "format": _AUDIO_FORMATS.get(subtype, subtype)}}
    return _by_url(kind, f"data:{kind}/{subtype};base64,{data}", path)


def file_part(value: Any, path: str) -> Json:
    """Return a file with a public URL as a chat part. Raises UnprocessableRequest for files that Google stores."""
    file = an_object(value, path)
    url = required(a_text, file, "fileUri", path)
    if not _is_public(url):
        raise refusal(f"{path}.fileUri", "must be a public URL; files that Google stores are not supported")
    return _by_url(_mime_type(file, path)[0], url, path)


def _is_public(url: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme in {"http", "https"} and not (parts.hostname or "").endswith(_GOOGLE)


def _mime_type(media: Json, path: str) -> tuple[str, str]:
    kind, _, subtype = required(a_text, media, "mimeType", path).partition(";")[0].strip().lower().partition("/")
    return kind, subtype


def _by_url(kind: str, url: str, path: str) -> Json:
    if kind not in {"image", "video", "audio"}:
        raise refusal(
            f"{path}.mimeType", "must be an image, a video, audio or a text with its data; send other media as text"
        )
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}
