"""The turn that a call continues: by messages, by what agents send back, and the reasons for which there is none."""

import pytest
from tests.support.turns import STOP, USER, assistant, chat_step, text_step, tool_call, turns_of

from proxy.continuation.bridge import continue_text
from proxy.continuation.turns import Ambiguous, Match, Sampler, match, match_text
from proxy.continuation.types import Detokenize, LookupFailed, Tokenize
from proxy.trajectory.step import EngineFacts

MORE = {"role": "user", "content": "And then?"}
REPLY = assistant("Hi there", reasoning="They greet.", refusal=None, tool_calls=[])
FIRST = chat_step("s1", [USER], REPLY, [1, 2], [3, STOP], index=0)


def found(turns, messages, mode="faithful", *, kind="vllm", model="policy", policy="default", **body):
    sampler = Sampler(kind, model, policy)
    return match(turns, {"model": "policy", "messages": messages, **body}, sampler, mode=mode)


def test_a_call_that_sends_the_reply_back_continues_its_turn():
    """The reply is restored as the engine returned it, with its reasoning and without its nulls."""
    result = found(turns_of(FIRST), [USER, assistant("Hi there"), MORE])

    assert isinstance(result, Match)
    assert result.turn.step_id == "s1"
    assert assistant("Hi there", reasoning="They greet.") == result.reply
    assert (result.history, result.new) == ([USER], [MORE])


def test_a_first_call_continues_nothing():
    """No reason is counted: the call has no assistant message, or the rollout has no step."""
    assert found(turns_of(), [USER, assistant("Hi there"), MORE]) is None
    assert found(turns_of(FIRST), [USER]) is None


@pytest.mark.parametrize(
    "messages",
    [
        [USER, assistant("Hi  there!"), MORE],
        [USER, assistant("Hi  there"), MORE],
        [{"role": "user", "content": "Hello!"}, assistant("Hi there"), MORE],
        [{"role": "system", "content": "Be brief."}, USER, assistant("Hi there"), MORE],
    ],
    ids=["a word", "whitespace within", "the question", "another system message"],
)
def test_an_edited_conversation_continues_nothing(messages):
    """An agent that changed the words started another conversation."""
    assert found(turns_of(FIRST), messages) == "edited"


@pytest.mark.parametrize("content", ["Hi there", " Hi there\n", [{"type": "text", "text": "Hi there"}]])
def test_whitespace_around_a_reply_and_text_parts_are_no_edit(content):
    """Agents trim replies, and write content as parts."""
    result = found(turns_of(FIRST), [USER, assistant(content), MORE])

    assert isinstance(result, Match)
    assert result.reply["content"] == "Hi there"


def test_tool_calls_are_compared_as_json_and_restored_as_sampled():
    """Their ids are those that the agent sends back, because its tool messages refer to them."""
    reply = assistant(None, tool_calls=[tool_call('{"x":  1}')])
    turns = turns_of(chat_step("s1", [USER], reply, [1], [2, STOP], finish="tool_calls"))
    sent_back = assistant("", tool_calls=[tool_call('{"x":1}', call_id="own")])
    result = found(turns, [USER, sent_back, {"role": "tool", "tool_call_id": "own", "content": "2"}])

    assert isinstance(result, Match)
    assert [tool_call('{"x":  1}', call_id="own")] == result.reply["tool_calls"]
    assert found(turns, [USER, assistant("", tool_calls=[tool_call('{"x":2}')]), MORE]) == "edited"


@pytest.mark.parametrize("content", ["", None])
def test_empty_content_is_kept_as_the_agent_sent_it(content):
    """Some templates write null differently from an empty text."""
    reply = assistant("" if content is None else None, tool_calls=[tool_call("{}")])
    turns = turns_of(chat_step("s1", [USER], reply, [1], [2, STOP], finish="tool_calls"))
    result = found(turns, [USER, assistant(content, tool_calls=[tool_call("{}")]), MORE])

    assert isinstance(result, Match)
    assert content == result.reply["content"]


