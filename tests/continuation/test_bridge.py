"""Situations in which a simpler algorithm sends wrong ids, with chat templates of different families in both modes."""

from dataclasses import replace

import orjson
import pytest
from tests.support.bridge_oracle import (
    begins_with_the_recorded_ids,
    ends_as_rendered,
    keeps_the_history,
    not_shown,
    wrong_bridge,
)
from tests.support.chat_templates import OTHER_STOP
from tests.support.continued_rollouts import TOOLS, USER, Boundary, Plan, Rollout, Turn
from tests.support.template_engine import Call, Reply
from tests.support.turns import assistant, tool_call

from proxy.continuation.bridge import (
    OTHER_WORD,
    WORD,
    comparable,
    other_forms,
    other_texts,
    repeats_a_part,
    stand_in,
    what_is_missing,
)

FAMILIES = (
    "plain", "qwen2_5", "qwen3", "qwen3_5_think", "llama3_1", "gemma4_v2", "glm4moe", "gptoss", "deepseekv3", "phi3",
    "muse_glimmer", "nemotron_3_nano", "no_special_close", "separator_at_the_start", "stop_after_each_piece",
)  # fmt: skip
BIRDS = Turn(Reply("Seven red birds."))
CALL = Call("look_up", '{"x":"a"}')


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def result(text: str, call: Call = CALL) -> dict:
    return {"role": "tool", "tool_call_id": call.id, "content": text}


def run(plan: Plan) -> list[Boundary]:
    """Return the calls of a rollout after the first, and assert that each obeys the laws."""
    boundaries = list(Rollout(plan).run())
    for boundary in boundaries:
        if boundary.is_continued:
            assert begins_with_the_recorded_ids(boundary), boundary.describe()
            assert ends_as_rendered(boundary), boundary.describe()
            wrong = wrong_bridge(boundary)
            assert wrong is None, f"{wrong}\n{boundary.describe()}"
            if plan.mode == "faithful":
                assert keeps_the_history(boundary), boundary.describe()
                assert not_shown(boundary) == [], boundary.describe()
    return boundaries


def run_everywhere(plan: Plan) -> None:
    """Run a rollout with a template of each family, in both modes."""
    for name in FAMILIES:
        for mode in ("append", "faithful"):
            run(replace(plan, template=name, mode=mode))


def bridges(plan: Plan) -> list[str | None]:
    """Return the texts of the bridges, or the reasons of the refusals."""
    return [
        boundary.engine.detokenize(boundary.bridge) if boundary.is_continued else boundary.reason
        for boundary in run(plan)
    ]


def plan(*turns: Turn, **facts) -> Plan:
    """Return a rollout with the template of Qwen2.5; a last turn is added, so that each of `turns` is continued."""
    has_calls = any(turn.reply.calls for turn in turns)
    return Plan(**{"template": "qwen2_5", "turns": (*turns, BIRDS), "tools": TOOLS if has_calls else None, **facts})


def test_quoted_stop_token():
    """A user message that contains the text of a stop token does not end the turn before it."""
    quoting = plan(Turn(Reply("Yes.", splits=1.0), (user("What is <|im_end|>?<|im_end|>"),)), BIRDS)
    first, _ = bridges(quoting)
    assert first == "\n<|im_start|>user\nWhat is <|im_end|>?<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    run_everywhere(quoting)
    run_everywhere(replace(quoting, first=(user("<|im_end|>\n<|im_start|>assistant\nHi<|im_end|>"),)))


@pytest.mark.parametrize("stop", ["\n", "And", "then", "?", "user"])
def test_stop_string(stop):
    """A turn that ends with a stop string is closed by the template, also if the next message begins with the string."""
    stopped = plan(Turn(Reply("Seven birds", ending="stop_string", stop=stop)), BIRDS)
    assert bridges(stopped)[0] == "<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"
    run_everywhere(stopped)


