"""Recording of cassettes: they load as the engine sent them, and none is overwritten by accident."""

import asyncio

import pytest
from tests.support import recorded

from proxy.server.listener import simulating
from proxy.simulator.options import Options

from .record import CHAT, NATIVE, TABLE, Case, Response, detect, record, requests, write

JSON, SSE = {"content-type": "application/json"}, {"content-type": "text/event-stream; charset=utf-8"}
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "é 🦙"}]}
STREAM = 'data: {"a": "é"}\n\ndata: [DONE]\n\n'.encode()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder from which cassettes are loaded."""
    monkeypatch.setitem(recorded.ROOTS, "vllm", tmp_path)
    return tmp_path


@pytest.fixture
async def engine():
    """The simulator's URL."""
    async with simulating("127.0.0.1:0", Options()) as url:
        yield url


@pytest.mark.parametrize(
    ("response", "suffix"),
    [
        (Response(200, JSON, b'{"choices":[ ]}'), "json"),
        (Response(200, SSE, STREAM), "sse"),
        (Response(404, {"content-type": "text/plain"}, b"nothing here"), "txt"),
        (Response(400, JSON, b'{"error":"bad"}'), "json"),
    ],
)
def test_a_cassette_loads_as_it_was_recorded(folder, response, suffix):
    """Path, body, status, content type and each byte of the response."""
    write(folder, Case("case", CHAT, BODY), response, "tiny")
    cassette = recorded.load("case")

    assert recorded.names() == ["case"]
    assert (cassette.path, cassette.body) == (CHAT, BODY)
    assert (response.status, response.body) == (cassette.status, cassette.response)
    assert (folder / f"case.response.{suffix}").exists()
    assert (folder / "case.meta.json").exists() == (response.status != 200)


def test_a_new_recording_replaces_all_files_of_the_old_one(folder):
    """If the response has another type, or succeeds now, no old file remains."""
    write(folder, Case("case", CHAT, BODY), Response(500, JSON, b"{}"), "tiny")
    write(folder, Case("case", CHAT, BODY), Response(200, SSE, STREAM), "tiny")

    assert {path.name for path in folder.iterdir()} == {"case.request.json", "case.response.sse"}


def test_the_models_folder_is_replaced(folder):
    """A model that is named by its path would publish the recorder's folders; nothing else is changed."""
    body, answer = {"model": "/home/me/models/a.gguf"}, b'{"model":"/home/me/models/a.gguf","a":"/home/other/b"}'
    write(folder, Case("case", CHAT, body), Response(200, JSON, answer), body["model"])
    cassette = recorded.load("case")

    assert cassette.body == {"model": "/models/a.gguf"}
    assert cassette.response == b'{"model":"/models/a.gguf","a":"/home/other/b"}'


async def test_the_whole_table_is_recorded(folder, engine):
    """Every case is recorded unstreamed and streamed, plain and with injected fields; each can be loaded."""
    new, old = await asyncio.to_thread(record, engine, folder)
    found = {name: recorded.load(name) for name in recorded.names()}

    assert (len(found), 0) == (new, old)
    served = [name for cases in TABLE.values() for name, (path, _) in cases.items() if path != NATIVE]  # SGLang's
    assert {f"{case}_{framing}_plain" for case in served for framing in "ns"} <= found.keys()
    assert found["chat_greedy_s_inj"].is_stream
    assert found["chat_greedy_s_inj"].body["return_token_ids"] is True
    assert "return_token_ids" not in found["chat_greedy_s_plain"].body
    assert {cassette.status for name, cassette in found.items() if name.startswith("err_messages")} == {400}


async def test_existing_cassettes_are_kept_unless_forced(folder, engine):
    """They stay the same, byte for byte."""
    kept = folder / "chat" / "chat_greedy_n_plain.request.json"
    traits, model = await asyncio.to_thread(detect, engine)
    case = next(iter(requests(traits, model)))
    write(folder, case, Response(200, JSON, b"{}"), model)
    before = kept.stat().st_mtime_ns, recorded.load(case.name).response

    _, old = await asyncio.to_thread(record, engine, folder)
    assert (old, (kept.stat().st_mtime_ns, recorded.load(case.name).response)) == (1, before)

    _, old = await asyncio.to_thread(lambda: record(engine, folder, force=True))
    assert old == 0
    assert recorded.load(case.name).response != b"{}"


async def test_a_pattern_selects_cases_and_headers_are_kept(folder):
    """SGLang's own cases; the headers of a client, and those that are injected."""
    only = ("chat_sglext_header_s_*", "midway_versions_n_plain")
    async with simulating("127.0.0.1:0", Options(shape="sglang")) as url:
        new, _ = await asyncio.to_thread(lambda: record(url, folder, only=only))
    found = {name: recorded.load(name) for name in recorded.names()}
    own = {"x-sglext-return-input-ids": "1", "x-sglext-return-output-ids": "1"}

    assert found.keys() == {"chat_sglext_header_s_plain", "chat_sglext_header_s_inj", "midway_versions_n_plain"}
    assert new == len(found)
    assert own == found["chat_sglext_header_s_plain"].headers
    assert found["midway_versions_n_plain"].headers is None
