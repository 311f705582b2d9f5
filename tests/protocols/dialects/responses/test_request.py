"""Responses requests, translated to chat."""

import pytest
from tests.support.responses_drawn import EARLIER, RICH

from proxy.errors import BadRequest
from proxy.protocols.dialects.base import ResolvedReferences, TranslationOptions
from proxy.protocols.dialects.responses.request import TRANSLATED, read
from proxy.protocols.sampling import SAMPLING_FIELDS

PLAIN = TranslationOptions()
THINKING = TranslationOptions(
    thinking={"chat_template_kwargs": {"enable_thinking": True, "x": 1}},
    not_thinking={"chat_template_kwargs": {"enable_thinking": False}},
)


def chat_fields(options=PLAIN, **fields):
    """Return the chat request of these fields without its message."""
    chat = read({"input": "hi", **fields}, options)
    assert chat.pop("messages") == [{"role": "user", "content": "hi"}]
    return chat


def test_settings_get_chats_names():
    """Parameters that engines know beyond OpenAI's are passed through; null is dropped."""
    assert chat_fields(
        model="m", temperature=0, top_p=0.5, max_output_tokens=9, top_k=3, seed=1, stop=["x"], min_p=None
    ) == {
        "model": "m",
        "temperature": 0,
        "top_p": 0.5,
        "max_tokens": 9,
        "top_k": 3,
        "seed": 1,
        "stop": ["x"],
    }
    assert chat_fields(stream=True, stream_options={"include_obfuscation": True}) == {
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert chat_fields(stream=False) == {}


def test_fields_without_a_meaning_in_chat_are_not_sent():
    """They are recorded in the body, as are unknown ones."""
    assert chat_fields(
        store=False, metadata={"a": "b"}, truncation="auto", user="u", service_tier="flex", prompt_cache_key="k", n=2,
        include=["x"], max_tool_calls=1, text={"verbosity": "low"}, return_token_ids=True,
        context_management=[], nobody={"knows": 1}, background=False, conversation=None, previous_response_id="resp_1",
        max_tokens=3,
    ) == {}  # fmt: skip


def test_every_recorded_sampling_parameter_is_passed_through_or_translated():
    passed = {name: 1 for name in SAMPLING_FIELDS if name not in TRANSLATED}

    assert passed == chat_fields(**passed)


def test_logprobs_are_requested_by_include():
    """Without `top_logprobs`, no alternatives are requested."""
    include = ["message.output_text.logprobs"]

    assert chat_fields(include=include) == {"logprobs": True, "top_logprobs": 0}
    assert chat_fields(include=include, top_logprobs=2) == {"logprobs": True, "top_logprobs": 2}
    assert chat_fields(top_logprobs=2) == {}


def test_a_text_format_becomes_a_response_format():
    """Chat nests the schema one level deeper."""
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True, "description": None}

    assert chat_fields(text={"format": form})["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
    }
    assert chat_fields(text={"format": {"type": "json_object"}}) == {"response_format": {"type": "json_object"}}
    assert chat_fields(text={"format": {"type": "text"}}) == {}


@pytest.mark.parametrize(("effort", "thinks"), [("none", False), ("minimal", True), ("xhigh", True)])
def test_effort_is_passed_through_and_sets_the_configured_fields(effort, thinks):
    """The body's fields override the configured ones."""
    chat = chat_fields(THINKING, reasoning={"effort": effort, "summary": "auto"}, chat_template_kwargs={"x": 2})

    assert chat["reasoning_effort"] == effort
    assert chat["chat_template_kwargs"] == {"enable_thinking": False, "x": 2} | (
        {"enable_thinking": True} if thinks else {}
    )
    assert chat_fields(reasoning={"effort": "low"}) == {"reasoning_effort": "low"}
    assert chat_fields(THINKING, reasoning={"summary": "auto"}) == {}
    assert chat_fields(THINKING, chat_template_kwargs={"x": 2}) == {"chat_template_kwargs": {"x": 2}}


def test_developer_messages_are_sent_as_they_are_to_an_engine_that_supports_them():
    """The engine's template renders them, as its own Responses endpoint does."""
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"role": "user", "content": "u"},
        {"role": "developer", "content": "d"},
    ]
    resolved = ResolvedReferences(messages=[{"role": "system", "content": "e"}])
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    assert [
        (message["role"], message["content"])
        for message in read({"instructions": "i", "input": items}, TranslationOptions(has_developers=True), resolved)[
            "messages"
        ]
    ] == [("system", "i"), ("system", "e"), ("developer", parts), ("user", "u"), ("developer", "d")]