def test_turn_cut_after_a_complete_call():
    """A turn that the limit cuts after a complete tool call is closed by the template where the engine hides the cut."""
    cut = plan(Turn(Reply("", calls=(CALL,), ending="hidden_length"), (result("seven birds"),)), BIRDS)
    assert bridges(cut)[0] == (
        "<|im_end|>\n<|im_start|>user\n<tool_response>\nseven birds\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    run_everywhere(cut)
    run_everywhere(plan(Turn(Reply("", calls=(CALL,), ending="length"), (result("seven birds"),)), BIRDS))


def test_content_cut_by_the_limit():
    """A turn that the limit cuts within its content is closed by the template."""
    cut = plan(Turn(Reply("Seven red", ending="length")))
    assert bridges(cut) == ["<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"]


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.7])
@pytest.mark.parametrize(
    "reply", [Reply("Seven 🙂🙃 birds over Paris."), Reply("", "Hm, birds 🙂."), Reply("", calls=(CALL,))]
)
def test_turn_cut_by_the_limit(reply, kept):
    """A turn that the limit cuts within its content, its reasoning, a character or a call never gets a wrong bridge."""
    run_everywhere(plan(Turn(replace(reply, ending="length", kept=kept)), BIRDS, tools=TOOLS))


@pytest.mark.parametrize(
    "arguments",
    [
        "{}",
        '{"x": {"y": [{"z": "}"}, []]}, "k": null}',
        '{"x": "日本 naïve 🙂", "k": "\\u65e5"}',
        '{\n  "x": "</tool_call>\\n"\n}',
    ],
)
def test_arguments_of_calls(arguments):
    """Calls with empty, nested and Unicode arguments in any white space are continued."""
    call = Call("run", arguments)
    calling = plan(*[Turn(Reply("", "Hm.", calls=(call,)), (result("red", call),))] * 2)
    assert None not in bridges(calling)
    assert all(boundary.is_continued for boundary in run(calling))
    run_everywhere(calling)


def test_parallel_calls_with_a_missing_result():
    """Parallel calls are continued, also if one of the results is missing or the results have another order."""
    calls = (CALL, Call("run", '{"x":1}', "call_2"), Call("run", "{}", "call_3"))
    reply = Reply("Three.", calls=calls)
    for results in (calls[:2], calls[1:], calls[::-1]):
        calling = plan(Turn(reply, tuple(result("red", call) for call in results)), BIRDS)
        assert all(boundary.is_continued for boundary in run(calling))
        run_everywhere(calling)


def test_reasoning_in_the_content():
    """Without a reasoning parser, a template that drops `<think>…</think>` from the content is noticed in `faithful`."""
    thinking = plan(Turn(Reply("Four.", "Two and two.", parsed=False)), BIRDS)
    reasons = {
        (name, mode): run(replace(thinking, template=name, mode=mode))[0].reason
        for name in ("qwen2_5", "qwen3")
        for mode in ("append", "faithful")
    }
    assert reasons == {
        ("qwen2_5", "append"): None,
        ("qwen2_5", "faithful"): None,
        ("qwen3", "append"): None,
        ("qwen3", "faithful"): "reasoning_stripped",
    }
    run_everywhere(thinking)
    run_everywhere(plan(Turn(Reply("unopened</think>Four.")), Turn(Reply("<think>")), BIRDS))


def test_several_stop_ids():
    """A stop token that the template does not write takes the place of its own in `append`; `faithful` refuses."""
    stopped = plan(Turn(Reply("Yes.", stop_token=OTHER_STOP)), BIRDS)
    assert bridges(stopped)[0] == "\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"
    assert bridges(replace(stopped, mode="faithful"))[0] == "other_stop"
    assert (
        bridges(replace(stopped, template="gptoss"))[0] == "<|start|>user<|message|>And then?<|end|><|start|>assistant"
    )
    run_everywhere(
        plan(Turn(Reply("Yes.", stop_token=OTHER_STOP)), Turn(Reply("", calls=(CALL,), stop_token=OTHER_STOP)), BIRDS)
    )


