"""Contents and the system instruction as chat messages."""

import pytest

from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects.gemini.contents import (
    call_ids_from,
    kind_of,
    objects,
    read_contents,
    sign,
    system_message,
)

USER = {"role": "user", "parts": [{"text": "Hi"}]}
CALL = {"functionCall": {"id": "c1", "name": "f", "args": {"a": 1}}}
RESULT = {"functionResponse": {"id": "c1", "name": "f", "response": {"output": "r"}}}


def model(*parts):
    return {"role": "model", "parts": list(parts)}


def user(*parts):
    return {"role": "user", "parts": list(parts)}


def read(*contents, sampled=None):
    return read_contents({"contents": list(contents)}, "reasoning", sampled or {})


def called(call_id="c1", arguments='{"a": 1}', name="f"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_conversation_of_googles_reference():
    """Written by hand from https://ai.google.dev/gemini-api/docs/function-calling, with one call and its result."""
    contents = [
        {"role": "user", "parts": [{"text": "Turn the lights down."}]},
        {"role": "model", "parts": [{"functionCall": {"name": "set_light", "args": {"level": 25, "color": "warm"}}}]},
        {"role": "user", "parts": [{"functionResponse": {"name": "set_light", "response": {"result": {"level": 25}}}}]},
        {"role": "model", "parts": [{"text": "Done."}]},
        {"role": "user", "parts": [{"text": "Thanks."}]},
    ]

    assert [
        {"role": "user", "content": "Turn the lights down."},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [called("call_1_0", '{"level": 25, "color": "warm"}', "set_light")],
        },
        {"role": "tool", "tool_call_id": "call_1_0", "content": '{"result": {"level": 25}}'},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "Thanks."},
    ] == read(*contents)


def test_an_object_is_a_list_of_one_and_a_role_may_be_absent():
    """As in Google's examples with curl. `function` is the role of results in its older SDKs."""
    assert [{"role": "user", "content": "Hi"}] == read_contents(
        {"contents": {"parts": {"text": "Hi"}}}, "reasoning", {}
    )
    assert "tool" == read(USER, model(CALL), {"role": "function", "parts": [RESULT]})[-1]["role"]
    assert [] == system_message({})
    assert [{"role": "system", "content": "a\nb"}] == system_message(
        {"system_instruction": {"parts": [{"text": "a"}, {"text": ""}, {"text": "b"}]}}
    )
    assert [] == system_message({"systemInstruction": {"parts": [{"text": ""}]}})


def test_adjacent_contents_of_the_model_are_one_message():
    """Official SDKs keep each chunk of a stream: pieces of thoughts, of a text, then calls."""
    chunks = [
        model({"text": "H", "thought": True}),
        model({"text": "m.", "thought": True}),
        model({"text": "I", "thoughtSignature": sign(thoughts="Hm.")}),
        model({"text": " look."}),
        model(CALL, {"functionCall": {"id": "c2", "name": "f"}}),
    ]

    message = read(USER, *chunks, user(RESULT, {"functionResponse": {"id": "c2", "name": "f"}}))[1]

    assert {
        "role": "assistant",
        "content": "I look.",
        "reasoning": "Hm.",
        "tool_calls": [called(), called("c2", "{}")],
    } == message


def test_thoughts_that_the_client_does_not_send_back_are_read_from_the_signature():
    """The last signature has all of them; thoughts in the contents override it."""
    signed = {"text": "x", "thoughtSignature": sign(thoughts="Hm")}
    later = {"text": "", "thoughtSignature": sign(thoughts="Hm, so.")}

    assert "Hm" == read(USER, model(signed), USER)[1]["reasoning"]
    assert "Hm, so." == read(USER, model(signed, later), USER)[1]["reasoning"]
    assert "own" == read(USER, model({"text": "own", "thought": True}, signed), USER)[1]["reasoning"]
    assert "reasoning" not in read(USER, model({"text": "x", "thoughtSignature": "foreign"}), USER)[1]


def test_a_part_with_only_a_signature_adds_nothing():
    """Google's last chunk may have one."""
    only = {"thoughtSignature": sign(thoughts="Hm")}

    assert {"role": "assistant", "content": "x", "reasoning": "Hm"} == read(USER, model({"text": "x"}, only), USER)[1]
    assert {"role": "assistant", "content": None, "reasoning": "Hm"} == read(USER, model(only), USER)[1]
    assert {"role": "assistant", "content": ""} == read(USER, model({"text": ""}), USER)[1]


def test_the_sampled_text_of_arguments_is_restored():
    """The call's id finds the text, or the id in its signature if the client omits ids; only an equal value is restored."""
    sampled = {"c1": {"name": "f", "arguments": '{"a":1}'}}
    unnamed = {"functionCall": {"name": "f", "args": {"a": 1.0}}, "thoughtSignature": sign(call_id="c1")}
    result = {"functionResponse": {"name": "f", "response": {}}}

    for part in (CALL, unnamed):
        assert [called(arguments='{"a":1}')] == read(USER, model(part), user(result), sampled=sampled)[1]["tool_calls"]
        assert ["c1"] == call_ids_from({"contents": [USER, model(part)]})
    edited = {"functionCall": {"id": "c1", "name": "f", "args": {"a": 2}}}
    assert [called(arguments='{"a": 2}')] == read(USER, model(edited), user(RESULT), sampled=sampled)[1]["tool_calls"]


