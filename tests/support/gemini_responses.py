"""Gemini responses and requests for tests: streams as clients read them, parts that are sent back, and bodies of any shape."""

import orjson
from google.genai import types
from hypothesis import strategies as st
from tests.support.json_bodies import JSON


def events_of(stream: bytes) -> list[dict]:
    """Return the responses of a stream of events; each event is framed as Google's API does it."""
    *blocks, rest = stream.split(b"\r\n\r\n")
    assert rest == b""
    assert all(block.startswith(b"data: ") for block in blocks)
    return [orjson.loads(block.removeprefix(b"data: ")) for block in blocks]


def chunks_in(stream: bytes, *, is_array: bool = False) -> list[dict]:
    """Return the responses of a stream; those without an error conform to the SDK's model."""
    responses = orjson.loads(stream) if is_array else events_of(stream)
    for response in responses:
        if "error" not in response:
            strictly(response)
    return responses


def strictly(response: dict) -> types.GenerateContentResponse:
    """Return a response as the SDK's model, which has all of its fields."""
    read = types.GenerateContentResponse.model_validate(response)
    known = read.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert known.keys() == response.keys()
    for ours, theirs in zip(response["candidates"], known["candidates"], strict=True):
        assert ours.keys() == theirs.keys()
    return read


def joined(responses: list[dict]) -> dict[int, list[dict]]:
    """Return the parts of each candidate in all chunks, with adjacent texts of a kind joined."""
    found: dict[int, list[dict]] = {}
    for response in responses:
        for candidate in response["candidates"]:
            parts = found.setdefault(candidate["index"], [])
            for part in candidate["content"]["parts"]:
                last = parts[-1] if parts else {}
                if "text" in last and "text" in part and last.get("thought") == part.get("thought"):
                    parts[-1] = {**last, **part, "text": last["text"] + part["text"]}
                else:
                    parts.append(part)
    return found


def sent_back(responses: list[dict], *, after: str = "go on") -> list[dict]:
    """Return the contents that official SDKs send after a stream: a content for each chunk, and the results of its calls."""
    contents = [response["candidates"][0]["content"] for response in responses]
    calls = [part["functionCall"] for content in contents for part in content["parts"] if "functionCall" in part]
    results = [{"functionResponse": {"name": call["name"], "response": {"output": "r"}}} for call in calls]
    user = {"role": "user", "parts": [{"text": "hi"}]}
    return [user, *contents, {"role": "user", "parts": results or [{"text": after}]}]


# --- bodies with valid and other values ------------------------------------------------------------------------------

TEXT = st.text(max_size=3)
CALL = st.fixed_dictionaries({"name": TEXT | JSON}, optional={"id": TEXT | JSON, "args": JSON})
RESULT = st.fixed_dictionaries(
    {"name": TEXT | JSON}, optional={"id": TEXT | JSON, "response": JSON, "parts": JSON, "willContinue": JSON}
)
MEDIA = st.fixed_dictionaries(
    {"mimeType": st.sampled_from(["image/png", "audio/mpeg", "text/plain", "application/pdf"]) | JSON},
    optional={"data": JSON, "fileUri": JSON},
)
PART = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXT | JSON, "thought": st.booleans() | JSON, "thoughtSignature": TEXT | JSON, "functionCall": CALL | JSON,
        "function_response": RESULT | JSON, "inlineData": MEDIA | JSON, "file_data": MEDIA | JSON, "executableCode": JSON,
    },
)  # fmt: skip
CONTENT = st.fixed_dictionaries(
    {"parts": st.lists(PART, max_size=3) | PART | JSON}, optional={"role": st.sampled_from(["user", "model"]) | JSON}
)
SCHEMA = st.recursive(
    st.fixed_dictionaries({"type": st.sampled_from(["STRING", "object"]) | JSON}),
    lambda inner: st.fixed_dictionaries(
        {"type": st.just("OBJECT")},
        optional={
            "properties": st.dictionaries(TEXT, inner, max_size=2), "items": inner, "nullable": JSON, "enum": JSON,
            "anyOf": st.lists(inner, max_size=2), "minItems": JSON, "propertyOrdering": JSON, "example": JSON,
            "additionalProperties": inner | JSON,
        },
    ),
    max_leaves=3,
)  # fmt: skip
DECLARATION = st.fixed_dictionaries(
    {"name": TEXT | JSON}, optional={"parameters": SCHEMA | JSON, "parametersJsonSchema": JSON, "description": JSON}
)
TOOL = st.fixed_dictionaries(
    {}, optional={"functionDeclarations": st.lists(DECLARATION, max_size=2) | JSON, "googleSearch": JSON}
)
MODE = st.sampled_from(["AUTO", "ANY", "NONE", "VALIDATED"]) | JSON
CONFIG = st.fixed_dictionaries(
    {},
    optional={
        "temperature": JSON, "topK": JSON, "maxOutputTokens": JSON, "stopSequences": st.lists(JSON, max_size=2) | JSON,
        "seed": JSON, "candidateCount": JSON, "responseLogprobs": JSON, "logprobs": JSON, "responseModalities": JSON,
        "responseMimeType": st.just("application/json") | JSON, "responseSchema": SCHEMA | JSON, "responseJsonSchema": JSON,
        "thinkingConfig": st.fixed_dictionaries({}, optional={"thinkingBudget": JSON, "thinkingLevel": JSON}) | JSON,
    },
)  # fmt: skip
BODIES = st.fixed_dictionaries(
    {"contents": st.lists(CONTENT, max_size=3) | CONTENT | JSON},
    optional={
        "systemInstruction": CONTENT | JSON, "tools": st.lists(TOOL, max_size=2) | JSON, "generation_config": CONFIG | JSON,
        "toolConfig": st.fixed_dictionaries({"functionCallingConfig": st.fixed_dictionaries({"mode": MODE})}) | JSON,
        "cachedContent": JSON, "safetySettings": JSON, "chat_template_kwargs": JSON,
    },
)  # fmt: skip