@pytest.mark.parametrize("name", ["begins_only", "separator_at_the_start", "glm4moe", "no_special_close"])
def test_what_begins_a_message_is_never_replaced(name):
    """If the template only writes tokens or lines between messages, a turn with another stop token is refused."""
    added = ({"role": "assistant", "content": "I add this."}, user("And then?"))
    for new in (BIRDS.new, added):
        assert bridges(plan(Turn(Reply("Yes.", stop_token=OTHER_STOP), new), template=name))[0] in {
            "other_stop",
            "close",
        }


def test_first_tool_loop_of_a_process():
    """Calls are continued although no turn has ended with `stop`, which would prove that its last token is a stop token."""
    calling = Turn(Reply("", calls=(CALL,)), (result("red"),))
    for name in ("nemotron_3_nano", "qwen3", "glm4moe", "gemma4", "gptoss", "deepseekv3", "llama3"):
        boundaries = run(plan(calling, calling, template=name, knows_stops=False))
        assert all(boundary.is_continued for boundary in boundaries), boundaries[0].describe()


@pytest.mark.parametrize("stop_token", [None, OTHER_STOP])
def test_unknown_end_of_calls(stop_token):
    """If the last token of calls may be a stop token of the model or not, no bridge repeats or omits the end of the turn."""
    calls = (CALL, Call("run", '{"x":1}', "call_2"))
    for reply in (Reply("", calls=calls), Reply("Hm.", calls=calls), Reply("", "Hm.", calls=calls[:1])):
        for ending in ("stop", "hidden_length"):
            unknown = Turn(replace(reply, ending=ending, stop_token=stop_token), (result("red"), result("7", calls[1])))
            run_everywhere(plan(unknown, unknown, BIRDS, knows_stops=False))
            run_everywhere(plan(unknown, unknown, BIRDS, knows_stops=False, drops_specials=True))


def test_content_after_the_results():
    """Where the template moves content behind the results of calls, the results follow what was sampled in `append`."""
    calling = plan(Turn(Reply("Let me look.", calls=(CALL,)), (result("seven birds"),)), template="gemma4")
    assert bridges(calling) == ['response:look_up{value:<|"|>seven birds<|"|>}<tool_response|>']
    assert bridges(replace(calling, mode="faithful")) == ["close"]


@pytest.mark.parametrize("ending", ["stop", "length"])
def test_reply_that_is_all_reasoning(ending):
    """In `append` it is continued also where the template drops it, and its end is located by a text in its place."""
    thinking = plan(Turn(Reply("", "The cat sees birds.", ending=ending, kept=0.5)), BIRDS, template="qwen3")
    end = "\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"
    assert bridges(thinking)[0] == ("<|im_end|>" if ending == "length" else "") + end
    assert bridges(replace(thinking, mode="faithful"))[0] == "close"
    run_everywhere(thinking)


@pytest.mark.parametrize("streams", [False, True])
def test_turn_cut_in_a_call(streams):
    """In `append` the template's end of the turn follows what was sampled of the call, and not the rest of the call."""
    new = (result("failed"),) if streams else (user("Go on."),)
    cut = plan(Turn(Reply("", "Hm.", (CALL,), ending="length", kept=0.5, streams=streams), new), BIRDS)
    shown = "<tool_response>\nfailed\n</tool_response>" if streams else "Go on."
    assert bridges(cut)[0] == f"<|im_end|>\n<|im_start|>user\n{shown}<|im_end|>\n<|im_start|>assistant\n"
    run_everywhere(cut)


