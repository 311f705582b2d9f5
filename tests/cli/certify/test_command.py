"""`tokentape certify ENGINE`: its output, its exit codes, and engines that fail while it runs."""

import asyncio
import os
import signal
import subprocess
import sys

import orjson
import pytest
from aiohttp import web
from tests.support.fakes import proxying
from tests.support.recorded import load as load_cassette
from tests.support.tampering import tampered
from typer.testing import CliRunner

from proxy.cli import certify
from proxy.cli.certify import access
from proxy.cli.certify.shapes import SHAPES
from proxy.cli.main import app
from proxy.server.listener import simulating
from proxy.simulator.options import Options

CHAT = "/v1/chat/completions"
FEW = tuple(shape for shape in SHAPES if shape.name in {"chat", "chat n=2", "echo", "no messages", "Messages"})


async def tokentape(*words: str) -> tuple[int, str, str]:
    """Run a command in a thread; return exit status, standard output and standard error."""
    done = await asyncio.to_thread(CliRunner().invoke, app, ["certify", *words])
    assert isinstance(done.exception, SystemExit | None), done.exception
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def few(monkeypatch):
    """Run some shapes only."""
    monkeypatch.setattr(certify, "SHAPES", FEW)


@pytest.mark.parametrize("shape", ["vllm", "sglang"])
async def test_a_simulated_engine_is_safe(few, shape):
    """Exit code 0; the JSON has a row for each shape, the counts, and the line for a bug report."""
    async with simulating("127.0.0.1:0", Options(shape=shape)) as engine:
        code, out, _ = await tokentape(engine, "--json")
    found = orjson.loads(out)

    assert (code, found["safe"], found["ended"], found["engine"]["kind"]) == (0, True, "", shape)
    assert {shape.name for shape in FEW} <= {row["name"] for row in found["rows"]}
    assert found["counts"] == {
        verdict: sum(
            cell is not None and cell["verdict"] == verdict
            for row in found["rows"]
            for cell in (row["whole"], row["streamed"])
        )
        for verdict in found["counts"]
    }
    assert found["badge"].endswith(f"| safe | {found['date']}")
    assert found["scores"]["tokens"] > 50
    assert (found["scores"]["max"], found["engine"]["seeds"]) == (0, True)


async def test_every_shape_of_a_simulated_vllm_is_exact_or_flagged_for_a_known_limitation():
    """And the table has a line for each."""
    async with simulating("127.0.0.1:0", Options()) as engine:
        code, out, errors = await tokentape(engine, "--admin", "--model", "simulated")

    assert code == 0, out
    assert errors == ""
    for shape in SHAPES:
        assert not shape.is_for("vllm") or f"\n  {shape.name} " in out
    assert "| safe |" in out.splitlines()[-1]


async def test_a_fault_is_exit_code_3(few):
    """With what to do."""

    def change(path, body, answer):
        for choice in answer.get("choices", ()) if path == CHAT and body.get("return_token_ids") else ():
            for token in choice.get("token_ids") or ():
                choice["token_ids"] = [*choice["token_ids"][:-1], token + 1]
        return answer

    async with simulating("127.0.0.1:0", Options()) as engine, tampered(engine, change) as url:
        code, out, _ = await tokentape(url)

    assert code == 3
    assert "do not train" in out
    assert "NOT SAFE: " in out.splitlines()[-1]


async def test_an_engine_without_token_ids_is_exit_code_4(few, engine):
    """Its steps are flagged as text."""
    whole, stream = load_cassette("chat_plain"), load_cassette("chat_plain_stream")
    engine.fixed_responses = {"/health": {}}

    async def respond(request, body):
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "tiny"}]})
        if request.path != CHAT or not body.get("messages") or body.get("n"):
            return web.json_response({"error": {"message": "no"}}, status=404)
        played = stream if body.get("stream") else whole
        return web.Response(body=played.response, headers={"Content-Type": played.content_type})

    engine.respond = respond
    code, out, _ = await tokentape(engine.url)

    assert code == 4, out
    assert out.splitlines()[-1].startswith("tokentape ")
    assert "NOT SAFE: no token ids" in out


