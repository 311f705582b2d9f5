"""Blocks of what users send."""

import pytest

from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects.messages.messages import blocks_from, chat_content, parts_from, tool_result_messages

PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}


def text(said):
    return {"type": "text", "text": said}


def test_a_string_is_one_block_of_text():
    """Each block has its place."""
    assert [("m.content", text("hi"))] == blocks_from("hi", "m.content")
    assert [("m.content.0", {}), ("m.content.1", PNG)] == blocks_from([{}, PNG], "m.content")


@pytest.mark.parametrize(
    ("block", "parts"),
    [
        (text("hi") | {"cache_control": {"type": "ephemeral"}, "citations": [1]}, [text("hi")]),
        (PNG, [PICTURE]),
        (
            {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}},
            [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}],
        ),
        ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "d"}}, [text("d")]),
        (
            {
                "type": "document",
                "title": "T",
                "context": "C",
                "citations": {"enabled": True},
                "source": {"type": "content", "content": [text("d"), PNG]},
            },
            [text("T"), text("C"), text("d"), PICTURE],
        ),
        (
            {"type": "search_result", "title": "T", "source": "https://x", "content": [text("r")]},
            [text("T"), text("https://x"), text("r")],
        ),
    ],
)
def test_what_a_block_says(block, parts):
    """Caches and citations change nothing that a model sees."""
    assert parts == parts_from(block, "here")


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, ""), ("r", "r"), ([], ""), ([text("a"), text(""), text("b")], "a\n\nb"), ([text("a"), PNG], "a")],
)
def test_a_result_is_text(content, said):
    """Its texts joined by line breaks. Its images are a user's message."""
    message, *pictures = tool_result_messages({"type": "tool_result", "tool_use_id": "c1", "content": content}, "here")

    assert {"role": "tool", "tool_call_id": "c1", "content": said} == message
    shown = isinstance(content, list) and PNG in content
    assert ([{"role": "user", "content": [PICTURE]}] if shown else []) == pictures


def test_a_result_that_names_tools_is_two_messages():
    """Templates read the references alone."""
    found = [text("found"), {"type": "tool_reference", "tool_name": "f"}]
    message = {"role": "tool", "tool_call_id": "c1"}

    assert [message | {"content": "found"}, message | {"content": [{"type": "tool_reference", "name": "f"}]}] == (
        tool_result_messages({"tool_use_id": "c1", "content": found}, "here")
    )


def test_a_failure_says_what_it_says():
    """Chat has no field for it, and what an agent says of a failure is text already."""
    failed = {"tool_use_id": "c1", "is_error": True}

    assert ["", "no such file"] == [
        tool_result_messages(failed | said, "here")[0]["content"] for said in ({}, {"content": "no such file"})
    ]


@pytest.mark.parametrize(
    ("block", "at"),
    [
        ({}, "here.type"),
        ({"type": "container_upload", "file_id": "f"}, "here.type"),
        ({"type": "tool_result", "tool_use_id": "c"}, "here.type"),
        ({"type": "text"}, "here.text"),
        ({"type": "image"}, "here.source"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "here.source.type"),
        ({"type": "image", "source": {"type": "url"}}, "here.source.url"),
        ({"type": "image", "source": {"type": "base64", "data": ""}}, "here.source.media_type"),
        ({"type": "image", "source": {"type": "base64", "media_type": "image/png"}}, "here.source.data"),
        (
            {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}},
            "here.source",
        ),
        ({"type": "document", "source": {"type": "url", "url": "x"}}, "here.source"),
        ({"type": "document", "source": {"type": "text"}}, "here.source.data"),
        ({"type": "document", "title": 1, "source": {"type": "text", "data": ""}}, "here.title"),
        ({"type": "search_result", "content": 1}, "here.content"),
        ({"type": "search_result", "content": [{"type": "odd"}]}, "here.content.0.type"),
    ],
)
def test_what_chat_cannot_say_is_refused_by_its_place(block, at):
    """Nothing that an agent sends is left out in silence."""
    with pytest.raises(UnprocessableRequest) as refused:
        parts_from(block, "here")
    assert at == refused.value.param


@pytest.mark.parametrize(
    "wrong",
    [
        {"content": 1},
        {"content": [1]},
        {"content": [{"type": "tool_reference", "tool_name": 1}]},
        {"is_error": "no"},
        {"tool_use_id": 1},
    ],
)
def test_a_result_of_a_wrong_type_is_refused(wrong):
    """By the field."""
    with pytest.raises(UnprocessableRequest, match=rf"^here\.{next(iter(wrong))}"):
        tool_result_messages({"tool_use_id": "c1", **wrong}, "here")


def test_one_text_is_a_string():
    """And all else a list."""
    assert ["a", [text("a"), text("b")], [PICTURE]] == [
        chat_content(parts) for parts in ([text("a")], [text("a"), text("b")], [PICTURE])
    ]
