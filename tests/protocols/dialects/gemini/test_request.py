"""A Gemini request, read as a chat call, and Google's schemas as JSON Schema."""

import copy

import orjson
import pytest
from hypothesis import given
from tests.support.gemini_responses import BODIES

from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects.base import TranslationOptions
from proxy.protocols.dialects.gemini import GEMINI
from proxy.protocols.dialects.gemini.request import an_integer, json_schema, one_of_names, shows_thoughts

CONTENTS = [{"role": "user", "parts": [{"text": "Hi"}]}]
MESSAGES = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def read(config=None, options=TranslationOptions(), **fields):  # noqa: B008 - frozen
    config = {} if config is None else {"generationConfig": config}
    chat = GEMINI.read({"model": "m", "contents": CONTENTS, **config, **fields}, options)
    assert chat.pop("model") == "m"
    return {name: value for name, value in chat.items() if name != "messages" or value != MESSAGES}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"temperature": 0.5, "topP": 0.9, "topK": 40.0}, {"temperature": 0.5, "top_p": 0.9, "top_k": 40}),
        ({"max_output_tokens": 9, "candidateCount": 2, "seed": 7}, {"max_tokens": 9, "n": 2, "seed": 7}),
        ({"presencePenalty": 1, "frequencyPenalty": -1}, {"presence_penalty": 1, "frequency_penalty": -1}),
        ({"stopSequences": ["END"]}, {"stop": ["END"]}),
        ({"stopSequences": [], "responseModalities": ["TEXT"], "speechConfig": {}, "mediaResolution": "X"}, {}),
        ({"responseLogprobs": True, "logprobs": 3}, {"logprobs": True, "top_logprobs": 3}),
        ({"responseLogprobs": True, "logprobs": 0}, {"logprobs": True}),
        ({"responseLogprobs": False}, {}),
        ({"responseMimeType": "text/plain"}, {}),
        ({"responseMimeType": "application/json"}, {"response_format": {"type": "json_object"}}),
    ],
)
def test_the_generation_config_becomes_sampling_fields(config, expected):
    assert read(config) == expected


