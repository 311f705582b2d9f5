"""Search for a text in the prompts, replies and errors of steps."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tests.support.forests import make_step

from proxy.trajectory.text_search import Match, Needle, search

USER = {"role": "user", "content": "Which tool finds the Answer?"}
CALL = {
    "role": "assistant",
    "tool_calls": [
        {"id": "answer-1", "type": "function", "function": {"name": "look_up", "arguments": '{"q": "answer"}'}}
    ],
}
PARTS = {
    "role": "tool",
    "tool_call_id": "answer-1",
    "content": [{"type": "text", "text": "nothing"}, {"text": "ANSWER 7"}],
}


def step(name, messages, reply="ok", **fields):
    response = {"choices": [{"index": 0, "message": {"role": "assistant", "content": reply}}]}
    return replace(make_step(name, [1], [2]), request={"messages": messages}, response=response, **fields)


def places(steps, text, limit=99):
    return [(match.step_id, match.place, match.role) for match in search(steps, Needle(text), limit)]


def test_messages_tool_calls_parts_and_replies_are_searched_without_regard_to_case():
    """Roles, types and ids are not."""
    steps = [step("a", [USER, CALL, PARTS], "The answer is 7.")]

    assert [("a", "prompt", role) for role in ("user", "assistant", "tool")] + [("a", "reply", "assistant")] == places(
        steps, "answer"
    )
    assert places(steps, "answer-1") == places(steps, "function") == []


def test_a_match_has_the_characters_around_it():
    (match,) = search([step("a", [{"role": "user", "content": "a" * 200 + "Needle" + "b" * 200}])], Needle("nEEDLE"), 9)

    assert Match("a", "prompt", "user", "a" * 80, "Needle", "b" * 80) == match


def test_a_message_that_steps_have_in_common_is_found_in_the_first_one():
    """One that follows it is found in the step that is the first to have it."""
    more = {"role": "user", "content": "another answer"}
    steps = [step("a", [USER]), step("b", [USER, more]), step("c", [more])]

    assert places(steps, "answer") == [("a", "prompt", "user"), ("b", "prompt", "user"), ("c", "prompt", "user")]


def test_errors_and_their_reasons_are_searched():
    failed = replace(
        step("a", []), status="error", response={"error": {"message": "model not found"}}, reason="timeout"
    )

    assert places([failed], "NOT found") == places([failed], "timeout") == [("a", "error", None)]


def test_prompts_of_completions_are_searched_but_token_ids_are_not():
    texts = replace(step("a", []), request={"prompt": ["one", "two"]}, response={"choices": [{"text": "three"}]})
    ids = replace(step("b", []), request={"prompt": [1, 2, 3]}, response=None)

    assert places([texts, ids], "two") == [("a", "prompt", None)]
    assert places([texts, ids], "three") == [("a", "reply", None)]


def test_the_number_of_matches_is_limited():
    steps = [step(str(number), [{"role": "user", "content": f"answer {number}"}]) for number in range(9)]

    assert len(places(steps, "answer", 3)) == 3


@given(st.text(), st.text(min_size=1), st.text())
def test_any_text_is_found_in_a_text_that_has_it(before, text, after):
    """Also if characters have a lower case of another length. What is shown contains it."""
    found = Needle(text).find(before + text + after)

    assert found is not None
    assert text.lower() == found[1].lower()
