"""Drift: a prompt continues the messages of an earlier step but not its token ids."""

from dataclasses import replace

import pytest
from hypothesis import given
from tests.support.forests import call, forests

from proxy.trajectory.drift import KINDS, Boundary, Drift, Window, explain, find_boundaries, kind_by_texts
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.sequence import sequences
from proxy.trajectory.tree import Tree, grow

ASK = {"role": "user", "content": "ask"}
REPLY = {"role": "assistant", "content": "reply"}
MORE = {"role": "user", "content": "more"}


def find_drift(tree: Tree) -> list[Drift]:
    return [explain(boundary) for boundary in find_boundaries(tree)]


def test_drift_has_the_index_at_which_the_ids_differ_and_the_ids_around_it():
    first = call("a", range(1, 13), [[20, 21, 22, 23]], [ASK], REPLY)
    second = call("b", [*range(1, 13), 20, 99, 22], [[30]], [ASK, REPLY, MORE], REPLY)

    assert [
        Drift("b", "a", 0, 13, 5, (6, 7, 8, 9, 10, 11, 12, 20, 21, 22, 23), (6, 7, 8, 9, 10, 11, 12, 20, 99, 22))
    ] == find_drift(grow([second, first]))


def test_a_prompt_that_ends_within_the_earlier_ids_drifts_at_its_end():
    first = call("a", [1], [[10, 11]], [ASK], REPLY)
    (drift,) = find_drift(grow([first, call("b", [1, 10], [[20]], [ASK, REPLY, MORE], REPLY)]))

    assert (drift.index, drift.expected_ids, drift.found_ids) == (2, (1, 10, 11), (1, 10))
    assert drift.kind == "template", "the template omits the end of a reply"


def test_continued_ids_other_messages_and_other_dialects_are_no_drift():
    first = call("a", [1], [[10]], [ASK], REPLY)
    continued = call("b", [1, 10, 2], [[20]], [ASK, REPLY, MORE], REPLY)
    elsewhere = call("c", [7], [[20]], [MORE], REPLY)
    compacted = call("d", [8], [[20]], [{**ASK, "content": "a summary of it"}, MORE], REPLY)
    silent = call("e", [9], [[20]], "no list of messages")
    malformed = call("f", [9], [[20]], ["no message", MORE], "no message")

    assert find_drift(grow([first, continued, elsewhere, compacted, silent, malformed])) == []
    assert find_drift(grow([first, call("f", [9], [[20]], [ASK, REPLY, MORE], REPLY, dialect="completions")])) == []


def test_reasoning_nulls_and_call_ids_that_an_agent_drops_do_not_hide_drift():
    function = {"name": "look", "arguments": "{}"}
    reply = {
        **REPLY,
        "content": None,
        "reasoning": "hm",
        "refusal": None,
        "tool_calls": [{"id": "x", "function": function}],
    }
    sent_back = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "y", "type": "function", "function": function}],
    }
    tool = {"role": "tool", "content": "4", "tool_call_id": "y"}
    steps = [call("a", [1], [[10]], [ASK], reply), call("b", [1, 9], [[20]], [ASK, sent_back, tool], REPLY)]

    assert [(drift.step_id, drift.earlier_step_id) for drift in find_drift(grow(steps))] == [("b", "a")]


LOOK = {"name": "look", "arguments": "{}"}


@pytest.mark.parametrize(
    ("returned", "kind"),
    [
        ({**REPLY, "content": "another"}, "edited"),
        ({**REPLY, "content": " reply\n"}, "whitespace"),
        ({**REPLY, "content": "reply", "tool_calls": [{"function": LOOK}]}, "edited"),
        ({**REPLY, "role": "user"}, None),
    ],
)
def test_an_edited_reply_is_drift_of_its_own_kind(returned, kind):
    """A message with another role is no reply."""
    steps = [call("a", [1], [[10]], [ASK], REPLY), call("b", [7], [[20]], [ASK, returned, MORE], REPLY)]

    assert ([kind] if kind else []) == [drift.kind for drift in find_drift(grow(steps))]


def test_a_reply_that_is_sent_back_as_parts_is_not_edited():
    """Strands sends a list of one text part, also for one of several equal replies."""
    parts = {**REPLY, "content": [{"type": "text", "text": "reply"}]}
    a = call("a", [1], [[10], [11]], [ASK], REPLY, REPLY)
    rewritten, continued = [call("b", ids, [[20]], [ASK, parts, MORE], REPLY) for ids in ([7], [1, 11, 2])]

    assert [(drift.earlier_step_id, drift.kind) for drift in find_drift(grow([a, rewritten]))] == [("a", "unexplained")]
    assert find_drift(grow([a, continued])) == []


