"""Contents and the system instruction as chat messages: media, results of calls, and thought signatures."""

from base64 import b64decode, b64encode, urlsafe_b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects.gemini.contents import (
    NONE,
    Signature,
    call_ids_from,
    file_part,
    inline_part,
    kind_of,
    objects,
    read_contents,
    read_response,
    read_signature,
    sign,
    system_message,
    tool_messages,
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
    assert read_contents({"contents": {"parts": {"text": "Hi"}}}, "reasoning", {}) == [
        {"role": "user", "content": "Hi"}
    ]
    assert read(USER, model(CALL), {"role": "function", "parts": [RESULT]})[-1]["role"] == "tool"
    assert system_message({}) == []
    assert system_message({"system_instruction": {"parts": [{"text": "a"}, {"text": ""}, {"text": "b"}]}}) == [
        {"role": "system", "content": "a\nb"}
    ]
    assert system_message({"systemInstruction": {"parts": [{"text": ""}]}}) == []


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

    assert read(USER, model(signed), USER)[1]["reasoning"] == "Hm"
    assert read(USER, model(signed, later), USER)[1]["reasoning"] == "Hm, so."
    assert read(USER, model({"text": "own", "thought": True}, signed), USER)[1]["reasoning"] == "own"
    assert "reasoning" not in read(USER, model({"text": "x", "thoughtSignature": "foreign"}), USER)[1]


def test_a_part_with_only_a_signature_adds_nothing():
    """Google's last chunk may have one."""
    only = {"thoughtSignature": sign(thoughts="Hm")}

    assert read(USER, model({"text": "x"}, only), USER)[1] == {"role": "assistant", "content": "x", "reasoning": "Hm"}
    assert read(USER, model(only), USER)[1] == {"role": "assistant", "content": None, "reasoning": "Hm"}
    assert read(USER, model({"text": ""}), USER)[1] == {"role": "assistant", "content": ""}


def test_the_sampled_text_of_arguments_is_restored():
    """The call's id finds the text, or the id in its signature if the client omits ids; only an equal value is restored."""
    sampled = {"c1": {"name": "f", "arguments": '{"a":1}'}}
    unnamed = {"functionCall": {"name": "f", "args": {"a": 1.0}}, "thoughtSignature": sign(call_id="c1")}
    result = {"functionResponse": {"name": "f", "response": {}}}

    for part in (CALL, unnamed):
        assert [called(arguments='{"a":1}')] == read(USER, model(part), user(result), sampled=sampled)[1]["tool_calls"]
        assert call_ids_from({"contents": [USER, model(part)]}) == ["c1"]
    edited = {"functionCall": {"id": "c1", "name": "f", "args": {"a": 2}}}
    assert [called(arguments='{"a": 2}')] == read(USER, model(edited), user(RESULT), sampled=sampled)[1]["tool_calls"]


def test_results_come_before_the_other_parts_of_the_user():
    """Also if they are in the next content of the user; each content is a message."""
    contents = [USER, model(CALL), user({"text": "one"}, {"text": ""}), user({"text": "two"}, RESULT)]

    assert [(message["role"], message["content"]) for message in read(*contents)[2:]] == [
        ("tool", "r"),
        ("user", "one"),
        ("user", "two"),
    ]


def test_several_parts_of_the_user_are_parts_of_a_chat_message():
    """Without empty texts, unless there is nothing else."""
    image = {"inlineData": {"mimeType": "image/png", "data": "aaaa"}}
    file = {"fileData": {"mimeType": "image/png", "fileUri": "https://a.b/c"}}

    (message,) = read(user({"text": "a"}, {"text": ""}, image, file, {"text": "b"}))

    assert [part["type"] for part in message["content"]] == ["text", "image_url", "image_url", "text"]
    assert read(user({"text": ""}, {"text": ""})) == [{"role": "user", "content": ""}]
    assert type(read(user(image))[0]["content"]).__name__ == "list"


def test_an_invalid_body_references_no_calls():
    """It is not validated yet."""
    odd = [1, {}, {"parts": 1}, {"parts": [1, {}, {"functionCall": 1}, {"functionCall": {"id": 1}}]}]

    assert call_ids_from({}) == call_ids_from({"contents": 1}) == call_ids_from({"contents": odd}) == []
    assert call_ids_from({"contents": {"parts": {"function_call": {"id": "a"}}}}) == ["a"]
    assert call_ids_from({"contents": {"parts": {"functionCall": {"name": "f"}, "thoughtSignature": 1}}}) == []


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
    assert kind_of({"text": "", "inline_data": None, "videoMetadata": {}}, "p") == "text"
    assert kind_of({"thoughtSignature": "x"}, "p") is None


def test_an_object_may_be_in_place_of_a_list():
    """Google's examples with curl have `"parts": {"text": …}`."""
    assert objects({"a": 1}, "p") == objects([{"a": 1}], "p") == [({"a": 1}, "p[0]")]
    with pytest.raises(UnprocessableRequest, match=r"p\[1\]: must be an object"):
        objects([{}, 1], "p")


@pytest.mark.parametrize(
    ("kind", "data", "expected"),
    [
        ("image/png", "a-_9", {"type": "image_url", "image_url": {"url": "data:image/png;base64,a+/9"}}),
        ("IMAGE/JPEG; q=1", "aaaa", {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,aaaa"}}),
        ("video/mp4", "aaaa", {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,aaaa"}}),
        ("audio/mpeg", "aaaa", {"type": "input_audio", "input_audio": {"data": "aaaa", "format": "mp3"}}),
        ("audio/flac", "aaaa", {"type": "input_audio", "input_audio": {"data": "aaaa", "format": "flac"}}),
        ("text/csv", b64encode("é,1".encode()).decode(), {"type": "text", "text": "é,1"}),
    ],
)
def test_data_becomes_a_part_of_its_kind(kind, data, expected):
    """The SDK for Python encodes it with the alphabet for URLs."""
    assert inline_part({"mimeType": kind, "data": data}, "p") == expected
    assert inline_part({"mime_type": kind, "data": data}, "p") == expected


def test_a_public_file_is_a_url():
    url = "https://example.org/a.png"

    assert file_part({"fileUri": url, "mimeType": "image/png"}, "p") == {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize(
    ("read", "media", "message"),
    [
        (inline_part, {"mimeType": "application/pdf", "data": ""}, "p.mimeType: must be an image"),
        (inline_part, {"data": ""}, "p.mimeType: must be a string"),
        (inline_part, {"mimeType": "image/png"}, "p.data: must be a string"),
        (inline_part, {"mimeType": "text/plain", "data": "/w=="}, "p.data: must be UTF-8 in base64"),
        (inline_part, {"mimeType": "text/plain", "data": "?"}, "p.data: must be UTF-8 in base64"),
        (file_part, {"mimeType": "text/html", "fileUri": "https://a.b/c"}, "p.mimeType: must be an image"),
        (file_part, {"mimeType": "image/png", "fileUri": "gs://a/b"}, "p.fileUri: must be a public URL"),
        (
            file_part,
            {"mimeType": "image/png", "fileUri": "https://generativelanguage.googleapis.com/v1beta/files/a"},
            "p.fileUri: must be a public URL",
        ),
        (file_part, {"mimeType": "image/png", "fileUri": "https://[a"}, "p.fileUri: must be a public URL"),
    ],
)
def test_other_media_are_rejected(read, media, message):
    """Engines read no PDF, and files of Google's cannot be fetched."""
    with pytest.raises(UnprocessableRequest, match=message):
        read(media, "p")


def call(call_id, name="f"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}


def result(name="f", call_id=None, **response):
    fields = {"name": name, "response": response}
    return read_response(fields if call_id is None else {**fields, "id": call_id}, "r")


def texts(calls, results):
    return [(one["tool_call_id"], one["content"]) for one in tool_messages(calls, results, "contents[2]")]


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ({"output": "sunny"}, "sunny"),
        ({"output": {"a": [1]}}, '{"a": [1]}'),
        ({"result": "sunny"}, '{"result": "sunny"}'),
        ({"error": "é"}, '{"error": "é"}'),
        ({"output": "x", "exit": 1}, '{"output": "x", "exit": 1}'),
        ({}, "{}"),
        (None, ""),
    ],
)
def test_the_text_of_a_result_is_its_output_or_its_json(response, text):
    """Google documents `output` as the field of the output."""
    assert read_response({"name": "f", "response": response}, "r").text == text


def test_results_without_ids_belong_to_the_calls_of_their_function_in_order():
    """In the order of the calls, which templates without ids require."""
    calls = [call("a", "f"), call("b", "g"), call("c", "f")]

    assert texts(calls, [result("g", output="2"), result("f", output="1"), result("f", output="3")]) == [
        ("a", "1"),
        ("b", "2"),
        ("c", "3"),
    ]


def test_results_with_ids_are_assigned_first():
    """What remains of a function belongs to the results without an id."""
    calls = [call("a"), call("b"), call("c")]

    assert texts(calls, [result(output="2"), result(call_id="b", output="1"), result(output="3")]) == [
        ("a", "2"),
        ("b", "1"),
        ("c", "3"),
    ]


@given(st.lists(st.sampled_from("fg"), min_size=1, max_size=5), st.randoms(use_true_random=False), st.data())
def test_a_result_is_never_assigned_to_another_call(names, random, data):
    """With ids in any order; without some of them, if the results of each function keep their order."""
    calls = [call(f"id-{number}", name) for number, name in enumerate(names)]
    omitted = data.draw(st.sets(st.sampled_from(names)))
    results = [
        result(one["function"]["name"], None if one["function"]["name"] in omitted else one["id"], output=one["id"])
        for one in calls
    ]
    random.shuffle(results)
    for name in omitted:  # results without ids keep their order
        ordered = iter(sorted((one for one in results if one.name == name), key=lambda one: one.text))
        results = [next(ordered) if one.name == name else one for one in results]

    assert [(one["id"], one["id"]) for one in calls] == texts(calls, results)


def test_an_unknown_id_is_accepted_where_one_call_of_the_function_is_left():
    """Some clients assign ids of their own."""
    assert texts([call("a", "f"), call("b", "g")], [result("f", "own", output="1"), result("g", "b", output="2")]) == [
        ("a", "1"),
        ("b", "2"),
    ]


def test_media_of_results_are_in_a_user_message():
    media = {
        "name": "f",
        "response": {"output": "x"},
        "parts": [{"inlineData": {"mimeType": "image/png", "data": "aaaa"}}],
    }
    url = {"name": "f", "parts": {"fileData": {"mimeType": "image/png", "fileUri": "https://a.b/c"}}}

    messages = tool_messages([call("a"), call("b")], [read_response(media, "r"), read_response(url, "r")], "p")

    assert [message["role"] for message in messages] == ["tool", "tool", "user"]
    assert [part["image_url"]["url"] for part in messages[2]["content"]] == [
        "data:image/png;base64,aaaa",
        "https://a.b/c",
    ]


@pytest.mark.parametrize(
    ("calls", "results", "message"),
    [
        (
            [],
            [result()],
            r"contents\[2\]: the model's turn before has 0 function calls, and this turn 1 function responses",
        ),
        ([call("a"), call("b")], [result()], "has 2 function calls, and this turn 1 function responses"),
        ([call("a")], [], "has 1 function calls, and this turn 0 function responses"),
        ([call("a")], [result("g")], "r: no call of 'g' in the turn before is without a result"),
        ([call("a"), call("b", "g")], [result(), result()], "r: no call of 'f' in the turn before is without a result"),
        (
            [call("a"), call("b")],
            [result(call_id="a"), result(call_id="a")],
            "r.id: 'a' is the id of another function response",
        ),
        ([call("a"), call("b")], [result(call_id="x"), result(call_id="y")], "r.id: 'x' is not the id of a call"),
        ([call("a")], [result("g", "a")], "r.name: is not the name of call 'a'"),
    ],
)
def test_a_result_without_a_call_is_rejected(calls, results, message):
    """And a call without a result, and what is ambiguous."""
    with pytest.raises(UnprocessableRequest, match=message):
        tool_messages(calls, results, "contents[2]")


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ({}, "r.name: must be a string"),
        ({"name": "f", "response": "x"}, "r.response: must be an object"),
        ({"name": "f", "id": 1}, "r.id: must be a string"),
        ({"name": "f", "willContinue": True}, "r.willContinue: results in several parts are not supported"),
        ({"name": "f", "parts": [{}]}, r"r.parts\[0\].fileData: must be an object"),
        ({"name": "f", "parts": 1}, "r.parts: must be a list"),
    ],
)
def test_an_invalid_response_is_rejected_by_its_field(response, message):
    with pytest.raises(UnprocessableRequest, match=message):
        read_response(response, "r")


def test_a_response_that_is_nested_too_deeply_is_rejected():
    """The engine would reject it too."""
    deep = {}
    for _ in range(5000):
        deep = {"a": deep}

    with pytest.raises(UnprocessableRequest, match="r.response: is nested too deeply"):
        read_response({"name": "f", "response": deep}, "r")


TEXTS = st.none() | st.text(min_size=1, max_size=20)


@given(TEXTS, TEXTS)
def test_a_signature_is_read_as_it_was_written(call_id, thoughts):
    """Also in the alphabet for URLs and without padding, as Google's Python SDK and others encode it again."""
    signature = sign(call_id=call_id, thoughts=thoughts)
    again = urlsafe_b64encode(b64decode(signature)).decode()

    assert (
        Signature(call_id, thoughts)
        == read_signature(signature, "p")
        == read_signature(again, "p")
        == read_signature(again.rstrip("="), "p")
    )


@pytest.mark.parametrize(
    "foreign",
    [
        "",
        "skip_thought_signature_validator",
        "EjQKMgEMOdbHVGd2h5mKkQ==",
        sign(thoughts="x")[:-5],
        sign(thoughts="x") + "é",
        b64encode(b"tokentape[1]").decode(),
        b64encode(b'tokentape{"id": 1, "thoughts": []}').decode(),
    ],
)
def test_a_signature_of_others_is_empty(foreign):
    """Google's, a placeholder, a truncated one."""
    assert read_signature(foreign, "p") == NONE


def test_a_signature_must_be_a_string():
    with pytest.raises(UnprocessableRequest, match="p: must be a string"):
        read_signature(1, "p")
