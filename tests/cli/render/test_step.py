"""The lines of a step: headline, problems, messages, and sampled tokens."""

import pytest

from proxy.cli.render import step as show
from proxy.cli.render.step import colored, ids_line, legend, recorded_texts
from proxy.continuation.types import REASONS


def step(**fields) -> dict:
    """Return a chat step that sampled two tokens."""
    return {
        "step_id": "S1",
        "rollout_id": "r1",
        "index": 4,
        "dialect": "chat",
        "model": {"asked": "policy", "served": "m"},
        "request": {"messages": [{"role": "user", "content": "hi"}]},
        "response": {"choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}}]},
        "prompt_ids": [1, 2, 3],
        "choices": [{"index": 0, "prompt": 0, "ids": [7, 8], "logprobs": [-1.0, -2.0], "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3},
        "timing": {"received": 10.0, "last_byte": 10.25, "stored": 10.5},
        "status": "complete",
        "reason": None,
        "delivered": True,
        "reward": None,
        "policy_version": None,
        "fidelity": {"exact": True, "problems": [], "why": []},
        "extra": {},
        **fields,
    }


def texts(lines) -> list[str]:
    return [line.plain.rstrip() for line in lines]


def test_a_summary_has_the_values_of_a_line():
    summary = show.summary(step())

    assert (10.5, "r1", 4, "m", 3, 2, ["stop"], 0.25) == tuple(
        summary[name]
        for name in (
            "time",
            "rollout_id",
            "index",
            "model",
            "prompt_tokens",
            "sampled_tokens",
            "finish_reasons",
            "latency_s",
        )
    )


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"prompts": [[1], [2, 3]], "prompt_ids": None}, 3),
        ({"prompt_ids": None}, 3),
        ({"prompt_ids": None, "usage": None}, None),
    ],
)
def test_prompt_tokens_are_counted_by_ids_or_taken_from_usage(fields, count):
    """Otherwise they are unknown."""
    assert count == show.summary(step(**fields))["prompt_tokens"]


def test_a_headline_has_policy_version_reward_and_delivery_if_present():
    assert (
        "step 4  S1  chat  m  3 prompt tokens, 2 completion tokens  stop  250 ms  exact" == show.headline(step()).plain
    )
    line = show.headline(step(policy_version="v\x1b", reward=0.5, delivered=False)).plain
    assert "policy v\\x1b  reward 0.5  not delivered" in line
    assert "policy planner 9  reward 0.5" in show.headline(step(policy="planner", policy_version="9", reward=0.5)).plain
    assert "policy planner  reward 0.5" in show.headline(step(policy="planner", reward=0.5)).plain
    assert "not delivered  late" in show.headline(step(delivered=False) | {"late": True}).plain


def test_problems_are_shown_with_their_code_and_explanation():
    """An engine error is shown by its message, not as JSON."""
    flagged = step(fidelity={"exact": False, "problems": ["echo"], "why": ["The call requested echo."]})
    response = {"status": 400, "body": '{"error": {"message": "no \\u001b[2J way"}}'}

    assert ["! echo: The call requested echo."] == texts(show.problems(flagged))
    assert "flagged" in show.headline(flagged).plain
    assert ["! error: 400: no \\x1b[2J way"] == texts(show.problems(step(status="error", response=response)))
    assert ["! partial: the client left"] == texts(show.problems(step(status="partial", reason="the client left")))
    assert ["! error: None"] == texts(show.problems(step(status="error", response={"body": None})))


@pytest.mark.parametrize(
    ("recorded", "shown"),
    [
        (None, []),
        ({"step_id": "S0", "choice": 0, "kept": 457, "bridge": 12}, ["continued: 457 ids kept, 12 ids rendered"]),
        (
            {"step_id": "S0", "choice": 0, "kept": 457, "bridge": 0, "rendered": 480, "reason": "history"},
            [f"continued: 457 ids kept, 0 ids rendered. {REASONS['history']}"],
        ),
        ({"step_id": "S0", "choice": 0, "reason": "close"}, [f"not continued: {REASONS['close']}"]),
        ({"reason": "of a newer proxy\x1b"}, [r"not continued: of a newer proxy\x1b"]),
    ],
)
def test_a_continuation_is_shown_with_its_ids_or_the_reason_why_there_is_none(recorded, shown):
    """An unknown reason is shown as it is."""
    extra = {} if recorded is None else {"continuation": recorded}

    assert shown == texts(show.continuation_lines(step(extra=extra)))


