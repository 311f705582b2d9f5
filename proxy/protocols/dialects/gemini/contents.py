"""Translation of `systemInstruction` and `contents` to chat messages.

Adjacent contents of the model are one message: official SDKs keep each chunk of a stream as a content of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from proxy.protocols.dialects.gemini.fields import at, objects, optional, required, snake_case
from proxy.protocols.dialects.gemini.function_responses import read_response, tool_messages
from proxy.protocols.dialects.gemini.media import file_part, inline_part
from proxy.protocols.dialects.gemini.signatures import NONE, read_signature
from proxy.protocols.dialects.tool_arguments import SampledCalls
from proxy.protocols.dialects.translation import Json
from proxy.protocols.dialects.validation import a_flag, a_text, an_object, refusal

_ROLES: Final = {None: "user", "user": "user", "function": "user", "model": "model"}
_KINDS: Final = (
    "text", "inlineData", "fileData", "functionCall", "functionResponse", "executableCode", "codeExecutionResult", "toolCall",
    "toolResponse",
)  # fmt: skip
_KIND_OF: Final = {spelled: kind for kind in _KINDS for spelled in (kind, snake_case(kind))}

Parts = list[tuple[Json, str]]
Content = tuple[str, Parts, str]  # role, parts with their paths, path


def system_message(body: Mapping[str, Any]) -> list[Json]:
    """Return the system message, if there is one; its texts are separate lines, as vLLM 0.32 joins parts of a content."""
    value = optional(an_object, body, "systemInstruction")
    if value is None:
        return []
    texts = [required(a_text, part, "text", path) for part, path in _parts(value, "systemInstruction")]
    text = "\n".join(text for text in texts if text)
    return [{"role": "system", "content": text}] if text else []


def read_contents(body: Mapping[str, Any], thought: str, sampled: Mapping[str, Json]) -> list[Json]:
    """Return the chat messages of the contents. `sampled` are earlier calls by id. Raises UnprocessableRequest."""
    contents = [_content(value, path) for value, path in optional(objects, body, "contents") or ()]
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


def _content(value: Json, path: str) -> Content:
    role, role_path = at(value, "role", path)
    if role is not None and a_text(role, role_path) not in _ROLES:
        raise refusal(role_path, f"must be user or model, not {role[:64]!r}")
    return _ROLES[role or None], _parts(value, path), path


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
                responses.append(
                    read_response(required(an_object, part, "functionResponse", path), f"{path}.functionResponse")
                )
            else:
                chat_parts.append(_user_part(part, path))
        if chat_parts:
            messages.append({"role": "user", "content": _chat_content(chat_parts)})
    if not calls and not responses:
        return messages
    return [*tool_messages(calls, responses, turn[0][2]), *messages]


def _chat_content(parts: list[Json]) -> str | list[Json]:
    """Return chat content: without empty texts, and a single text as a string."""
    left = [part for part in parts if part.get("text") != ""] or parts[:1]
    text: str | list[Json] = left[0]["text"] if len(left) == 1 and left[0]["type"] == "text" else left
    return text


def _user_part(part: Json, path: str) -> Json:
    kind = kind_of(part, path)
    if kind == "text" and not optional(a_flag, part, "thought", path):
        return {"type": "text", "text": required(a_text, part, "text", path)}
    if kind == "inlineData":
        return inline_part(required(an_object, part, kind, path), f"{path}.{kind}")
    if kind == "fileData":
        return file_part(required(an_object, part, kind, path), f"{path}.{kind}")
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
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