@pytest.mark.parametrize("field", ["responseSchema", "responseJsonSchema", "response_schema"])
def test_a_schema_becomes_the_response_format(field):
    """Google's types are uppercase in one of the fields."""
    schema = SCHEMA if "Json" in field else {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}}

    chat = read({"responseMimeType": "application/json", field: schema})

    json_schema = {"name": "response", "schema": SCHEMA, "strict": True}
    assert chat == {"response_format": {"type": "json_schema", "json_schema": json_schema}}


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        ({}, {}),
        ({"includeThoughts": True}, {}),
        ({"thinkingBudget": -1}, {"chat_template_kwargs": {"enable_thinking": True}}),
        ({"thinking_budget": 1024}, {"chat_template_kwargs": {"enable_thinking": True}}),
        ({"thinkingBudget": 0}, {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": False}}),
        ({"thinkingLevel": "low"}, {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": True}}),
        ({"thinkingLevel": "THINKING_LEVEL_UNSPECIFIED"}, {}),
    ],
)
def test_the_thinking_config_sets_the_configured_fields(thinking, expected):
    """A level is the effort; a budget of 0 disables reasoning; the client's own fields override them."""
    fields = {
        name: {"chat_template_kwargs": {"enable_thinking": name == "thinking"}} for name in ("thinking", "not_thinking")
    }
    options = TranslationOptions(**fields)

    assert read({"thinkingConfig": thinking}, options) == expected
    own = read({"thinkingConfig": thinking}, options, chat_template_kwargs={"enable_thinking": 1, "x": 2})
    assert own["chat_template_kwargs"] == {"enable_thinking": 1, "x": 2}
    assert read({"thinkingConfig": thinking}, TranslationOptions(thinking={"min_p": 2}), min_p=1)["min_p"] == 1


def test_a_stream_requests_usage_and_a_call_without_a_model_has_none():
    assert read(stream=True, alt="sse") == {"stream": True, "stream_options": {"include_usage": True}}
    assert GEMINI.read({"model": "", "contents": CONTENTS}, TranslationOptions()) == {"messages": MESSAGES}


def test_fields_of_engines_are_forwarded_and_googles_others_are_not():
    """`extra_body` of the SDKs adds fields to the body."""
    fields = {"safetySettings": [], "labels": {}, "serviceTier": "flex", "store": True, "unknown": 1}

    assert read(min_p=0.1, stop_token_ids=[1], bad_words=None, **fields) == {"min_p": 0.1, "stop_token_ids": [1]}


def test_the_model_continues_a_last_content_of_its_own():
    """An empty one is removed."""
    chat = read(contents=[*CONTENTS, {"role": "model", "parts": [{"text": "It"}]}])
    thought = read(contents=[*CONTENTS, {"role": "model", "parts": [{"text": "Hm", "thought": True}]}])

    for continued in (chat, thought):
        assert (continued["continue_final_message"], continued["add_generation_prompt"]) == (True, False)
    assert read(contents=[*CONTENTS, {"role": "model", "parts": [{"text": ""}]}]) == {}


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ({"generationConfig": {"thinkingConfig": {"includeThoughts": True}}}, True),
        ({"generation_config": {"thinking_config": {"include_thoughts": True}}}, True),
        ({"generationConfig": {"thinkingConfig": {"includeThoughts": False}}}, False),
        ({}, False),
    ],
)
def test_thoughts_are_shown_if_they_are_requested(body, shown):
    assert shown is shows_thoughts(body)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"generationConfig": 1}, "generationConfig: must be an object"),
        ({"config": {"temperature": "x"}}, "generationConfig.temperature: must be a number"),
        ({"config": {"topK": 1.5}}, "generationConfig.topK: must be an integer"),
        ({"config": {"stopSequences": "x"}}, "generationConfig.stopSequences: must be a list"),
        (
            {"config": {"responseModalities": ["IMAGE"]}},
            "generationConfig.responseModalities: must be TEXT, not 'IMAGE'",
        ),
        ({"config": {"logprobs": 1}}, "generationConfig.logprobs: requires responseLogprobs"),
        ({"config": {"responseMimeType": "text/x.enum"}}, "must be text/plain or application/json, not 'text/x.enum'"),
        ({"config": {"responseSchema": SCHEMA}}, "responseMimeType: must be application/json, not 'text/plain'"),
        (
            {
                "config": {
                    "responseMimeType": "application/json",
                    "responseSchema": SCHEMA,
                    "responseJsonSchema": SCHEMA,
                }
            },
            "responseJsonSchema: must not be present together with responseSchema",
        ),
        (
            {"config": {"responseMimeType": "application/json", "responseJsonSchema": 1}},
            "responseJsonSchema: must be an object",
        ),
        ({"config": {"responseFormat": []}}, "generationConfig.responseFormat: is not supported"),
        ({"config": {"thinkingConfig": {"thinkingLevel": "MUCH"}}}, "thinkingLevel: must be one of"),
        ({"config": {"thinkingConfig": {"includeThoughts": 1}}}, "includeThoughts: must be true or false"),
        (
            {"config": {"thinkingConfig": {"thinkingLevel": "LOW", "thinkingBudget": 1}}},
            "thinkingLevel: must not be present together with thinkingBudget",
        ),
        ({"cachedContent": "cachedContents/a"}, "cachedContent: contents are not stored"),
        ({"continuation_token": "x"}, "continuationToken: responses are not continued by a token"),
        ({"contents": [{"role": "model", "parts": [{"text": ""}]}]}, "contents: at least one content must have text"),
    ],
)
def test_what_chat_cannot_represent_is_rejected_by_its_field(fields, message):
    with pytest.raises(UnprocessableRequest, match=message):
        read(**fields)


@given(BODIES)
def test_any_body_is_read_or_rejected_by_its_field(body):
    """A valid body can be sent to an engine; the client's body is unchanged."""
    before = copy.deepcopy(body)
    GEMINI.references(body)
    try:
        orjson.dumps(GEMINI.read(body, TranslationOptions()))
    except UnprocessableRequest as refused:
        assert refused.message.startswith(f"{refused.param}: ")
    assert repr(before) == repr(body)


