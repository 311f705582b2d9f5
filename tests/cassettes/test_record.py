"""The recording of cassettes: what is written is read again as it came, and nothing recorded is lost by accident."""

import asyncio

import pytest
import recorded

from proxy.server.listener import simulating
from proxy.simulator.options import Options

from .record import CHAT, TABLE, Asked, Played, meet, record, requests, write

JSON, SSE = {"content-type": "application/json"}, {"content-type": "text/event-stream; charset=utf-8"}
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "é 🦙"}]}
STREAM = 'data: {"a": "é"}\n\ndata: [DONE]\n\n'.encode()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where cassettes are read from, and empty."""
    monkeypatch.setitem(recorded.ROOTS, "vllm", tmp_path)
    return tmp_path


@pytest.fixture
async def engine():
    """The simulator's URL."""
    async with simulating("127.0.0.1:0", Options()) as url:
        yield url


@pytest.mark.parametrize(
    ("played", "suffix"),
    [
        (Played(200, JSON, b'{"choices":[ ]}'), "json"),
        (Played(200, SSE, STREAM), "sse"),
        (Played(404, {"content-type": "text/plain"}, b"nothing here"), "txt"),
        (Played(400, JSON, b'{"error":"bad"}'), "json"),
    ],
)
def test_written_and_read_again(folder, played, suffix):
    """Path, body, status, content type and each byte of the answer."""
    write(folder, Asked("case", CHAT, BODY), played, "tiny")
    cassette = recorded.load("case")

    assert ["case"] == recorded.names()
    assert (CHAT, BODY) == (cassette.path, cassette.body)
    assert (played.status, played.body) == (cassette.status, cassette.answer)
    assert (folder / f"case.response.{suffix}").exists()
    assert (folder / "case.meta.json").exists() == (played.status != 200)


def test_another_recording_leaves_nothing_of_the_first(folder):
    """An answer of another type, or one that succeeds now, stands alone."""
    write(folder, Asked("case", CHAT, BODY), Played(500, JSON, b"{}"), "tiny")
    write(folder, Asked("case", CHAT, BODY), Played(200, SSE, STREAM), "tiny")

    assert {"case.request.json", "case.response.sse"} == {path.name for path in folder.iterdir()}


def test_the_models_folder_is_not_told(folder):
    """A model named by its path gives away somebody's folders; it is the one thing that is changed."""
    body, answer = {"model": "/home/me/models/a.gguf"}, b'{"model":"/home/me/models/a.gguf","a":"/home/other/b"}'
    write(folder, Asked("case", CHAT, body), Played(200, JSON, answer), body["model"])
    cassette = recorded.load("case")

    assert {"model": "/models/a.gguf"} == cassette.body
    assert b'{"model":"/models/a.gguf","a":"/home/other/b"}' == cassette.answer


async def test_the_whole_table_against_an_engine(folder, engine):
    """Every case is there unstreamed and streamed, plain and with our flags; each can be read."""
    new, old = await asyncio.to_thread(record, engine, folder)
    found = {name: recorded.load(name) for name in recorded.names()}

    assert (len(found), 0) == (new, old)
    assert {f"{case}_{framing}_plain" for cases in TABLE.values() for case in cases for framing in "ns"} <= found.keys()
    assert found["chat_greedy_s_inj"].is_stream
    assert found["chat_greedy_s_inj"].body["return_token_ids"] is True
    assert "return_token_ids" not in found["chat_greedy_s_plain"].body
    assert {400} == {cassette.status for name, cassette in found.items() if name.startswith("err_messages")}


async def test_nothing_is_overwritten_unless_asked(folder, engine):
    """What was recorded stays as it is, byte for byte, until told otherwise."""
    kept = folder / "chat" / "chat_greedy_n_plain.request.json"
    traits, model = await asyncio.to_thread(meet, engine)
    asked = next(iter(requests(traits, model)))
    write(folder, asked, Played(200, JSON, b"{}"), model)
    before = kept.stat().st_mtime_ns, recorded.load(asked.name).answer

    _, old = await asyncio.to_thread(record, engine, folder)
    assert (1, before) == (old, (kept.stat().st_mtime_ns, recorded.load(asked.name).answer))

    _, old = await asyncio.to_thread(lambda: record(engine, folder, force=True))
    assert old == 0
    assert recorded.load(asked.name).answer != b"{}"