def test_results_come_before_the_other_parts_of_the_user():
    """Also if they are in the next content of the user; each content is a message."""
    contents = [USER, model(CALL), user({"text": "one"}, {"text": ""}), user({"text": "two"}, RESULT)]

    assert [("tool", "r"), ("user", "one"), ("user", "two")] == [
        (message["role"], message["content"]) for message in read(*contents)[2:]
    ]


def test_several_parts_of_the_user_are_parts_of_a_chat_message():
    """Without empty texts, unless there is nothing else."""
    image = {"inlineData": {"mimeType": "image/png", "data": "aaaa"}}
    file = {"fileData": {"mimeType": "image/png", "fileUri": "https://a.b/c"}}

    (message,) = read(user({"text": "a"}, {"text": ""}, image, file, {"text": "b"}))

    assert ["text", "image_url", "image_url", "text"] == [part["type"] for part in message["content"]]
    assert [{"role": "user", "content": ""}] == read(user({"text": ""}, {"text": ""}))
    assert "list" == type(read(user(image))[0]["content"]).__name__


def test_an_invalid_body_references_no_calls():
    """It is not validated yet."""
    odd = [1, {}, {"parts": 1}, {"parts": [1, {}, {"functionCall": 1}, {"functionCall": {"id": 1}}]}]

    assert [] == call_ids_from({}) == call_ids_from({"contents": 1}) == call_ids_from({"contents": odd})
    assert ["a"] == call_ids_from({"contents": {"parts": {"function_call": {"id": "a"}}}})
    assert [] == call_ids_from({"contents": {"parts": {"functionCall": {"name": "f"}, "thoughtSignature": 1}}})


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ([], "contents: must have at least one content"),
        ([1], r"contents\[0\]: must be an object"),
        ([{"role": "user"}], r"contents\[0\].parts: must be a list, not null"),
        ([user()], r"contents\[0\].parts: must have at least one part"),
        ([{**USER, "role": "system"}], r"contents\[0\].role: must be user or model, not 'system'"),
        ([{**USER, "role": 1}], r"contents\[0\].role: must be a string"),
        ([user({})], r"contents\[0\].parts\[0\]: a part without data cannot be translated"),
        ([user({"unknown": 1})], r"contents\[0\].parts\[0\]: a part without data cannot be translated"),
        ([user({"text": 1})], r"contents\[0\].parts\[0\].text: must be a string"),
        ([user({"text": "a", "thought": True})], "a thought cannot be translated"),
        ([user({"text": "a", "functionCall": {}})], "must have one kind of data, not text and functionCall"),
        ([user(CALL)], "functionCall cannot be translated to chat in a content of the user"),
        ([user({"executable_code": {}})], "executableCode cannot be translated"),
        ([USER, model({})], r"contents\[1\].parts\[0\]: a part without data cannot be translated"),
        ([USER, model(RESULT)], "functionResponse cannot be translated to chat in a content of the model"),
        ([USER, model({"text": "a", "thought": 1})], "thought: must be true or false"),
        ([USER, model({"functionCall": {}})], "functionCall.name: must be a string"),
        ([USER, model({"functionCall": {"name": "f", "args": 1}})], "functionCall.args: must be an object"),
        ([USER, model(CALL, CALL), user(RESULT)], "functionCall.id: 'c1' is the id of another call of this turn"),
        ([USER, model(CALL)], r"contents\[1\]: calls functions; add their functionResponse parts"),
        ([USER, model(CALL), USER], r"contents\[2\]: the model's turn before has 1 function calls"),
        ([user(RESULT)], r"contents\[0\]: the model's turn before has 0 function calls"),
        (
            [USER, model(CALL), user(RESULT), user(RESULT)],
            r"contents\[2\]: .* 1 function calls, and this turn 2 function",
        ),
    ],
)
def test_invalid_contents_are_rejected_by_their_path(contents, message):
    with pytest.raises(UnprocessableRequest, match=message):
        read(*contents)


def test_a_system_instruction_has_only_texts():
    with pytest.raises(UnprocessableRequest, match="systemInstruction: must be an object"):
        system_message({"systemInstruction": "Be brief."})
    with pytest.raises(UnprocessableRequest, match=r"systemInstruction.parts\[0\].text: must be a string"):
        system_message({"systemInstruction": {"parts": [{"inlineData": {}}]}})


def test_the_data_of_a_part_determines_its_kind():
    assert "text" == kind_of({"text": "", "inline_data": None, "videoMetadata": {}}, "p")
    assert kind_of({"thoughtSignature": "x"}, "p") is None


def test_an_object_may_be_in_place_of_a_list():
    """Google's examples with curl have `"parts": {"text": …}`."""
    assert [({"a": 1}, "p[0]")] == objects({"a": 1}, "p") == objects([{"a": 1}], "p")
    with pytest.raises(UnprocessableRequest, match=r"p\[1\]: must be an object"):
        objects([{}, 1], "p")