def test_an_edited_later_reply_is_reported_instead_of_an_earlier_unchanged_one():
    """The latest turn that the messages continue is reported."""
    edited = {**REPLY, "content": "edited"}
    a = call("a", [1], [[10]], [ASK], REPLY)
    b = call("b", [1, 10, 2], [[20]], [ASK, REPLY, MORE], REPLY)
    c = call("c", [1, 10, 2, 21], [[30]], [ASK, REPLY, MORE, edited, MORE], REPLY)

    assert [(drift.step_id, drift.earlier_step_id, drift.kind) for drift in find_drift(grow([a, b, c]))] == [
        ("c", "b", "edited")
    ]


def test_messages_without_the_earlier_reply_are_another_branch():
    system = {"role": "system", "content": "be brief"}
    first = call("a", [1, 2], [[10]], [system, ASK], REPLY)
    dropped = call("b", [1, 2, 4], [[20]], [system, ASK, MORE], REPLY)
    continued = call("c", [1, 2, 4, 20, 5], [[30]], [system, ASK, MORE, REPLY, MORE], REPLY)

    assert find_drift(grow([first, dropped, continued])) == []


def test_one_edited_message_of_a_user_or_tool_is_drift():
    """Two changed messages are another conversation."""
    edited, system = {"role": "user", "content": "ask "}, {"role": "system", "content": "be brief"}
    first = call("a", [1, 2], [[10]], [system, ASK], REPLY)
    edited_once = call("b", [1, 3], [[20]], [system, edited, REPLY, MORE], REPLY)
    edited_twice = call("b", [1, 3], [[20]], [MORE, edited, REPLY, MORE], REPLY)

    assert [
        (drift.step_id, drift.earlier_step_id, drift.kind, drift.index)
        for drift in find_drift(grow([first, edited_once]))
    ] == [("b", "a", "edited", 1)]
    assert find_drift(grow([first, edited_twice])) == []


THINKING = {**REPLY, "reasoning": "hm"}
CALLING = {**REPLY, "tool_calls": [{"function": LOOK}]}


@pytest.mark.parametrize(
    ("reply", "prompt", "texts", "kind"),
    [
        (THINKING, [1, 2, 12, 9], ("<think>hm", "reply"), "reasoning_stripped"),
        ({**REPLY, "content": "<think>hm</think>reply"}, [1, 2, 12, 9], ("<think>", "reply"), "reasoning_stripped"),
        (THINKING, [1, 3, 10, 11, 12], ("x<think>hm", "xreply"), "reasoning_stripped"),  # its opening is in the prompt
        (THINKING, [1, 2, 10, 13], ("reply", "reply"), "retokenized"),
        (CALLING, [1, 2, 10, 13], ('{"a": 1}', '{"a":1}'), "tool_call_rewritten"),
        (CALLING, [1, 2, 10, 13], ('{"a": 1, "b": 2}', '{"b": 2, "a": 1}'), "tool_call_rewritten"),
        (CALLING, [1, 2, 10, 13], ("so I reply  ", "so I reply\n"), "whitespace"),
        (CALLING, [1, 2, 10, 13], ('{"a": 1}', '{"a": 1}'), "retokenized"),
        (REPLY, [1, 2, 10, 13], ("hello there", "hello"), "retokenized"),
        (REPLY, [1, 2, 10, 13], ("hello  there", "hello th"), "whitespace"),
        (REPLY, [1, 2, 10, 13], ("</think>hello", "hello"), "reasoning_stripped"),
        (REPLY, [1, 2, 10, 13], ("hello", "goodbye"), "other"),
        (REPLY, [1, 2, 10, 13], ("", ""), "other"),
        (REPLY, [1, 3, 10], ("<think>\n", "<|im"), "template"),
        (REPLY, [1, 3, 10], ("a\n\nb", "a\n\nb"), "retokenized"),
    ],
)
def test_drift_has_a_kind_by_its_texts(reply, prompt, texts, kind):
    """By the reply, the texts around the boundary, and the boundary's position: each kind that a chat template causes."""
    steps = [call("a", [1, 2], [[10, 11, 12]], [ASK], reply), call("b", prompt, [[20]], [ASK, reply, MORE], REPLY)]
    (boundary,) = find_boundaries(grow(steps))

    assert isinstance(boundary, Boundary)
    assert kind == explain(boundary, *texts).kind
    assert kind in KINDS
    assert explain(boundary).kind == "unexplained", "the kind depends on the texts"


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        ("caf\ufffd<|im_end|>", "caf<|im_end|>\n"),  # vLLM drops an incomplete character
        ("caf\ufffd au lait", "caf\ufffd\ufffd\ufffd au l"),  # returned as U+FFFD, which has three bytes
        ("caf\u00e9 a", "caf\ufffd"),  # the window ends within a character
    ],
)
def test_incomplete_characters_are_not_compared(expected, found):
    """Of an unfinished character, or one that the window cuts, the text counts as equal."""
    steps = [call("a", [1], [[10, 11]], [ASK], REPLY), call("b", [1, 10, 13], [[20]], [ASK, REPLY, MORE], REPLY)]
    (boundary,) = find_boundaries(grow(steps))

    assert explain(boundary, expected, found).kind == "retokenized"