@pytest.mark.parametrize(
    ("stop", "included", "faithful"),
    [("\n", "", True), ("irds", "", False), ("irds", "irds", True), ("ir", "ir", False)],
)
def test_stop_string_within_a_token(stop, included, faithful):
    """`faithful` continues only if the visible text ends where a token does, since the prompt has the whole token."""
    text, rest = ("Seven", " birds") if stop != "\n" else ("Seven birds", "\n")
    visible = (text + rest).partition(stop)[0] + included
    stopped = Reply(visible, ending="stop_string", stop=(text + rest).removeprefix(visible), splits=0.0)
    (appended, _), (kept, _) = [
        run(plan(Turn(replace(stopped, stop_reason=stop)), BIRDS, mode=mode)) for mode in ("append", "faithful")
    ]
    assert (appended.is_continued, kept.is_continued) == (True, faithful)
    reason = None if visible == text + rest else "stop_string"  # the template writes what was sampled
    assert [appended.reason, kept.reason] == [reason] * 2


def test_text_parts_that_become_one_text():
    """An agent may send parts first, and then the text that the engine makes of them."""
    parts = {"role": "user", "content": [{"type": "text", "text": text} for text in ("Where is", "the lake?")]}
    joining = plan(BIRDS, BIRDS, first=(parts,), joins_parts=True)
    assert all(boundary.is_continued for boundary in run(joining))
    run_everywhere(joining)


def test_stop_token_of_the_client():
    """A token of the client's `stop_token_ids` ends no turn of the template."""
    stopped = plan(Turn(Reply("Seven", ending="client_stop", stop="\n"), (user("a\nb"),)), BIRDS)
    for boundary in run(stopped):
        assert boundary.is_continued or boundary.reason == "close"
    run_everywhere(stopped)


def test_other_tools():
    """A call with another list of tools is refused; a later call continues the last turn that was sampled with its tools."""
    other = replace(BIRDS, tools=TOOLS[:1])
    boundaries = run(plan(BIRDS, other, other, tools=TOOLS))
    assert [boundary.reason for boundary in boundaries] == ["options", None, None]
    assert [boundary.found and boundary.found.turn.step_id for boundary in boundaries] == [None, "001", "000"]


@pytest.mark.parametrize("name", ["date", "date_in_messages"])
def test_other_date(name):
    """Where the date of a rendering changes between turns, the call is refused."""
    for mode in ("append", "faithful"):
        first, second, third = run(plan(BIRDS, BIRDS, replace(BIRDS, day=1), template=name, mode=mode))
        assert first.is_continued or (name, mode) == ("date_in_messages", "faithful")  # the turn itself gets a date
        assert not second.is_continued
        assert second.reason == "history"
        assert first.is_continued == third.is_continued
        run(plan(BIRDS, BIRDS, BIRDS, template=name, mode=mode, clock=True))


def test_unchanged_step_between_continued_ones():
    """A step that was sent as it came is continued like a first one, by its own prompt ids."""
    calling = Turn(Reply("", "Hm.", calls=(CALL,)), (result("red"),))
    turns = (calling, calling, replace(calling, as_it_came=True), calling, calling)
    boundaries = run(plan(*turns))
    assert [boundary.is_continued for boundary in boundaries] == [True, False, True, True, True]
    run_everywhere(plan(*turns))


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1", "deepseekv3", "nemotron_3_nano"])
def test_many_turns(name):
    """The last prompt of ten turns in `append` begins with the ids of all turns, exactly as they were sampled."""
    calling = Turn(Reply("", "Hm.", calls=(CALL,)), (result("red"),))
    boundaries = run(plan(*[calling, Turn(Reply("Seven 🙂 birds.", "So?", splits=0.6))] * 5, template=name))
    assert len(boundaries) == 10
    ids = boundaries[-1].result.ids
    for boundary in boundaries:
        kept = boundary.result.kept
        assert boundary.result.ids[:kept] == ids[:kept]
        assert boundary.found.turn.ids == ids[kept - len(boundary.found.turn.ids) : kept]


def test_several_choices():
    """With n > 1, the choice that the agent sends back is continued."""
    reply, other = Reply("Seven red birds."), Reply("Seven blue birds.")
    (boundary, _) = run(plan(Turn(other, others=(reply, reply)), BIRDS))
    assert boundary.found.turn.choice == 0
    assert boundary.found.reply["content"] == "Seven blue birds."