def test_an_integer_may_be_a_float_without_a_fraction():
    """The SDKs send `topK: 40.0`; one beyond 64 bits could not be sent to an engine."""
    assert (an_integer(40.0, "a"), type(an_integer(40.0, "a"))) == (40, int)
    for value in (1.5, True, "1", float("inf"), 1e300, -(2.0**63)):
        with pytest.raises(UnprocessableRequest, match="a: must be an integer"):
            an_integer(value, "a")


def test_an_enum_has_any_case():
    assert one_of_names("any", "m", {"ANY": 1, "NONE": 2}) == one_of_names("ANY", "m", {"ANY": 1}) == 1
    with pytest.raises(UnprocessableRequest, match="m: must be one of ANY, NONE, not 'SOME'"):
        one_of_names("some", "m", {"ANY": 1, "NONE": 2})


def test_a_schema_of_googles_reference_becomes_json_schema():
    """Types in lower case, null as a type, numbers for counts, no format of enums, in the order of `propertyOrdering`."""
    schema = {
        "type": "OBJECT",
        "description": "A recipe.",
        "properties": {
            "steps": {"type": "ARRAY", "items": {"type": "STRING"}, "minItems": "1", "max_items": 9},
            "name": {"type": "STRING", "nullable": True, "example": "Soup"},
            "size": {"type": "STRING", "format": "enum", "enum": ["S", "L"], "nullable": True},
        },
        "required": ["name"],
        "propertyOrdering": ["name", "steps", "unknown"],
    }

    converted = json_schema(schema, "p")

    assert converted == {
        "type": "object",
        "description": "A recipe.",
        "properties": {
            "name": {"type": ["string", "null"], "examples": ["Soup"]},
            "steps": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 9},
            "size": {"type": ["string", "null"], "enum": ["S", "L", None]},
        },
        "required": ["name"],
    }
    assert list(converted["properties"]) == ["name", "steps", "size"]


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "TYPE_UNSPECIFIED"}, {}),
        ({"type": ["STRING", "NULL"]}, {"type": ["string", "null"]}),
        ({"anyOf": [{"type": "STRING"}], "nullable": True}, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        ({"any_of": [{"type": "NULL"}], "nullable": True}, {"anyOf": [{"type": "null"}]}),
        ({"type": "STRING", "nullable": False, "title": None}, {"type": "string"}),
        ({"type": "object", "propertyOrdering": ["a"]}, {"type": "object"}),
        (
            {"ref": "#/$defs/A", "defs": {"A": {"type": "INTEGER"}}},
            {"$ref": "#/$defs/A", "$defs": {"A": {"type": "integer"}}},
        ),
        ({"$ref": "#/$defs/A", "const": 1}, {"$ref": "#/$defs/A", "const": 1}),
        ({"additionalProperties": False}, {"additionalProperties": False}),
        ({"additional_properties": {"type": "NUMBER"}}, {"additionalProperties": {"type": "number"}}),
        ({"properties": {"min_items": {"type": "STRING"}}}, {"properties": {"min_items": {"type": "string"}}}),
    ],
)
def test_other_fields_and_spellings(schema, expected):
    """Names of properties are never changed."""
    assert json_schema(schema, "p") == expected


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ([], "p: must be an object"),
        ({"type": 1}, "p.type: must be a string"),
        ({"items": {"type": 1}}, "p.items.type: must be a string"),
        ({"properties": {"a": 1}}, "p.properties.a: must be an object"),
        ({"anyOf": [1]}, r"p.anyOf\[0\]: must be an object"),
        ({"minItems": "x"}, "p.minItems: must be an integer"),
        ({"nullable": 1}, "p.nullable: must be true or false"),
        ({"properties": {}, "propertyOrdering": [1]}, r"p.propertyOrdering\[0\]: must be a string"),
    ],
)
def test_an_invalid_schema_is_rejected_by_its_field(schema, message):
    with pytest.raises(UnprocessableRequest, match=message):
        json_schema(schema, "p")