@pytest.mark.parametrize(
    ("prompt", "sent_back", "kind"),
    [
        ([1] * 9 + [3, 10, 11], REPLY, "reasoning_stripped"),  # it may open the reply; the agent dropped its thoughts
        ([1] * 10 + [2, 11], REPLY, "reasoning_stripped"),
        ([1] * 10 + [2, 11], {**REPLY, "content": "reply\n"}, "reasoning_stripped"),
        ([3] * 11, THINKING, "template"),  # far from the reply
        ([1] * 10 + [2, 10], THINKING, "template"),  # it ends there
    ],
)
def test_a_kind_that_messages_and_ids_decide_does_not_depend_on_texts(prompt, sent_back, kind):
    steps = [call("a", [1] * 10 + [2], [[10, 11]], [ASK], THINKING), call("b", prompt, [[20]], [ASK, sent_back, MORE])]
    (boundary,) = find_boundaries(grow(steps))

    assert {boundary.known, explain(boundary).kind, explain(boundary, "a", "a").kind} == {kind}


def test_the_key_of_a_window_is_made_of_engine_expected_and_found_ids():
    """Texts are cached by this key."""
    key = Window("a", 2, 0, (1, 2, 3), (1, 2, 4)).key

    assert key == Window("a", 9, 7, (1, 2, 3), (1, 2, 4)).key
    assert key != Window("b", 2, 0, (1, 2, 3), (1, 2, 4)).key
    assert key != Window("a", 2, 0, (1, 2, 4), (1, 2, 3)).key
    assert Window("a", 2, 0, (1, 2), (3, 4)).key != Window("a", 2, 0, (1, 2, 3), (4,)).key


def test_a_template_that_strips_reasoning_of_an_earlier_reply_drifts_there():
    """A user's turn may strip the reasoning of a reply before the last one."""
    a = call("a", [1], [[10, 11]], [ASK], THINKING)
    b = call("b", [1, 10, 11, 2], [[20]], [ASK, THINKING, MORE], REPLY)
    c = call("c", [1, 11, 2, 20, 3], [[30]], [ASK, THINKING, MORE, REPLY, MORE], REPLY)
    (boundary,) = find_boundaries(grow([a, b, c]))

    assert (boundary.earlier.step.step_id, boundary.window.index, boundary.in_reply) == ("b", 1, True)
    assert explain(boundary, "<think>hm", "more").kind == "reasoning_stripped"


@given(forests())
def test_steps_that_join_a_sequence_never_drift(steps):
    """Nor do steps without messages; and finding drift changes no sequence."""
    before = sequences(steps, RolloutFacts("r1", None, "open", None, {}, None, {}))

    assert find_boundaries(grow(steps)) == []
    assert before == sequences(steps, RolloutFacts("r1", None, "open", None, {}, None, {}))


def test_ids_that_differ_within_the_earlier_prompt_are_drift():
    """Even if the sampled ids reappear at the same index."""
    opening = [2] * 8
    first = call("a", [1, 50, *opening], [[10]], [ASK], REPLY)
    (drift,) = find_drift(grow([first, call("b", [1, 60, *opening, 10, 3], [[20]], [ASK, REPLY, MORE], REPLY)]))

    assert (1, (1, 50, *opening[:7]), (1, 60, *opening[:7])) == (drift.index, drift.expected_ids, drift.found_ids)
    assert drift.kind == "template"


def test_a_continued_last_message_drifts_where_its_ids_differ():
    first = call("a", [1], [[10, 9]], [ASK], REPLY)  # 9 ends the turn; a continued message has no end
    drifted = find_drift(grow([first, call("b", [1, 10], [[20]], [ASK, REPLY], MORE)]))

    assert [(drift.step_id, drift.earlier_step_id, drift.index) for drift in drifted] == [("b", "a", 2)]