async def test_an_engine_that_cannot_be_reached_or_identified_is_exit_code_1(few, engine):
    """With a sentence on standard error, and no table."""

    async def respond(request, body):
        return web.json_response({"data": []} if request.headers.get("Authorization") else {}, status=401)

    engine.respond = respond
    found = [await tokentape("http://127.0.0.1:1"), await tokentape(engine.url), await tokentape("no-url")]

    assert [(code, out) for code, out, _ in found] == [(1, "")] * 3
    assert "did not answer /v1/models" in found[0][2]
    assert "pass it with --api-key" in found[1][2]
    assert "invalid URL" in found[2][2]


async def test_a_tokentape_proxy_is_not_an_engine(few, store):
    async with simulating("127.0.0.1:0", Options()) as engine, proxying(engine, store) as served:
        code, _, errors = await tokentape(served.url)

    assert (code, "is a TokenTape proxy, not an engine" in errors) == (1, True)


def _body(kind: str):
    async def respond(request):
        if kind == "hangs":
            await asyncio.Event().wait()
        body = {
            "html": b"<html>",
            "empty": b"",
            "list": b"[[1]]",
            "deep": b"[" * 900 + b"]" * 900,
            "huge": b" " * 2**21,
        }
        return web.Response(body=body[kind], content_type="application/json")

    return respond


@pytest.mark.parametrize("kind", ["html", "empty", "list", "deep", "huge", "hangs"])
async def test_a_hostile_engine_ends_in_a_result(few, monkeypatch, kind):
    """Answers of any kind to some calls: a table, an exit code, and no traceback."""
    monkeypatch.setattr(access, "MAX_BYTES", 2**20)
    monkeypatch.setattr(access, "CALL_TIMEOUT_S", 1.0)
    hostile = _body(kind)
    async with (
        simulating("127.0.0.1:0", Options()) as engine,
        tampered(engine, lambda path, body, answer: answer, {"/v1/completions": hostile, "/tokenize": hostile}) as url,
    ):
        monkeypatch.setattr(certify, "SHAPES", (*FEW, *(shape for shape in SHAPES if shape.topic == "completions")))
        code, out, errors = await tokentape(url)

    assert code in {1, 3}
    assert "NOT SAFE: " in out
    assert "Traceback" not in out + errors


@pytest.mark.parametrize("models", [[], {}, {"data": 5}, {"data": {"id": 1}}, {"data": [1, {"id": 2}, {}]}, None, "x"])
async def test_a_list_of_models_of_any_type_is_read(few, engine, models):
    """Without a name in it, the model must be named."""

    async def respond(request, body):
        return web.json_response(models if request.path == "/v1/models" else {"choices": 5})

    engine.respond = respond
    unnamed, named = await tokentape(engine.url), await tokentape(engine.url, "--model", "m")

    assert (unnamed[0], "or pass --model" in unnamed[2]) == (1, True)
    assert (named[0], "NOT SAFE" in named[1]) == (3, True)


async def test_an_engine_that_dies_ends_the_run(few):
    """With the results until then; nothing after it counts as exact."""
    asked = 0

    def change(path, body, answer):
        nonlocal asked
        asked += path == CHAT
        return answer if asked < 8 else None

    async with simulating("127.0.0.1:0", Options()) as engine, tampered(engine, change) as url:
        code, out, errors = await tokentape(url, "--json")
    found = orjson.loads(out)

    assert code == 1
    assert "the run is incomplete: the engine at" in errors
    assert (found["safe"], found["counts"]["not run"] > 5) == (False, True)
    assert found["ended"]


async def test_a_run_ends_at_its_time_limit(few, monkeypatch):
    """What was not run is not exact."""
    monkeypatch.setattr(access.Client, "is_over", property(lambda _: True))
    async with simulating("127.0.0.1:0", Options()) as engine:
        code, out, errors = await tokentape(engine)

    assert code == 1
    assert "repeat with a higher --time-limit-s" in errors
    assert "NOT SAFE: incomplete" in out


async def test_ctrl_c_leaves_nothing(tmp_path):
    """Neither files nor processes, and no traceback."""
    async with simulating("127.0.0.1:0", Options(token_delay_s=0.05)) as engine:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "proxy", "certify", engine),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)},
        )  # fmt: skip
        while not [*tmp_path.glob("tokentape-certify-*/store/*")]:
            await asyncio.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, errors = await process.communicate()

    assert (process.returncode, out, errors) == (130, b"", b"")
    assert [*tmp_path.iterdir()] == []
