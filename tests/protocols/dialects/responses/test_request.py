"""Calls read as chat calls."""

import pytest
from responses_drawn import EARLIER, RICH

from proxy.errors import BadRequest
from proxy.protocols.dialects.responses.request import PASSED, read
from proxy.protocols.dialects.translation import ResolvedReferences, TranslationOptions
from proxy.protocols.sampling import SAMPLING_FIELDS

PLAIN = TranslationOptions()
WAYS = TranslationOptions(
    thinking={"chat_template_kwargs": {"enable_thinking": True, "x": 1}},
    not_thinking={"chat_template_kwargs": {"enable_thinking": False}},
)


def chat_of(options=PLAIN, **fields):
    """What is told of these fields beside the message."""
    chat = read({"input": "hi", **fields}, options)
    assert [{"role": "user", "content": "hi"}] == chat.pop("messages")
    return chat


def test_settings_have_their_names_in_chat():
    """Those that engines know beyond the dialect are passed as they are; null is absent."""
    assert {
        "model": "m",
        "temperature": 0,
        "top_p": 0.5,
        "max_tokens": 9,
        "top_k": 3,
        "seed": 1,
        "stop": ["x"],
    } == chat_of(model="m", temperature=0, top_p=0.5, max_output_tokens=9, top_k=3, seed=1, stop=["x"], min_p=None)
    assert {"stream": True, "stream_options": {"include_usage": True}} == chat_of(
        stream=True, stream_options={"include_obfuscation": True}
    )
    assert {} == chat_of(stream=False)


def test_what_chat_has_no_word_for_is_not_sent():
    """It is recorded with the body, as are fields that nobody knows."""
    assert {} == chat_of(
        store=False, metadata={"a": "b"}, truncation="auto", user="u", service_tier="flex", prompt_cache_key="k", n=2,
        include=["x"], max_tool_calls=1, text={"verbosity": "low"}, return_token_ids=True,
        context_management=[], nobody={"knows": 1}, background=False, conversation=None, previous_response_id="resp_1",
        max_tokens=3,
    )  # fmt: skip


def test_the_fields_that_are_passed_are_those_that_sampling_is_recorded_by():
    """But for those that the dialect says in its own words, or cannot tell."""
    said = {"n", "max_tokens", "max_completion_tokens", "response_format", "tool_choice"}

    assert set(SAMPLING_FIELDS) - said == PASSED


def test_logprobs_are_asked_for_by_include():
    """With as many alternatives as are named, and none by default."""
    wanted = ["message.output_text.logprobs"]

    assert {"logprobs": True, "top_logprobs": 0} == chat_of(include=wanted)
    assert {"logprobs": True, "top_logprobs": 2} == chat_of(include=wanted, top_logprobs=2)
    assert {} == chat_of(top_logprobs=2)


def test_formats_of_text():
    """A schema stands one level deeper in chat."""
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True, "description": None}

    assert {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
    } == chat_of(text={"format": form})["response_format"]
    assert {"response_format": {"type": "json_object"}} == chat_of(text={"format": {"type": "json_object"}})
    assert {} == chat_of(text={"format": {"type": "text"}})


@pytest.mark.parametrize(("effort", "thinks"), [("none", False), ("minimal", True), ("xhigh", True)])
def test_how_much_to_think(effort, thinks):
    """The client's word, and the fields of the configuration; what the client says itself goes before those."""
    chat = chat_of(WAYS, reasoning={"effort": effort, "summary": "auto"}, chat_template_kwargs={"x": 2})

    assert effort == chat["reasoning_effort"]
    assert {"enable_thinking": False, "x": 2} | ({"enable_thinking": True} if thinks else {}) == chat[
        "chat_template_kwargs"
    ]
    assert {"reasoning_effort": "low"} == chat_of(reasoning={"effort": "low"})
    assert {} == chat_of(WAYS, reasoning={"summary": "auto"})
    assert {"chat_template_kwargs": {"x": 2}} == chat_of(WAYS, chat_template_kwargs={"x": 2})


def test_an_engine_that_takes_developers_gets_each_message_as_it_came():
    """It makes of them what its own endpoint would, by its template."""
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"role": "user", "content": "u"},
        {"role": "developer", "content": "d"},
    ]
    resolved = ResolvedReferences(messages=[{"role": "system", "content": "e"}])
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    assert [("system", "i"), ("system", "e"), ("developer", parts), ("user", "u"), ("developer", "d")] == [
        (said["role"], said["content"])
        for said in read({"instructions": "i", "input": items}, TranslationOptions(has_developers=True), resolved)[
            "messages"
        ]
    ]


def test_for_other_engines_a_developer_is_a_system():
    """Also one that was sent before, to an engine that takes them."""
    resolved = ResolvedReferences(messages=[{"role": "user", "content": "u"}, {"role": "developer", "content": "d"}])

    assert ["user", "system", "system"] == [
        said["role"]
        for said in read({"input": [{"role": "developer", "content": "x"}]}, TranslationOptions(), resolved)["messages"]
    ]