def test_only_new_messages_of_a_conversation_are_shown():
    """They follow the parent's messages and its response; a rewritten conversation is shown completely."""
    first = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    parent = step(request={"messages": first})
    response, tool = {"role": "assistant", "content": "a"}, {"role": "tool", "content": "t"}
    continued = step(request={"messages": [*first, response, tool]})
    rewritten = step(request={"messages": [{"role": "user", "content": "other"}, response]})

    assert ["tool        t"] == texts(show.prompt_lines(continued, parent, whole=False))
    assert 4 == len(texts(show.prompt_lines(continued, None, whole=False)))
    assert ["user        other", "assistant   a"] == texts(show.prompt_lines(rewritten, parent, whole=False))


def test_the_shown_messages_are_those_sent_to_the_engine():
    """The client's body has another shape in dialects that are translated to chat."""
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    response = {"role": "assistant", "content": "a"}
    own = {"instructions": "s", "input": "u", "prompt": "stored"}
    parent = step(request=own, sent={"set": {"messages": chat}, "unset": [*own]})
    continued = step(
        request={**own, "messages": [7]}, sent={"set": {"messages": [*chat, response, *chat[1:]]}, "unset": [*own]}
    )

    assert ["system      s", "user        u"] == texts(show.prompt_lines(parent, None, whole=False))
    assert ["user        u"] == texts(show.prompt_lines(continued, parent, whole=False))
    assert [] == texts(show.prompt_lines(step(sent={"set": {}, "unset": ["messages"]}), None, whole=False))


def test_only_the_new_part_of_a_continued_prompt_is_shown():
    """A prompt of ids is shown as sent."""
    parent = step(request={"prompt": "one "}, response={"choices": [{"index": 0, "text": "two "}]})

    assert ["prompt      three"] == texts(
        show.prompt_lines(step(request={"prompt": "one two three"}), parent, whole=False)
    )
    assert ["prompt      four"] == texts(show.prompt_lines(step(request={"prompt": "four"}), parent, whole=False))
    assert ["prompt      [1,2]"] == texts(show.prompt_lines(step(request={"prompt": [1, 2]}), None, whole=False))
    assert [] == texts(show.prompt_lines(step(request=None), None, whole=False))


def test_messages_are_dim_and_trained_samples_bold():
    (prompt,) = show.prompt_lines(step(), None, whole=False)
    (trained,) = show.completion_lines(step(), 0, is_trained=True)
    (untrained,) = show.completion_lines(step(), 0, is_trained=False)

    assert ["dim", "bold", "dim"] == [str(line.spans[-1].style) for line in (prompt, trained, untrained)]


def test_reasoning_content_parts_and_tool_calls_are_shown():
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    message = {
        "role": "assistant",
        "reasoning": "hm",
        "content": [{"type": "text", "text": "x"}, {"type": "image_url"}],
    }
    response = {"choices": [{"index": 0, "message": {**message, "tool_calls": [call, "odd"]}}]}

    assert [
        "assistant   [reasoning] hm",
        "            x",
        "            [image_url]",
        '            [calls add] {"a": 1}',
    ] == texts(show.completion_lines(step(response=response), 0, is_trained=True))


@pytest.mark.parametrize(
    "response", [None, "cut off", {"choices": None}, {"choices": ["odd"]}, {"choices": [{"index": 3}]}]
)
def test_an_invalid_response_has_no_lines(response):
    assert [] == texts(show.completion_lines(step(response=response), 0, is_trained=True))