@pytest.mark.parametrize(("kind", "joint"), [("vllm", "\n"), ("sglang", " ")])
def test_text_parts_may_become_the_text_that_the_engine_makes_of_them(kind, joint):
    """Only the rendering shows whether the prompt is the same; it is compared with the recorded one."""
    parts = [{"type": "text", "text": text} for text in ("Hello,", "you!")]
    engine = EngineFacts("main", kind, "1", "http://engine")
    step = chat_step("s1", [{"role": "user", "content": parts}], REPLY, [1, 2], [3, STOP], engine=engine)
    texts = [f"Hello,{joint}you!", "Hello,you!"]
    results = [found(turns_of(step), [{"role": "user", "content": text}, REPLY, MORE], kind=kind) for text in texts]

    assert isinstance(results[0], Match)
    assert results[1] == "edited"


def test_thoughts_that_the_agent_removes_from_the_content_are_restored_in_append_only():
    """In `faithful` the agent decides what the prompt contains."""
    turns = turns_of(chat_step("s1", [USER], assistant("<think>Hm</think>Yes"), [1], [2, STOP]))
    messages = [USER, assistant("Yes"), MORE]

    assert found(turns, messages) == "edited"
    result = found(turns, messages, "append")
    assert isinstance(result, Match)
    assert result.reply["content"] == "<think>Hm</think>Yes"


@pytest.mark.parametrize(
    ("reason", "body"),
    [
        ("options", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("options", {"chat_template_kwargs": {"enable_thinking": False}}),
        ("options", {"reasoning_effort": "low"}),
        ("options", {"tool_choice": "none"}),
        ("options", {"unknown_field": 1}),
        ("own_ids", {"kv_transfer_params": {"prompt_token_ids": [1]}}),
        ("own_ids", {"prompt_token_ids": [1]}),
        ("own_ids", {"input_ids": [1]}),
        ("echo", {"echo": True}),
        ("options", {"truncate_prompt_tokens": 100}),
        ("prefill", {"continue_final_message": True}),
        ("prefill", {"add_generation_prompt": False}),
    ],
)
def test_options_that_change_the_prompt_prevent_a_continuation(reason, body):
    """Unknown fields may change it."""
    assert reason == found(turns_of(FIRST), [USER, assistant("Hi there"), MORE], **body)


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": 0.3, "max_tokens": 5, "seed": 1, "stop": ["x"], "stream": True, "logprobs": True},
        {"response_format": {"type": "json_object"}, "n": 2, "user": "u", "tool_choice": "auto"},
    ],
)
def test_sampling_parameters_and_annotations_do_not_change_the_prompt(body):
    """They may differ between turns."""
    assert isinstance(found(turns_of(FIRST), [USER, assistant("Hi there"), MORE], **body), Match)


def test_another_model_or_kind_of_engine_prevents_a_continuation():
    """Its vocabulary may be another one."""
    messages = [USER, assistant("Hi there"), MORE]

    assert found(turns_of(FIRST), messages, kind="sglang") == "model"
    assert found(turns_of(FIRST), messages, model="other") == "model"


def test_a_call_continues_turns_of_its_own_policy():
    """Although the youngest turn with these messages and this reply is of another policy."""
    judged = chat_step("s2", [USER], REPLY, [1, 2], [3, STOP], index=1, policy="judge")
    longer = [USER, assistant("Hi there"), MORE, assistant("Later"), MORE]
    other = chat_step("s3", longer[:3], longer[3], [1, 2], [3, STOP], index=2, policy="judge")
    turns, messages = turns_of(FIRST, judged, other), [USER, assistant("Hi there"), MORE]

    assert [found(turns, messages, policy=policy).turn.step_id for policy in ("default", "judge")] == ["s1", "s2"]
    assert [found(turns, longer, policy=policy).turn.step_id for policy in ("default", "judge")] == ["s1", "s3"]
    assert found(turns, messages, policy="planner") == "model"


def test_content_that_is_not_text_prevents_a_continuation():
    """Engines render it themselves."""
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}

    assert found(turns_of(FIRST), [USER, assistant("Hi there"), image]) == "content"
    assert found(turns_of(FIRST), [USER, assistant("Hi there")]) == "prefill"


