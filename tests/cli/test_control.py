"""The command line's client of the control API."""

import asyncio
import subprocess
import sys
from base64 import b64decode

import pytest
from aiohttp import web

from proxy.cli.control import Control, Refused
from tokentape import ClientError


@pytest.fixture
def client(address):
    return Control(f"{address.url}/")


async def test_lists_are_read_page_by_page_up_to_the_limit(client, call_proxy):
    """Filters shorten pages, so several may be requested; the cursor shows whether more items follow."""
    for number in range(5):
        await call_proxy("POST", "/rollouts", {"rollout_id": f"r{number}", "group_id": "odd" if number % 2 else "even"})
    found = await client.list_items("rollouts", 2, group_id="even")
    assert [rollout["rollout_id"] for rollout in found["rollouts"]] == ["r4", "r2"]
    assert found["cursor"] is not None
    found = await client.list_items("rollouts", 50, group_id="odd")
    assert ([rollout["rollout_id"] for rollout in found["rollouts"]], found["cursor"]) == (["r3", "r1"], None)


async def test_steps_are_read_in_order_from_an_index_on(client, recorded):
    assert [step["index"] async for step in client.steps("demo")] == [0, 1, 2]
    assert [step["index"] async for step in client.steps("demo", after=1)] == [2]


async def test_an_error_response_raises_its_message_and_status(client):
    """The rollout ID is percent-encoded."""
    with pytest.raises(Refused, match="Rollout 'a/b c' not found.") as refused:
        await client.rollout("a/b c")

    assert refused.value.status == 404


async def test_a_response_that_is_not_json_is_an_error_that_suggests_to_check_the_url(engine):
    engine.fixed_responses = {}

    async def respond(request, body):
        return web.Response(text="<html>")

    engine.respond = respond
    with pytest.raises(ClientError, match="check that it is the control API of a proxy"):
        await Control(engine.url).send("GET", "/rollouts")


async def test_the_user_and_the_password_of_a_url_are_sent_and_not_shown(engine):
    """A proxy before this one may require them. With an API key, which is sent in the same header, they are refused."""
    engine.fixed_responses = {}
    seen = []

    async def respond(request, body):
        seen.append(request.headers["Authorization"])
        return web.Response(status=403)

    engine.respond = respond
    for credentials in ("me:s%40fe@", "me@"):
        url = engine.url.replace("://", f"://{credentials}")
        with pytest.raises(Refused) as refused:
            await Control(url).send("GET", "/rollouts")
        assert str(refused.value).startswith(f"{engine.url}/rollouts returned 403")

    assert [b64decode(header.removeprefix("Basic ")) for header in seen] == [b"me:s@fe", b"me:"]
    with pytest.raises(OSError, match="there is an API key"):
        Control(url, "key")


@pytest.mark.parametrize("has_route", [True, False])
async def test_missing_token_texts_are_requested_from_the_proxy(engine, has_route):
    """They are null if unknown; a proxy without the route gets one request."""
    engine.fixed_responses = {}

    async def respond(request, body):
        start = int(request.query["start"]) - 3  # a row is its prompt first
        assert request.query["choice"] == "1"
        if not has_route:
            return web.json_response({"error": {"message": "not found"}}, status=404)
        return web.json_response({"texts": [f"t{start}", None]})

    engine.respond = respond
    choices = [{"index": 1, "prompt": 0, "ids": [5, 6, 7, 8]}]
    with_texts = {"choices": [{"index": 1, "logprobs": {"tokens": ["a", "b", "c", "d"]}}]}
    steps = [
        {"rollout_id": "r", "step_id": step_id, "prompt_ids": [1, 2, 3], "choices": choices, "response": response}
        for step_id, response in (("s1", with_texts), ("s2", None), ("s3", {}))
    ]
    texts = await Control(engine.url).texts(steps)

    expected = ["t0", None, "t2", None]
    assert ({("s2", 0): expected, ("s3", 0): expected} if has_route else {}) == texts
    assert (4 if has_route else 1) == len(engine.requests)


async def test_a_response_that_ends_early_is_an_error(unused_tcp_port):
    """With and without a length; an address that is not one of HTTP is one too."""
    heads = [b"Content-Length: 9", b"Transfer-Encoding: chunked"]

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n" + heads[0] + b"\r\n\r\n" + (b"9\r\n" if len(heads) == 1 else b"") + b"{}")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", unused_tcp_port):
        for _ in range(2):
            with pytest.raises(OSError, match="/policies failed: "):
                await Control(f"http://127.0.0.1:{unused_tcp_port}").policies()
            heads.pop(0)
    for url in ("ftp://127.0.0.1", "127.0.0.1:8400", "http://127.0.0.1:x"):
        with pytest.raises(OSError, match="/policies failed: "):
            await Control(url).policies()


async def test_a_request_that_is_cancelled_leaves_no_thread(unused_tcp_port):
    """A command ends at Ctrl-C, also while a response is awaited."""
    received = asyncio.Event()

    async def serve(reader, writer):
        received.set()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", unused_tcp_port):
        task = asyncio.create_task(Control(f"http://127.0.0.1:{unused_tcp_port}").policies())
        await received.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.get_running_loop().shutdown_default_executor()


def test_the_command_line_requires_no_httpx2():
    """An extra of the Python client; a server is installed without it."""
    program = "import sys; sys.modules['httpx2'] = None; import proxy.cli.commands, proxy.cli.tail, proxy.cli.audit"
    subprocess.run([sys.executable, "-c", program], check=True)
