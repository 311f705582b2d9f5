"""Results of function calls, each assigned to its call."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects.gemini.contents import read_response, tool_messages


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
    assert text == read_response({"name": "f", "response": response}, "r").text


def test_results_without_ids_belong_to_the_calls_of_their_function_in_order():
    """In the order of the calls, which templates without ids require."""
    calls = [call("a", "f"), call("b", "g"), call("c", "f")]

    assert [("a", "1"), ("b", "2"), ("c", "3")] == texts(
        calls, [result("g", output="2"), result("f", output="1"), result("f", output="3")]
    )


def test_results_with_ids_are_assigned_first():
    """What remains of a function belongs to the results without an id."""
    calls = [call("a"), call("b"), call("c")]

    assert [("a", "2"), ("b", "1"), ("c", "3")] == texts(
        calls, [result(output="2"), result(call_id="b", output="1"), result(output="3")]
    )


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
    assert [("a", "1"), ("b", "2")] == texts(
        [call("a", "f"), call("b", "g")], [result("f", "own", output="1"), result("g", "b", output="2")]
    )


def test_media_of_results_are_in_a_user_message():
    media = {
        "name": "f",
        "response": {"output": "x"},
        "parts": [{"inlineData": {"mimeType": "image/png", "data": "aaaa"}}],
    }
    url = {"name": "f", "parts": {"fileData": {"mimeType": "image/png", "fileUri": "https://a.b/c"}}}

    messages = tool_messages([call("a"), call("b")], [read_response(media, "r"), read_response(url, "r")], "p")

    assert ["tool", "tool", "user"] == [message["role"] for message in messages]
    assert ["data:image/png;base64,aaaa", "https://a.b/c"] == [
        part["image_url"]["url"] for part in messages[2]["content"]
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