def test_rollback():
    """After a rollback, the turn before the removed one is continued."""
    boundaries = run(plan(BIRDS, Turn(Reply("No."), rollback=True), BIRDS))
    assert [boundary.found.turn.step_id for boundary in boundaries] == ["000", "000", "002"]
    assert all(boundary.is_continued for boundary in boundaries)


def test_hidden_call():
    """A turn is refused if the message does not contain all calls that were sampled."""
    hiding = Reply("", calls=(CALL, replace(CALL, id="call_2")), shown_calls=1)
    assert bridges(plan(Turn(hiding, (result("red"),))))[0] == "hidden_output"
    run_everywhere(plan(Turn(hiding, (result("red"),)), BIRDS))


def test_reply_with_an_empty_message():
    """What parsers drop, such as special tokens, stays in `append`; in `faithful` the template would not show it."""
    dropped = plan(Turn(Reply("<|im_start|>", drops=True)), BIRDS)
    assert bridges(dropped)[0] == "\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"
    assert bridges(replace(dropped, mode="faithful"))[0] == "hidden_output"
    run_everywhere(dropped)


def test_empty_reply():
    """A turn that consists of a stop token is continued."""
    assert (
        bridges(plan(Turn(Reply("")), BIRDS))[0] == "\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"
    )
    run_everywhere(plan(Turn(Reply("")), Turn(Reply("", "Only thoughts.")), BIRDS))


@pytest.mark.parametrize("name", ["message_count", "newest_first", "window", "system_first", "beginning_of_replies"])
def test_rewritten_history(name):
    """Where the template renders earlier messages differently, a call is only continued in `append`, and by its own turn."""
    added = ({"role": "system", "content": "Be brief."}, user("Why?"))
    for reply in (
        Reply("Seven red birds"),
        Reply("Seven", ending="length"),
        Reply("Seven", ending="stop_string", stop="\n"),
    ):
        for mode in ("append", "faithful"):
            run(plan(Turn(reply), Turn(reply, added), Turn(reply), Turn(reply), template=name, mode=mode))


@pytest.mark.parametrize("name", ["quotes_the_reply", "quotes_the_beginning", "reply_twice"])
def test_repeated_reply(name):
    """Where the template writes a reply again after its turn, what lies between is not lost."""
    cut = Reply("Seven birds", ending="stop_string", stop="<")
    for reply in (cut, Reply("Seven birds."), Reply(" Seven ", splits=1.0), Reply("Yes.", "Hm.")):
        for mode in ("append", "faithful"):
            run(plan(Turn(reply), Turn(reply), template=name, mode=mode))


@pytest.mark.parametrize("name", ["all_results_again", "results_by_id", "window"])
def test_repeated_history(name):
    """A bridge begins directly after the turn, also if the rendering ends in the same way after an earlier message."""
    calls = [Call("run", '{"x":[1]}', f"call_{number}") for number in range(3)]
    turns = [Turn(Reply("", "Hm.", calls=(call,)), (result("red", call),)) for call in calls]
    for mode in ("append", "faithful"):
        run(plan(*turns, template=name, mode=mode))


def test_assistant_messages_of_the_agent():
    """Assistant messages that no step sampled, before or after a turn, are rendered by the template."""
    added = ({"role": "assistant", "content": "I add this."}, user("And then?"))
    run_everywhere(
        plan(Turn(Reply("Yes."), added), BIRDS, first=(USER, {"role": "assistant", "content": "An example."}, USER))
    )
    for mode in ("append", "faithful"):
        run(plan(Turn(Reply("Yes."), added), BIRDS, template="merged_assistants", mode=mode))


@pytest.mark.parametrize("failing", [1, 2, 3, 4, 5, 7])
def test_failing_lookups(failing):
    """A lookup that fails never leads to a wrong bridge: the call is refused, or sent by what is known."""
    calling = Turn(Reply("", "Hm.", calls=(CALL,)), (result("red"),))
    run_everywhere(plan(calling, Turn(Reply("Yes. ", "So?")), calling, failing=failing))


