"""Kinds of drift, decided by two texts."""

import pytest

from proxy.trajectory.drift_kinds import KINDS, kind_by_texts

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
    assert expected_kind == kind(message, expected, found)


def test_outside_of_a_reply_different_text_is_the_templates():
    """Equal text in other tokens is retokenized, anywhere."""
    outside = {"in_reply": False, "may_lose_thoughts": False}

    assert "template" == kind_by_texts(reply(), "assistant\n\nso", "assistant\nso", **outside)
    assert "retokenized" == kind_by_texts(reply(), "assistant\nso", "assistant\nso it", **outside)


def test_each_kind_is_documented_with_a_sentence():
    assert all(meaning.endswith(".") for meaning in KINDS.values())
