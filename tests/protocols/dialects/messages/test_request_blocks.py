"""Content blocks of user messages, translated to chat."""

import pytest

from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects.messages.request import blocks_from, chat_content, parts_from, tool_result_messages

PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}


def text(value):
    return {"type": "text", "text": value}


def test_a_string_is_one_text_block():
    """Each block has the path that errors name."""
    assert [("m.content", text("hi"))] == blocks_from("hi", "m.content")
    assert blocks_from([{}, PNG], "m.content") == [("m.content.0", {}), ("m.content.1", PNG)]


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
def test_a_block_becomes_content_parts(block, parts):
    """Cache breakpoints and citations are dropped: the model does not see them."""
    assert parts_from(block, "here") == parts


@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, ""), ("r", "r"), ([], ""), ([text("a"), text(""), text("b")], "a\n\nb"), ([text("a"), PNG], "a")],
)
def test_a_tool_result_becomes_a_tool_message_of_text(content, expected):
    """Texts are joined by blank lines; images follow in a user message."""
    message, *pictures = tool_result_messages({"type": "tool_result", "tool_use_id": "c1", "content": content}, "here")

    assert message == {"role": "tool", "tool_call_id": "c1", "content": expected}
    has_image = isinstance(content, list) and PNG in content
    assert ([{"role": "user", "content": [PICTURE]}] if has_image else []) == pictures


def test_a_tool_result_with_tool_references_becomes_two_messages():
    """Chat templates read a message of references only."""
    found = [text("found"), {"type": "tool_reference", "tool_name": "f"}]
    message = {"role": "tool", "tool_call_id": "c1"}

    assert tool_result_messages({"tool_use_id": "c1", "content": found}, "here") == [
        message | {"content": "found"},
        message | {"content": [{"type": "tool_reference", "name": "f"}]},
    ]


def test_is_error_of_a_tool_result_is_dropped():
    """Chat has no such field, and the content contains the error message."""
    failed = {"tool_use_id": "c1", "is_error": True}

    assert [
        tool_result_messages(failed | fields, "here")[0]["content"] for fields in ({}, {"content": "no such file"})
    ] == ["", "no such file"]


@pytest.mark.parametrize(
    ("block", "path"),
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
def test_a_block_that_chat_cannot_represent_raises_with_its_path(block, path):
    """No block is dropped silently."""
    with pytest.raises(UnprocessableRequest) as raised:
        parts_from(block, "here")
    assert raised.value.param == path


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
def test_a_tool_result_of_a_wrong_type_raises_with_its_field(wrong):
    with pytest.raises(UnprocessableRequest, match=rf"^here\.{next(iter(wrong))}"):
        tool_result_messages({"tool_use_id": "c1", **wrong}, "here")


def test_a_single_text_becomes_a_string_and_other_parts_a_list():
    assert ["a", [text("a"), text("b")], [PICTURE]] == [
        chat_content(parts) for parts in ([text("a")], [text("a"), text("b")], [PICTURE])
    ]
