"""Content parts of the Responses API, translated to chat."""

import pytest

from proxy.errors import BadRequest
from proxy.protocols.dialects.responses.request import read_assistant_content, read_content

URL = "data:text/plain;base64,w6k="


def test_each_part_is_translated():
    """Text, image, audio and file; a text file becomes its text."""
    parts = [
        {"type": "input_text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}},
        {"type": "input_image", "image_url": "http://x", "detail": "low"},
        {"type": "input_image", "image_url": "http://x", "detail": "original"},
        {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
        {"type": "input_file", "file_data": URL, "filename": "a.txt"},
        {"type": "input_file", "file_data": "data:application/pdf;base64,AA==", "filename": "a.pdf"},
        {"type": "input_file", "file_data": "data:text/plain;base64,/w=="},
    ]

    assert [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "http://x", "detail": "low"}},
        {"type": "image_url", "image_url": {"url": "http://x"}},
        {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
        {"type": "text", "text": "é"},
        {"type": "file", "file": {"file_data": "data:application/pdf;base64,AA==", "filename": "a.pdf"}},
        {"type": "file", "file": {"file_data": "data:text/plain;base64,/w=="}},
    ] == read_content(parts, "x")


def test_a_single_text_part_becomes_a_string():
    assert ["a", "a"] == [read_content(content, "x") for content in ("a", [{"type": "input_text", "text": "a"}])]


def test_assistant_text_parts_are_joined():
    """Without a text part, content is null and not an empty string."""
    text, refusal = {"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "no"}

    assert ("aa", "no") == read_assistant_content([text, refusal, text], "x")
    assert [("", None), ("", None), (None, None)] == [
        read_assistant_content(content, "x") for content in ("", [{"type": "output_text", "text": ""}], [])
    ]


@pytest.mark.parametrize(
    ("read", "value", "param"),
    [
        (read_content, None, "x"),
        (read_content, [{"type": "input_image", "file_id": "f"}], "x[0]"),
        (read_content, [{"type": "input_file", "file_url": "http://x"}], "x[0]"),
        (read_content, [{"type": "video"}], "x[0].type"),
        (read_content, [{"type": "input_text"}], "x[0].text"),
        (read_content, ["a"], "x[0]"),
        (read_assistant_content, 1, "x"),
        (read_assistant_content, [{"type": "input_image", "image_url": "http://x"}], "x[0].type"),
    ],
)
def test_an_invalid_part_raises_with_its_path(read, value, param):
    """So does a file that is given by its id only."""
    with pytest.raises(BadRequest) as refusal:
        read(value, "x")

    assert param == refusal.value.param