def test_a_call_with_several_choices_drifts_once():
    first = call("a", [1], [[10]], [ASK], REPLY)

    assert len(find_drift(grow([first, call("b", [7], [[20], [21]], [ASK, REPLY, MORE], REPLY, REPLY)]))) == 1


def test_a_step_that_continues_any_call_with_that_reply_has_not_drifted():
    """Otherwise the oldest call is reported."""
    twins = [call("a", [1], [[10], [11]], [ASK], REPLY, REPLY), call("b", [1], [[12]], [ASK], REPLY)]

    assert find_drift(grow([*twins, call("c", [1, 12], [[20]], [ASK, REPLY, MORE], REPLY)])) == []
    (drift,) = find_drift(grow([*twins, call("c", [1, 13], [[20]], [ASK, REPLY, MORE], REPLY)]))
    assert (drift.earlier_step_id, drift.earlier_choice) == ("a", 0)


def test_a_step_is_compared_with_the_latest_turn_that_it_continues():
    a = call("a", [1], [[10]], [ASK], REPLY)
    b = call("b", [1, 10, 2], [[20]], [ASK, REPLY, MORE], REPLY)
    c = call("c", [1, 10, 2, 21], [[30]], [ASK, REPLY, MORE, REPLY, MORE], REPLY)

    assert [(drift.step_id, drift.earlier_step_id, drift.index) for drift in find_drift(grow([a, b, c]))] == [
        ("c", "b", 3)
    ]


def test_malformed_choices_of_a_response_are_ignored():
    first = call("a", [1], [[10]], [ASK], REPLY)
    malformed = {"choices": ["malformed", *first.response["choices"]]}

    assert (
        find_drift(grow([replace(first, response=malformed), call("b", [1, 10, 2], [[20]], [ASK, REPLY, MORE], REPLY)]))
        == []
    )


OPENING = "<|im_start|>assistant\n"
CALL = '<tool_call>\n{"name": "look", "arguments": {"a": 1}}'
CONTENT = "I look at the table, and then I count.\n\n"
COMPACT = CALL.replace(": ", ":").replace(", ", ",")


def reply(content: str = CONTENT, **fields) -> dict:
    function = {"name": "look", "arguments": '{"a": 1}'}
    return {"role": "assistant", "content": content, "tool_calls": [{"function": function}], **fields}


def kind(message: dict, expected: str, found: str) -> str:
    thinks = "reasoning" in message
    return kind_by_texts(message, expected, found, in_reply=True, may_lose_thoughts=thinks)


@pytest.mark.parametrize(
    ("message", "expected", "found", "expected_kind"),
    [
        (reply(""), f"{OPENING}{CALL}", f"{OPENING}{COMPACT}", "tool_call_rewritten"),
        (reply(), CALL, COMPACT, "tool_call_rewritten"),
        (reply(), f"and then I count.\n\n{CALL}", f"and then I count.\n{CALL}", "whitespace"),
        (reply(), "at the table,  and", "at the table, and", "whitespace"),
        (reply(), f"{OPENING} I look", f"{OPENING}I look", "whitespace"),
        (reply("OK."), f"{OPENING}OK.\n\n{CALL}", f"{OPENING}OK.\n{CALL}", "whitespace"),
        (reply("OK."), f"{OPENING}OK.\n{CALL}", f"{OPENING}OK.\n{COMPACT}", "tool_call_rewritten"),
        (reply(), "at the table, and", "at the chair, and", "other"),
        (
            reply("", reasoning="I must look."),
            f"{OPENING}I must look.</think>",
            f"{OPENING}{CALL}",
            "reasoning_stripped",
        ),
        (reply("", reasoning="I must look."), CALL, COMPACT, "tool_call_rewritten"),
    ],
)
def test_whitespace_within_a_call_is_a_rewritten_call(message, expected, found, expected_kind):
    """Differences in content or reasoning are not."""
    assert kind(message, expected, found) == expected_kind


def test_outside_of_a_reply_different_text_is_the_templates():
    """Equal text in other tokens is retokenized, anywhere."""
    outside = {"in_reply": False, "may_lose_thoughts": False}

    assert kind_by_texts(reply(), "assistant\n\nso", "assistant\nso", **outside) == "template"
    assert kind_by_texts(reply(), "assistant\nso", "assistant\nso it", **outside) == "retokenized"


def test_each_kind_is_documented_with_a_sentence():
    assert all(meaning.endswith(".") for meaning in KINDS.values())