@pytest.mark.parametrize(
    ("item", "goes_on"),
    [
        ({"type": "message", "role": "assistant", "content": "a", "status": "incomplete"}, True),
        ({"role": "assistant", "content": "a", "status": "in_progress"}, True),
        ({"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}], "status": "incomplete"}, True),
        ({"role": "assistant", "content": "a", "status": "completed"}, False),
        ({"role": "assistant", "content": "a"}, False),
        ({"role": "user", "content": "a", "status": "incomplete"}, False),
        ({"role": "assistant", "content": "a", "status": {}}, False),
        ({"role": "assistant", "content": "", "status": "incomplete"}, False),
        ({"role": "assistant", "content": [], "status": "incomplete"}, False),
        ({"type": "reasoning", "summary": [], "status": "incomplete"}, False),
        ({"type": "reasoning", "summary": [], "encrypted_content": "gAAAA", "status": "incomplete"}, False),
    ],
)
def test_a_last_reply_that_is_unfinished_is_gone_on_with(item, goes_on):
    """As its status says; any other is followed by a new one."""
    chat = read({"input": [{"role": "user", "content": "hi"}, item]}, TranslationOptions())

    assert goes_on is chat.get("continue_final_message", False)
    assert goes_on is (chat.get("add_generation_prompt") is False)


def test_thoughts_that_cannot_be_read_do_not_reopen_the_reply_before_them():
    """What is continued is what the last item says, and it says nothing here."""
    said = {"role": "assistant", "content": "a", "status": "completed"}
    lost = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA", "status": "incomplete"}

    assert "continue_final_message" not in read(
        {"input": [{"role": "user", "content": "hi"}, said, lost]}, TranslationOptions()
    )


def test_for_other_engines_systems_at_the_beginning_are_one():
    """Instructions, what was said before and the items' own; one in the middle stays where it is, and images stay apart."""
    image = {"role": "system", "content": [{"type": "input_image", "image_url": "http://x"}]}
    items = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "u"},
        {"role": "system", "content": "s"},
    ]
    resolved = ResolvedReferences(messages=[{"role": "system", "content": "e"}])

    assert [("system", "i\n\ne\n\nd"), ("user", "u"), ("system", "s")] == [
        (said["role"], said["content"])
        for said in read({"instructions": "i", "input": items}, TranslationOptions(), resolved)["messages"]
    ]
    parts = {"role": "developer", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}
    assert ["i\n\na\n\nb"] == [
        said["content"] for said in read({"instructions": "i", "input": [parts]}, TranslationOptions())["messages"]
    ]
    assert 2 == len(read({"instructions": "i", "input": [image]}, TranslationOptions())["messages"])
    assert 1 == len(read({"instructions": "", "input": "hi"}, TranslationOptions())["messages"])


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"background": True}, 400, "background"),
        ({"conversation": "conv_1"}, 400, "conversation"),
        ({"prompt": {"id": "p"}}, 400, "prompt"),
        ({"input": None}, 422, "input"),
        ({"model": 1}, 422, "model"),
        ({"instructions": []}, 422, "instructions"),
        ({"stream": "yes"}, 422, "stream"),
        ({"temperature": "0"}, 422, "temperature"),
        ({"max_output_tokens": 1.5}, 422, "max_output_tokens"),
        ({"top_logprobs": True, "include": []}, 422, "top_logprobs"),
        ({"include": [1]}, 422, "include[0]"),
        ({"metadata": {"a": 1}}, 422, "metadata[0]"),
        ({"truncation": "x"}, 422, "truncation"),
        ({"text": {"format": {"type": "x"}}}, 422, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, 422, "text.format.schema"),
        ({"reasoning": {"effort": 1}}, 422, "reasoning.effort"),
        ({"chat_template_kwargs": 1}, 422, "chat_template_kwargs"),
        ({"previous_response_id": 1}, 422, "previous_response_id"),
    ],
)
def test_what_is_refused_is_named(fields, status, param):
    """400 for what is not served, 422 for what is wrong."""
    with pytest.raises(BadRequest) as refusal:
        read({"input": "hi", **fields}, TranslationOptions())

    assert (status, param) == (refusal.value.status, refusal.value.param)
    assert param.split("[")[0].split(".")[0] in refusal.value.message


def test_the_call_with_everything_is_read():
    """Else the test above would try nothing but refusals."""
    chat = read(RICH, TranslationOptions(), EARLIER)

    assert ["system", "user", "assistant", "tool", "tool", "assistant"] == [said["role"] for said in chat["messages"]]
    assert ["look"] == [tool["function"]["name"] for tool in chat["tools"]]
