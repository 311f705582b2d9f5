"""Media of parts as chat parts."""

from base64 import b64encode

import pytest

from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects.gemini.contents import file_part, inline_part


@pytest.mark.parametrize(
    ("kind", "data", "expected"),
    [
        ("image/png", "a-_9", {"type": "image_url", "image_url": {"url": "data:image/png;base64,a+/9"}}),
        ("IMAGE/JPEG; q=1", "aaaa", {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,aaaa"}}),
        ("video/mp4", "aaaa", {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,aaaa"}}),
        ("audio/mpeg", "aaaa", {"type": "input_audio", "input_audio": {"data": "aaaa", "format": "mp3"}}),
        ("audio/flac", "aaaa", {"type": "input_audio", "input_audio": {"data": "aaaa", "format": "flac"}}),
        ("text/csv", b64encode("é,1".encode()).decode(), {"type": "text", "text": "é,1"}),
    ],
)
def test_data_becomes_a_part_of_its_kind(kind, data, expected):
    """The SDK for Python encodes it with the alphabet for URLs."""
    assert expected == inline_part({"mimeType": kind, "data": data}, "p")
    assert expected == inline_part({"mime_type": kind, "data": data}, "p")


def test_a_public_file_is_a_url():
    url = "https://example.org/a.png"

    assert {"type": "image_url", "image_url": {"url": url}} == file_part({"fileUri": url, "mimeType": "image/png"}, "p")


@pytest.mark.parametrize(
    ("read", "media", "message"),
    [
        (inline_part, {"mimeType": "application/pdf", "data": ""}, "p.mimeType: must be an image"),
        (inline_part, {"data": ""}, "p.mimeType: must be a string"),
        (inline_part, {"mimeType": "image/png"}, "p.data: must be a string"),
        (inline_part, {"mimeType": "text/plain", "data": "/w=="}, "p.data: must be UTF-8 in base64"),
        (inline_part, {"mimeType": "text/plain", "data": "?"}, "p.data: must be UTF-8 in base64"),
        (file_part, {"mimeType": "text/html", "fileUri": "https://a.b/c"}, "p.mimeType: must be an image"),
        (file_part, {"mimeType": "image/png", "fileUri": "gs://a/b"}, "p.fileUri: must be a public URL"),
        (
            file_part,
            {"mimeType": "image/png", "fileUri": "https://generativelanguage.googleapis.com/v1beta/files/a"},
            "p.fileUri: must be a public URL",
        ),
        (file_part, {"mimeType": "image/png", "fileUri": "https://[a"}, "p.fileUri: must be a public URL"),
    ],
)
def test_other_media_are_rejected(read, media, message):
    """Engines read no PDF, and files of Google's cannot be fetched."""
    with pytest.raises(UnprocessableRequest, match=message):
        read(media, "p")
