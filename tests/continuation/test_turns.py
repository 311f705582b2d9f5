"""The turns of a rollout: how they ended, what they share, and how much memory they use."""

from dataclasses import replace

import pytest
from tests.support.turns import STOP, USER, assistant, chat_step, ids, text_step, tool_call, turns_of

MORE = {"role": "user", "content": "More"}


def only(turns):
    (turn,) = turns.named.values()
    return turn


@pytest.mark.parametrize(
    ("finish", "stop_reason", "body", "is_closed", "is_cut"),
    [
        ("stop", None, {}, True, False),
        ("stop", 98, {}, True, False),
        ("stop", 98, {"stop_token_ids": [98]}, False, False),
        ("stop", "word", {}, False, True),
        ("length", None, {}, False, True),
        ("tool_calls", None, {}, False, False),
        ("tool_calls", 98, {}, True, False),
        ("tool_calls", 98, {"stop_token_ids": [98]}, False, False),
        ("tool_calls", "word", {}, False, True),
    ],
)
def test_a_turn_is_closed_by_the_models_own_stop_token_and_cut_by_a_limit(finish, stop_reason, body, is_closed, is_cut):
    """A token that the client chose, or that `tool_calls` may hide, proves neither."""
    turn = only(
        turns_of(
            chat_step("s", [USER], assistant("Hi"), [1], [2, 98], finish=finish, stop_reason=stop_reason, body=body)
        )
    )

    assert (turn.is_closed, turn.is_cut) == (is_closed, is_cut)


def test_stop_tokens_are_known_by_engine_kind_and_model():
    """Only a closed turn shows one."""
    closed = chat_step("s1", [USER], assistant("Hi"), [1], [2, STOP])
    cut = chat_step("s2", [USER], assistant("Hi"), [1], [2, 3], finish="length")

    assert turns_of(closed, cut).stops == {("vllm", "policy", STOP)}


def test_a_step_is_added_once():
    """A step that this process stored is also read from the store with others."""
    step = chat_step("s1", [USER], assistant("Hi"), [1], [2, STOP], index=0)

    assert len(turns_of(step, step)) == 1


def test_turns_share_the_ids_of_the_longest_prompt_that_continues_them():
    """A rollout of many turns needs the memory of one prompt."""
    prompts = [list(range(100))]
    steps = [chat_step("s0", [USER], assistant("0"), prompts[0], [1, STOP], index=0)]
    messages = [USER]
    for number in range(1, 5):
        messages = [*messages, assistant(str(number - 1)), MORE]
        prompts.append([*prompts[-1], 1, STOP, 7])
        facts = {"continuation": {"step_id": f"s{number - 1}", "choice": 0, "kept": len(prompts[-1]) - 1, "bridge": 1}}
        steps.append(
            chat_step(f"s{number}", messages, assistant(str(number)), prompts[-1], [1, STOP], index=number, extra=facts)
        )
    turns = turns_of(*steps)
    chain = list(turns.named.values())

    assert prompts == [turn.prompt_ids.tolist() for turn in chain]
    assert len({id(turn.prompt) for turn in chain}) == 1
    assert turns.size < turns_of(steps[0]).size * len(steps)


def test_completions_are_found_by_the_text_that_a_prompt_begins_with():
    """The longest first."""
    turns = turns_of(
        text_step("s1", "Once", " upon", [1], [2]),
        text_step("s2", "Once", " upon a", [1], [3]),
        text_step("s3", "No", "", [4], [5]),
    )

    assert [turn.step_id for (turn,) in turns.of_text("Once upon a time")] == ["s2", "s1"]
    assert [turn.step_id for (turn,) in turns.of_text("Once upon")] == ["s1"]
    assert list(turns.of_text("Once")) == []


def test_steps_without_messages_or_with_ids_as_prompt_are_no_turns():
    """They cannot be found again."""
    odd = chat_step("s1", "no list", assistant("Hi"), [1], [2])
    by_ids = text_step("s2", [1, 2], " upon", [1, 2], [3])

    assert len(turns_of(odd, by_ids)) == 0


def test_a_response_without_a_message_is_no_turn():
    """Engines may return anything."""
    assert len(turns_of(chat_step("s1", [USER], None, [1], [2]))) == 0
    assert ids(1) == only(turns_of(chat_step("s1", [USER], assistant(None), [1], [2]))).prompt_ids


def test_tool_calls_are_found_by_the_ids_that_clients_receive():
    """Those without an id of their own have one of the dialect: a prefix, the step id and the index."""
    calls = [
        {"id": "c1", "function": {"name": "f", "arguments": '{"a":1}'}},
        {"id": "c1", "function": {"name": "f", "arguments": '{"a": "cut'}},
        {"id": None, "function": {"name": "g", "arguments": ""}},
        {"id": "c4", "function": 4},
        5,
    ]
    turns = turns_of(
        chat_step("s1", [USER], {"role": "assistant", "content": None, "tool_calls": calls}, [1], [2, STOP])
    )
    names = ("c1", "toolu_s1_1", "call_s1_2", "c4", "toolu_s1_4", "unknown")

    assert [turns.sampled_call(name) for name in names[:2]] == [
        {"name": "f", "arguments": '{"a":1}'},
        {"name": "f", "arguments": '{"a": "cut'},
    ]
    assert turns.sampled_call(names[2]) == {"name": "g", "arguments": ""}
    assert [turns.sampled_call(name) or None for name in names[3:]] == [None, None, None]


def test_the_tool_calls_of_a_step_without_ids_are_found():
    """Engines that return no token ids have agents that send calls back, too."""
    calls = [{"id": "c1", "function": {"name": "f", "arguments": "{}"}}]
    step = chat_step("s1", [USER], {"role": "assistant", "content": None, "tool_calls": calls}, [], [])

    assert turns_of(step).sampled_call("c1") == {"name": "f", "arguments": "{}"}


def test_the_size_of_tool_calls_of_a_step_without_ids_is_counted():
    """The limit of the cache applies to everything that is kept."""
    calls = [{"id": f"c{number}", "function": {"name": "f", "arguments": "x" * 1000}} for number in range(3)]
    reply = {"role": "assistant", "content": None, "tool_calls": calls}
    with_ids = turns_of(chat_step("s1", [USER], reply, [1], [2]))
    without_ids = turns_of(replace(chat_step("s1", [USER], reply, [1], []), prompts=()))
    without_calls = turns_of(replace(chat_step("s1", [USER], assistant("Hi"), [1], []), prompts=()))

    assert len(without_ids) == 0
    assert 3000 < without_ids.size < with_ids.size
    assert without_calls.size == 0


def test_the_longest_reply_is_known():
    """Comparing it may take longer than reading the call that is compared."""
    long, short = assistant("a", reasoning="b" * 999), assistant("a" * 9, tool_calls=[tool_call("c" * 99)])

    assert turns_of(chat_step("s1", [USER], long, [1], [2]), chat_step("s2", [USER], short, [1], [2])).longest == 1000