def test_lookups_that_render_differently():
    """No call is continued where lookups render the messages differently from calls, such as without tools."""
    turns = (BIRDS, Turn(Reply("", "Hm.", calls=(CALL,)), (result("red"),)), BIRDS)
    for name in FAMILIES:
        if name not in {"llama3_1", "deepseekv3", "phi3"}:  # which render this conversation alike without tools
            for mode in ("append", "faithful"):
                boundaries = run(plan(*turns, template=name, mode=mode, ignores_tools=True))
                assert not any(boundary.is_continued for boundary in boundaries), boundaries[0].describe()


def test_texts_without_special_tokens():
    """An engine that decodes ids without special tokens never gets a wrong bridge."""
    turns = (BIRDS, Turn(Reply("", "Hm.", calls=(CALL,)), (result("red"),)), Turn(Reply(" Yes\n", "So?")))
    run_everywhere(plan(*turns, drops_specials=True))
    run_everywhere(plan(Turn(Reply("Seven birds", ending="stop_string", stop="\n")), *turns, drops_specials=True))


@pytest.mark.parametrize("change", ["as_parts", "renames", "trims", "keeps_reasoning", "rewrites"])
def test_what_agents_change(change):
    """A turn is continued if the agent sends its text as parts, trims it, or changes ids and white space of calls."""
    calling = Turn(Reply("Let me look. ", "Hm.", calls=(CALL,)), (result("red"),))
    for changed in (False, True):
        boundaries = run(plan(calling, Turn(Reply(" Yes.\n", "So?")), calling, **{change: changed}))
        assert all(boundary.is_continued for boundary in boundaries), boundaries[0].describe()
    run_everywhere(plan(calling, BIRDS, calling, **{change: True}))


@pytest.mark.parametrize(
    ("reply", "shown", "missing"),
    [
        (assistant("Yes"), "Yes<end>", None),
        (assistant(" Yes \n"), "<a>Yes<end>", None),
        (assistant("Yes"), "<end>", "content_stripped"),
        (assistant("Yes", reasoning="Hm"), "Yes<end>", "reasoning_stripped"),
        (assistant("Yes", reasoning="Hm"), "<think>\nHm\n</think>Yes<end>", None),
        (assistant("<think>Hm</think>Yes"), "Yes<end>", "reasoning_stripped"),
        (assistant("<think>\n\n</think>Yes"), "Yes<end>", None),
        (assistant("Hm</think>Yes"), "Yes<end>", "reasoning_stripped"),
        (assistant("<think>a</think><think>b</think>Yes"), "<think>a</think><think>b</think>Yes<end>", None),
        (assistant("<think>a</think><think>b</think>Yes"), "<think>a</think>Yes<end>", "reasoning_stripped"),
        (assistant("<think>a</think><think>a</think>Yes"), "<think>a</think>Yes<end>", None),
        (
            assistant("<think>a</think><think>b</think>Yes"),
            "<think>b</think><think>a</think>Yes<end>",
            "reasoning_stripped",
        ),
        (assistant("<think>a<think>b</think>Yes"), "<think>b</think>Yes<end>", "reasoning_stripped"),
        (assistant("<think>Yes"), "<think>Yes<end>", None),
        (assistant(None, tool_calls=[tool_call("{}")] * 2), "<call>add</call><call>add</call>", None),
        (assistant(None, tool_calls=[tool_call("{}")] * 2), "<call>add</call>", "tool_calls_stripped"),
        (assistant(None, tool_calls=[tool_call("{}"), tool_call("{}", "sub")]), "sub add", "tool_calls_stripped"),
    ],
)
def test_a_missing_part_is_named(reply, shown, missing):
    """Whitespace and empty thoughts are no parts."""
    assert missing == what_is_missing(reply, shown)


def test_texts_are_compared_without_whitespace_and_empty_thoughts():
    """Templates add and drop both."""
    assert comparable("<think>\n\n</think>\n\nYes sir") == comparable("Yes  sir\n")
    assert comparable("<think>Hm</think>Yes") != comparable("Yes")