def test_developer_messages_become_system_messages_for_other_engines():
    """Messages of earlier requests change their role, too."""
    resolved = ResolvedReferences(messages=[{"role": "user", "content": "u"}, {"role": "developer", "content": "d"}])

    assert [
        message["role"]
        for message in read({"input": [{"role": "developer", "content": "x"}]}, TranslationOptions(), resolved)[
            "messages"
        ]
    ] == ["user", "system", "system"]


@pytest.mark.parametrize(
    ("item", "is_continued"),
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
def test_a_last_message_with_status_incomplete_is_continued(item, is_continued):
    """After a completed one, the engine samples a new message."""
    chat = read({"input": [{"role": "user", "content": "hi"}, item]}, TranslationOptions())

    assert is_continued is chat.get("continue_final_message", False)
    assert is_continued is (chat.get("add_generation_prompt") is False)


def test_encrypted_reasoning_of_another_server_does_not_continue_the_message_before_it():
    """The last item decides, and it has no content."""
    message = {"role": "assistant", "content": "a", "status": "completed"}
    lost = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA", "status": "incomplete"}

    assert "continue_final_message" not in read(
        {"input": [{"role": "user", "content": "hi"}, message, lost]}, TranslationOptions()
    )


def test_leading_system_messages_are_merged_for_other_engines():
    """Instructions, earlier messages and items; a later system message keeps its position, and images are not merged."""
    image = {"role": "system", "content": [{"type": "input_image", "image_url": "http://x"}]}
    items = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "u"},
        {"role": "system", "content": "s"},
    ]
    resolved = ResolvedReferences(messages=[{"role": "system", "content": "e"}])

    assert [
        (message["role"], message["content"])
        for message in read({"instructions": "i", "input": items}, TranslationOptions(), resolved)["messages"]
    ] == [("system", "i\n\ne\n\nd"), ("user", "u"), ("system", "s")]
    parts = {"role": "developer", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}
    assert [
        message["content"]
        for message in read({"instructions": "i", "input": [parts]}, TranslationOptions())["messages"]
    ] == ["i\n\na\n\nb"]
    assert len(read({"instructions": "i", "input": [image]}, TranslationOptions())["messages"]) == 2
    assert len(read({"instructions": "", "input": "hi"}, TranslationOptions())["messages"]) == 1


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"background": True}, 400, "background"),
        ({"conversation": "conv_1"}, 400, "conversation"),
        ({"prompt": {"id": "p"}}, 400, "prompt"),
        ({"input": None}, 400, "input"),
        ({"model": 1}, 400, "model"),
        ({"instructions": []}, 400, "instructions"),
        ({"stream": "yes"}, 400, "stream"),
        ({"temperature": "0"}, 400, "temperature"),
        ({"max_output_tokens": 1.5}, 400, "max_output_tokens"),
        ({"top_logprobs": True, "include": []}, 400, "top_logprobs"),
        ({"include": [1]}, 400, "include[0]"),
        ({"metadata": {"a": 1}}, 400, "metadata[0]"),
        ({"truncation": "x"}, 400, "truncation"),
        ({"text": {"format": {"type": "x"}}}, 400, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, 400, "text.format.schema"),
        ({"reasoning": {"effort": 1}}, 400, "reasoning.effort"),
        ({"chat_template_kwargs": 1}, 400, "chat_template_kwargs"),
        ({"previous_response_id": 1}, 400, "previous_response_id"),
    ],
)
def test_an_invalid_request_is_rejected_with_its_field(fields, status, param):
    """As OpenAI's API does: unsupported features, and invalid values."""
    with pytest.raises(BadRequest) as raised:
        read({"input": "hi", **fields}, TranslationOptions())

    assert (raised.value.status, raised.value.param) == (status, param)
    assert param.split("[")[0].split(".")[0] in raised.value.message


def test_a_request_with_every_field_is_read():
    """Otherwise the property tests on RICH could be reading errors only."""
    chat = read(RICH, TranslationOptions(), EARLIER)

    assert [turn["role"] for turn in chat["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "user",
    ]
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["look"]