@pytest.mark.parametrize("facts", [{"problems": ("no_logprobs",)}, {"status": "partial"}, {"finish": "abort"}])
def test_flagged_partial_and_aborted_steps_are_not_continued(facts):
    """Their ids may not be those that were sampled."""
    turns = turns_of(chat_step("s1", [USER], REPLY, [1, 2], [3, STOP], **facts))

    assert found(turns, [USER, assistant("Hi there"), MORE]) == "flagged"


def test_the_longest_turn_is_continued_then_the_youngest_with_equal_ids():
    """A retry of the first call and a later turn match as well."""
    retry = chat_step("s2", [USER], REPLY, [1, 2], [3, STOP], index=1)
    later = chat_step("s3", [USER, assistant("Hi there"), MORE], assistant("Bye"), [1, 2, 3], [5, STOP], index=2)
    turns = turns_of(FIRST, retry, later)

    assert found(turns, [USER, assistant("Hi there"), MORE]).turn.step_id == "s2"
    end = [USER, assistant("Hi there"), MORE, assistant("Bye"), MORE]
    assert found(turns, end).turn.step_id == "s3"
    edited = [USER, assistant("Hi there"), MORE, assistant("Good bye"), MORE]
    assert found(turns, edited).turn.step_id == "s2"


@pytest.mark.parametrize(("prompt", "sampled"), [([1, 2], [4, STOP]), ([1, 4], [3, STOP])])
def test_equal_turns_with_different_ids_are_ambiguous(prompt, sampled):
    """Unless all but one are marked as undelivered; if all are, nothing is known."""
    turns = turns_of(FIRST, chat_step("s2", [USER], REPLY, prompt, sampled, index=1))
    messages = [USER, assistant("Hi there"), MORE]
    body = {"model": "policy", "messages": messages}

    assert [turn.step_id for turn in found(turns, messages).turns] == ["s1", "s2"]
    result = match(turns, body, Sampler("vllm", "policy"), mode="faithful", undelivered={"s2"})
    assert isinstance(result, Match)
    assert result.turn.step_id == "s1"
    both = match(turns, body, Sampler("vllm", "policy"), mode="faithful", undelivered={"s1", "s2"})
    assert isinstance(both, Ambiguous)


def test_reasoning_that_was_changed_is_rendered_in_faithful_and_refused_in_append():
    """In `faithful` an earlier turn may be continued, with what was sent after it."""
    later = chat_step(
        "s2", [USER, assistant("Hi there"), MORE], assistant("Bye", reasoning="Go."), [1, 2, 3], [5, STOP], index=1
    )
    turns = turns_of(FIRST, later)
    messages = [USER, assistant("Hi there"), MORE, assistant("Bye", reasoning="Stay."), MORE]

    result = found(turns, messages)
    assert isinstance(result, Match)
    assert ("s1", messages[2:]) == (result.turn.step_id, result.new)
    assert found(turns, messages, "append") == "edited"
    assert found(turns, [USER, assistant("Hi there", reasoning="They leave."), MORE]) == "edited"


def test_the_agent_and_the_steps_that_it_names_distinguish_equal_turns():
    """The header X-Agent-Name; the ids of responses and items of the Responses API."""
    mine = chat_step("s1", [USER], REPLY, [1, 2], [3, STOP], index=0, extra={"agent": "a"})
    theirs = chat_step("s2", [USER], REPLY, [1, 2], [4, STOP], index=1, extra={"agent": "b"})
    body = {"model": "policy", "messages": [USER, assistant("Hi there"), MORE]}
    by_agent = match(turns_of(mine, theirs), body, Sampler("vllm", "policy", agent="a"), mode="faithful")
    by_step = match(turns_of(mine, theirs), body, Sampler("vllm", "policy", agent="a", steps={"s2"}), mode="faithful")

    assert (by_agent.turn.step_id, by_step.turn.step_id) == ("s1", "s2")


@pytest.mark.parametrize(
    "body", [{"prompt_token_ids": [1]}, {"input_ids": [1]}, {"kv_transfer_params": {"prompt_token_ids": [1]}}]
)
def test_a_call_with_prompt_ids_of_its_own_is_no_turn(body):
    """Its messages are not its prompt."""
    assert None is found(turns_of(chat_step("s1", [USER], REPLY, [1], [3, STOP], body=body)), [USER, REPLY, MORE])