def test_a_long_message_is_truncated_with_a_note():
    """The limit is in lines and characters; sampled text is never truncated."""
    for text in ("x" * 5000, "line\n" * 500):
        long = step(request={"messages": [{"role": "user", "content": text}]})
        shown = texts(show.prompt_lines(long, None, whole=False))
        assert len(shown) <= 13
        assert f"{len(text)} characters in total; use --whole" in shown[-1]
        assert "--whole" not in str(texts(show.prompt_lines(long, None, whole=True)))
    response = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "line\n" * 500}}]}

    assert 501 == len(texts(show.completion_lines(step(response=response), 0, is_trained=True)))


def test_text_is_escaped_in_every_line_of_a_step():
    bad = "\x1b]0;x\x07"
    message = {"role": bad, "content": bad, "tool_calls": [{"function": {"name": bad, "arguments": bad}}]}
    hostile = step(
        step_id=bad,
        dialect=bad,
        model={"asked": None, "served": bad},
        request={"messages": [message, bad]},
        response={"choices": [{"index": 0, "message": message}]},
        choices=[{"index": 0, "prompt": 0, "ids": [1], "logprobs": [-1.0], "finish_reason": bad}],
        status=bad,
        reason=bad,
        fidelity={"exact": False, "problems": [bad], "why": [bad]},
    )
    lines = [
        show.headline(hostile),
        *show.problems(hostile),
        *show.prompt_lines(hostile, None, whole=True),
        *show.completion_lines(hostile, 0, is_trained=True),
        show.verdict(show.summary(hostile)),
    ]

    assert "\x1b" not in "".join(line.plain for line in lines)
    assert "\\x1b]0;x\\x07" in lines[0].plain


def step_of(response, ids=(1, 2)) -> dict:
    return {"response": response, "choices": [{"index": 1, "ids": list(ids)}]}


CHAT = {"content": [{"token": "a"}, {"token": "b"}]}
COMPLETION = {"tokens": ["a", "b"]}


@pytest.mark.parametrize("logprobs", [CHAT, COMPLETION])
def test_token_texts_are_those_of_the_same_choice_in_the_response(logprobs):
    response = {"choices": [{"index": 0, "logprobs": None}, {"index": 1, "logprobs": logprobs}]}

    assert ["a", "b"] == recorded_texts(step_of(response), 0)


@pytest.mark.parametrize(
    "response",
    [None, "cut", {}, {"choices": None}, {"choices": [{"index": 1, "logprobs": None}]}, {"choices": [{"index": 0}]}],
)
def test_a_response_without_logprobs_has_no_token_texts(response):
    assert recorded_texts(step_of(response), 0) is None


def test_token_texts_that_do_not_match_the_ids_are_ignored():
    """So are ids in place of texts."""
    response = {"choices": [{"index": 1, "logprobs": COMPLETION}]}
    renamed = {"choices": [{"index": 1, "logprobs": {"tokens": ["a", "token_id:2"]}}]}

    assert recorded_texts(step_of(response, ids=[1, 2, 3]), 0) is None
    assert recorded_texts(step_of(renamed), 0) is None


def test_each_range_of_logprobs_has_a_colour():
    """Tokens without a logprob are dim."""
    line = colored(None, [1, 2, 3, 4, 5, 6, 7], [-0.01, -0.5, -2.0, -4.0, -9.0, None], with_values=False)
    styles = [str(span.style) for span in line.spans]

    assert "1 2 3 4 5 6 7 " == line.plain
    assert [
        "blue",
        "cyan",
        "default",
        "dark_orange",
        "bold underline dark_orange",
        "dim italic",
        "dim italic",
    ] == styles
    assert all(style in {str(span.style) for span in legend().spans} for style in styles)


def test_with_values_each_token_is_followed_by_its_logprob():
    """Texts are escaped; a token without a text is shown by its id."""
    line = colored(["a\x1b", None], [7, 8], [-0.125, None], with_values=True)

    assert "a\\x1b(-0.125) 8(none) " == line.plain


def test_ids_are_one_line_with_a_style():
    assert "1 2 3" == ids_line([1, 2, 3], "dim").plain