@pytest.mark.parametrize(
    "reply",
    [
        assistant("Yes"),
        assistant("Yes", reasoning="Hm"),
        assistant(None, tool_calls=[tool_call("{}")]),
        assistant("Yes", tool_calls=[tool_call('{"x": 1}'), tool_call("", name="sub", call_id="call-2")]),
        assistant("<think>Hm</think>Yes"),
    ],
)
def test_a_variant_has_the_parts_of_the_reply_with_other_texts(reply):
    """Names and ids of calls are kept, because templates and tool messages refer to them."""
    one, other = stand_in(reply, WORD), stand_in(reply, OTHER_WORD)

    assert reply.keys() == one.keys() == other.keys()
    assert [bool(one[name]) for name in reply] == [bool(reply[name]) for name in reply]
    for ours, theirs in zip(one.get("tool_calls", []), reply.get("tool_calls", []), strict=True):
        assert (theirs["id"], theirs["function"]["name"]) == (ours["id"], ours["function"]["name"])
        assert WORD in orjson.loads(ours["function"]["arguments"])["x"]
    assert one != other


def test_an_empty_reply_gets_a_word():
    """Templates may drop empty turns."""
    assert WORD in stand_in(assistant(None), WORD)["content"]


def test_other_texts_begin_with_another_letter_than_every_new_text():
    """So that two renderings differ where the first new text begins."""
    texts = ["kiwi", "Bolt", " ufer", "Xeno"]
    new = [{"role": "user", "content": text} for text in texts]
    new.append({"role": "user", "content": [{"type": "text", "text": "Jade"}]})
    word, others = other_texts(new)

    assert [message["role"] for message in new] == [message["role"] for message in others]
    first = {message["content"][0].lower() for message in others[:4]} | {others[4]["content"][0]["text"][0].lower()}
    assert first.isdisjoint("kbuxj")
    assert word == others[0]["content"]
    assert others[4]["content"][0] == {"type": "text", "text": word}


def test_texts_that_begin_with_every_letter_have_no_others():
    """The turn is then not continued by twins."""
    every = [{"role": "user", "content": letter} for letter in "abcdefghijklmnopqrstuvwxyz0123456789"]

    assert other_texts(every)[0] == ""


def test_other_forms_have_the_calls_alone_or_a_text():
    """A reply that is a text, or calls, has no such form of its own."""
    text, calls = assistant(WORD), [tool_call("{}")]

    assert other_forms(assistant("Yes")) == []
    assert other_forms(assistant(None, reasoning="Hm")) == other_forms(assistant("Yes", reasoning="Hm")) == [text]
    assert other_forms(assistant(None)) == other_forms(assistant(None, tool_calls=calls)) == [text]
    alone = assistant("", reasoning="", tool_calls=calls)
    assert other_forms(assistant("Yes", reasoning="Hm", tool_calls=calls)) == [alone, text]


def test_the_word_of_each_part_has_another_number():
    """A rendering in which a part occurs twice is recognized, in upper or lower case."""
    reply = assistant("Yes", reasoning="Hm", tool_calls=[tool_call("{}"), tool_call("{}")])
    made = stand_in(reply, WORD)
    arguments = [orjson.loads(call["function"]["arguments"])["x"] for call in made["tool_calls"]]
    words = [
        made["content"],
        made["reasoning"],
        *arguments,
        stand_in(assistant("<think>Hm</think>Yes"), WORD)["content"],
    ]

    assert words == [WORD, f"2{WORD}", f"3{WORD}", f"4{WORD}", f"<think>\n1{WORD}\n</think>\n\n{WORD}"]
    assert not repeats_a_part(" ".join(words[:4]))
    assert repeats_a_part(f"{words[0]} > {words[0]}")
    assert repeats_a_part(f"{words[2]} {words[1].upper()} {words[1].upper()}")