def test_the_name_that_the_agent_gives_to_a_reply_is_rendered():
    """The engine returns none."""
    result = found(turns_of(FIRST), [USER, assistant("Hi there", name="helper"), MORE])

    assert isinstance(result, Match)
    assert result.reply["name"] == "helper"


def test_earlier_turns_are_restored_as_the_continued_step_rendered_them():
    """A step that was sent unchanged rendered the agent's messages, so they are not restored for its successors."""
    messages = [USER, assistant("Hi there"), MORE]
    facts = {"continuation": {"step_id": "s1", "choice": 0, "kept": 4, "bridge": 1}}
    continued = chat_step("s2", messages, assistant("Bye"), [1, 2, 3, STOP, 7], [5, STOP], index=1, extra=facts)
    unchanged = chat_step("s2", messages, assistant("Bye"), [1, 2, 8], [5, STOP], index=1)
    call = [*messages, assistant("Bye"), MORE]

    assert found(turns_of(FIRST, continued), call).history[1]["reasoning"] == "They greet."
    assert "reasoning" not in found(turns_of(FIRST, unchanged), call).history[1]


def test_truncated_prompts_are_not_continued_even_if_the_earlier_call_has_the_same_limit():
    """The engine may truncate ids, too."""
    limit = {"truncate_prompt_tokens": 100}
    turns = turns_of(chat_step("s1", [USER], REPLY, [1, 2], [3, STOP], body=limit))

    assert found(turns, [USER, assistant("Hi there"), MORE], **limit) == "options"


TEXT = text_step("s1", "Once", " upon", [1, 2], [3, 4])


def run(turn, prompt, texts, tokens):
    """Return the result of a continuation with this detokenizer and tokenizer."""
    generator = continue_text(turn, prompt)
    lookup = next(generator)
    assert isinstance(lookup, Detokenize)
    try:
        lookup = generator.send(texts)
        assert isinstance(lookup, Tokenize)
        generator.send(tokens(lookup.text))
    except StopIteration as end:
        return end.value
    raise AssertionError("another lookup")


def found_text(prompt, *others, policy="default", **body):
    return match_text(turns_of(TEXT, *others), {"prompt": prompt, **body}, Sampler("vllm", "policy", policy))


def test_the_recorded_ids_are_kept_and_the_rest_is_tokenized():
    """Only the new text goes to the tokenizer."""
    result = run(found_text("Once upon a time"), "Once upon a time", " upon", lambda text: [len(text)])

    assert result.ids.tolist() == [1, 2, 3, 4, 7]
    assert (result.kept, result.bridge) == (4, 1)


def test_a_stop_token_must_be_in_the_prompts_text():
    """Otherwise the agent's prompt lacks a token that was sampled."""
    prompt = "Once upon<end> and"

    assert run(found_text(prompt), prompt, " upon<end>", lambda text: [len(text)]).ids.tolist() == [1, 2, 3, 4, 4]
    assert run(found_text("Once upon and"), "Once upon and", " upon<end>", len).reason == "close"


def test_other_prompts_and_other_options_are_not_continued():
    """A first prompt is no refusal."""
    assert found_text("Twice upon") is None
    assert found_text(["Once upon a"]) is None
    assert found_text("Once upon a", add_special_tokens=False) == "options"
    assert found_text("Once upon a", echo=True) == "echo"


def test_a_prompt_continues_a_text_of_its_own_policy():
    """Although one of another policy is longer."""
    judged = text_step("s2", "Once", " upon a", [1, 2], [3, 4], policy="judge")

    assert [found_text("Once upon a time", judged, policy=policy).step_id for policy in ("default", "judge")] == [
        "s1",
        "s2",
    ]
    assert found_text("Once upon a time", policy="judge") == "model"


def test_an_engine_without_a_tokenizer_fails_the_lookup():
    """The call is then sent unchanged."""
    with pytest.raises(LookupFailed):
        run(found_text("Once upon a"), "Once upon a", None, len)
    with pytest.raises(LookupFailed):
        run(found_text("Once upon a"), "Once upon a", " upon", lambda _: None)
