"""deploy/Dockerfile: the linter's report, and the result of its steps, run by an unprivileged user in a read-only tree."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from aiohttp import web
from tests.support.recorded import load

from .by_hand import DOCKERFILE, build

STREAM = load("chat_ids_lp_stream")
EVENTS = [event + b"\n\n" for event in STREAM.response.split(b"\n\n")[:-1]]
CHAT = "/rollouts/r1/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}


@pytest.fixture(scope="module")
def image():
    """The built image, in a folder that other users can read, and that is read-only."""
    root = Path(tempfile.mkdtemp(prefix="tokentape-image-"))
    try:
        root.chmod(0o755)
        image = build(root)
        subprocess.run(["chmod", "-R", "a-w", str(root / "opt")], check=True)
        (root / "tmp").mkdir()
        (root / "tmp").chmod(0o1777)
        (root / "data").chmod(0o700)
        if os.geteuid() == 0:
            os.chown(root / "data", image.user, image.user)
        yield image
    finally:
        subprocess.run(["chmod", "-R", "u+w", str(root)], check=True)
        shutil.rmtree(root)


class Container:
    """The image, run on free ports instead of its own, as its own user if possible."""

    def __init__(self, image, **variables):
        self.image = image
        with ExitStack() as stack:
            free = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
            self.ports = [listener.getsockname()[1] for listener in free]
        self.environment = {name: self._ours(value) for name, value in image.environment.items()}
        self.environment |= {"HOME": str(image.root / "data"), "TMPDIR": str(image.root / "tmp"), **variables}
        self.models, self.control = (f"http://127.0.0.1:{port}" for port in self.ports)

    def _ours(self, text):
        return text.replace(":8400", f":{self.ports[0]}").replace(":8401", f":{self.ports[1]}")

    def start(self, command):
        own = {"user": self.image.user, "group": self.image.user, "extra_groups": []} if os.geteuid() == 0 else {}
        return subprocess.Popen(
            [self._ours(word) for word in command], env=self.environment, cwd=self.image.folder,
            stderr=subprocess.PIPE, text=True, **own,
        )  # fmt: skip

    def ends(self, command):
        """Run a command in it; return its exit code and stderr."""
        process = self.start(command)
        _, errors = process.communicate(timeout=60)
        return process.returncode, errors

    @contextmanager
    def running(self):
        """Run the image's own command; yield once it listens."""
        process = self.start(self.image.command)
        try:
            log = ""
            while "listening" not in log:
                line = process.stderr.readline()
                assert line, log
                log += line
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            process.stderr.close()


@pytest.fixture
def container(image, engine):
    engines = f'[{{"url": "{engine.url}", "name": "fake"}}]'
    keys = {"TOKENTAPE_AGENTS__API_KEYS": '["agent"]', "TOKENTAPE_CONTROL__API_KEYS": '["control"]'}
    return Container(image, TOKENTAPE_ENGINES__ENDPOINTS=engines, TOKENTAPE_DRAIN_TIMEOUT_S="20", **keys)


def test_the_linter_finds_nothing(checker):
    """hadolint also checks the shell code; the check can fail."""
    assert checker("hadolint", str(DOCKERFILE)) == (0, "")
    assert checker("hadolint", "-", stdin="FROM python\nRUN cd /x && apt-get install y\n")[0] != 0


def test_it_does_not_start_without_keys(image):
    """An image listens on all interfaces, so keys are required."""
    code, errors = Container(image).ends(image.command)

    assert code == 78
    assert "agents.api_keys is empty" in errors


def test_its_user_cannot_write_to_it(container):
    """Neither a new file beside the program, nor the program itself."""
    for name in ("new", "bin/tokentape"):
        code, errors = container.ends(["/bin/sh", "-c", f": >> {container.image.root}/opt/tokentape/{name}"])
        assert code != 0
        assert "Permission denied" in errors


async def test_it_serves_is_healthy_and_ends_a_stream_before_it_stops(container, engine, http):
    """A call with the embedded store; on SIGTERM during the next, its stream completes and the exit code is 0."""
    go_on = asyncio.Event()

    async def respond(request, body):
        response = web.StreamResponse(headers={"Content-Type": STREAM.content_type})
        await response.prepare(request)
        await response.write(b"".join(EVENTS[:3]))
        await go_on.wait()
        await response.write(b"".join(EVENTS[3:]))
        return response

    agent, control = {"Authorization": "Bearer agent"}, {"Authorization": "Bearer control"}
    with container.running() as process:
        healthy = await asyncio.to_thread(container.ends, container.image.health)
        engine.plays(STREAM)
        first = await (await http.post(container.models + CHAT, json=BODY, headers=agent)).read()
        engine.respond = respond
        answer = await http.post(container.models + CHAT, json=BODY, headers=agent)
        await answer.content.readuntil(b"\n\n")
        process.send_signal(signal.SIGTERM)
        while (ready := await http.get(f"{container.control}/ready")).status == 200:
            pass
        status = (await ready.json())["status"]
        go_on.set()
        second = await answer.read()
        code = await asyncio.to_thread(process.wait, 30)
    unhealthy, _ = await asyncio.to_thread(container.ends, container.image.health)
    with container.running():  # stored steps are in /data
        kept = await (await http.get(f"{container.control}/rollouts/r1/steps", headers=control)).json()

    assert healthy == (0, "")
    assert first.endswith(b"data: [DONE]\n\n")
    assert second.endswith(b"data: [DONE]\n\n")
    assert (status, code) == ("stopping", 0)
    assert unhealthy == 1
    assert [step["status"] for step in kept["steps"]] == ["complete"] * 2
