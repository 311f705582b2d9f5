"""One step: its line, what its agent wrote and was answered."""

import pytest

from proxy.cli.render import step as show


def step(**said) -> dict:
    """A step of chat that sampled two tokens."""
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
        **said,
    }


def texts(lines) -> list[str]:
    return [line.plain.rstrip() for line in lines]


def test_a_summary_says_what_a_line_needs():
    """JSON-ready, with the times of the proxy."""
    told = show.summary(step())

    assert (10.5, "r1", 4, "m", 3, 2, ["stop"], 0.25) == tuple(
        told[name]
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
    ("said", "count"),
    [
        ({"prompts": [[1], [2, 3]], "prompt_ids": None}, 3),
        ({"prompt_ids": None}, 3),
        ({"prompt_ids": None, "usage": None}, None),
    ],
)
def test_prompt_tokens_are_counted_by_ids_or_as_the_engine_counts(said, count):
    """And are not known where it tells neither."""
    assert count == show.summary(step(**said))["prompt_tokens"]


def test_the_line_of_a_step_tells_its_reward_and_policy_and_that_nobody_got_it():
    """Only where there is something to tell."""
    assert (
        "step 4  S1  chat  m  3 prompt tokens, 2 completion tokens  stop  250 ms  exact" == show.headline(step()).plain
    )
    line = show.headline(step(policy_version="v\x1b", reward=0.5, delivered=False)).plain
    assert "policy v\\x1b  reward 0.5  not delivered" in line
    assert "not delivered  late" in show.headline(step(delivered=False) | {"late": True}).plain


def test_what_is_wrong_with_a_step_is_said_in_sentences():
    """By code; an error by what the engine said, and not as JSON."""
    flagged = step(fidelity={"exact": False, "problems": ["echo"], "why": ["Asked for echo."]})
    response = {"status": 400, "body": '{"error": {"message": "no \\u001b[2J way"}}'}

    assert ["! echo: Asked for echo."] == texts(show.problems(flagged))
    assert "flagged" in show.headline(flagged).plain
    assert ["! error: 400: no \\x1b[2J way"] == texts(show.problems(step(status="error", response=response)))
    assert ["! partial: the client left"] == texts(show.problems(step(status="partial", reason="the client left")))
    assert ["! error: None"] == texts(show.problems(step(status="error", response={"body": None})))


def test_only_what_is_new_in_a_conversation_is_told():
    """Behind the parent's messages and its answer; all of it where the conversation was rewritten."""
    first = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    parent = step(request={"messages": first})
    response, tool = {"role": "assistant", "content": "a"}, {"role": "tool", "content": "t"}
    went_on = step(request={"messages": [*first, response, tool]})
    rewritten = step(request={"messages": [{"role": "user", "content": "other"}, response]})

    assert ["tool        t"] == texts(show.prompt_lines(went_on, parent, whole=False))
    assert 4 == len(texts(show.prompt_lines(went_on, None, whole=False)))
    assert ["user        other", "assistant   a"] == texts(show.prompt_lines(rewritten, parent, whole=False))


def test_messages_are_those_that_were_sent():
    """Where a client's own body was of another shape, as in dialects that are asked for by way of chat."""
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    response = {"role": "assistant", "content": "a"}
    own = {"instructions": "s", "input": "u", "prompt": "stored"}
    parent = step(request=own, sent={"set": {"messages": chat}, "unset": [*own]})
    went_on = step(
        request={**own, "messages": [7]}, sent={"set": {"messages": [*chat, response, *chat[1:]]}, "unset": [*own]}
    )

    assert ["system      s", "user        u"] == texts(show.prompt_lines(parent, None, whole=False))
    assert ["user        u"] == texts(show.prompt_lines(went_on, parent, whole=False))
    assert [] == texts(show.prompt_lines(step(sent={"set": {}, "unset": ["messages"]}), None, whole=False))


def test_a_prompt_that_goes_on_from_another_is_told_from_there():
    """Of completions; a prompt of ids is told as it was sent."""
    parent = step(request={"prompt": "one "}, response={"choices": [{"index": 0, "text": "two "}]})

    assert ["prompt      three"] == texts(
        show.prompt_lines(step(request={"prompt": "one two three"}), parent, whole=False)
    )
    assert ["prompt      four"] == texts(show.prompt_lines(step(request={"prompt": "four"}), parent, whole=False))
    assert ["prompt      [1,2]"] == texts(show.prompt_lines(step(request={"prompt": [1, 2]}), None, whole=False))
    assert [] == texts(show.prompt_lines(step(request=None), None, whole=False))


def test_messages_are_dimmed_and_what_was_sampled_is_bright():
    """Unless no row trains it."""
    (call_proxy,) = show.prompt_lines(step(), None, whole=False)
    (trained,) = show.completion_lines(step(), 0, is_trained=True)
    (untrained,) = show.completion_lines(step(), 0, is_trained=False)

    assert ["dim", "bold", "dim"] == [str(line.spans[-1].style) for line in (call_proxy, trained, untrained)]


def test_reasoning_parts_and_calls_of_tools_are_told():
    """Whatever else a message has, its text is in it."""
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
def test_an_answer_that_is_none_is_told_by_nothing(response):
    """Engines answer what they like."""
    assert [] == texts(show.completion_lines(step(response=response), 0, is_trained=True))


def test_a_long_message_is_cut_and_says_so():
    """By lines and by characters, unless all of it is wanted; what was sampled is never cut."""
    for text in ("x" * 5000, "line\n" * 500):
        long = step(request={"messages": [{"role": "user", "content": text}]})
        shown = texts(show.prompt_lines(long, None, whole=False))
        assert len(shown) <= 13
        assert f"{len(text)} characters in total; use --whole" in shown[-1]
        assert "--whole" not in str(texts(show.prompt_lines(long, None, whole=True)))
    response = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "line\n" * 500}}]}

    assert 501 == len(texts(show.completion_lines(step(response=response), 0, is_trained=True)))


def test_hostile_text_is_harmless_wherever_it_stands():
    """Roles, contents, names of tools, codes."""
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
