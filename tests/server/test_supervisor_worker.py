"""A worker process, started and stopped through a pipe."""

import signal
import subprocess

import orjson
import pytest
from tests.support.commands import TOKENTAPE

from proxy.config.settings import load


@pytest.fixture
def worker(server, tmp_path):
    """A worker that listens, with settings from a pipe."""
    process = subprocess.Popen([*TOKENTAPE, "worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    store = {"url": f"unix:{server.socket}", "prefix": "worker", "password": None}
    settings = load(listen="127.0.0.1:0", store=store, engines={"endpoints": [{"url": "http://127.0.0.1:9"}]})
    process.stdin.write(
        orjson.dumps({"number": 0, "folder": str(tmp_path), "settings": settings.to_json(), "channels": []}) + b"\n"
    )
    process.stdin.flush()
    assert b"http://127.0.0.1:" in process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_a_worker_exits_with_0_on_a_stop_line(worker):
    worker.stdin.write(b'"stop"\n')
    worker.stdin.flush()

    assert 0 == worker.wait(50)


def test_a_worker_exits_with_0_when_its_parent_ends(worker):
    """The kernel closes the pipe."""
    worker.stdin.close()

    assert 0 == worker.wait(50)


def test_a_worker_exits_with_0_on_one_or_two_signals(worker):
    """A service manager signals all processes of a service, and the supervisor also sends the stop line."""
    for _ in range(2):
        worker.send_signal(signal.SIGTERM)
    worker.stdin.write(b'"stop"\n')
    worker.stdin.flush()

    assert 0 == worker.wait(50)


def test_the_settings_of_a_worker_include_secrets():
    """They are sent through the pipe; printed settings hide secrets."""
    settings = load(
        store={"url": "redis://127.0.0.1", "password": "planted"}, agents={"api_keys": ["sown"]}, insecure=True
    )
    text = orjson.dumps(settings.to_json()).decode()

    assert "planted" in text
    assert "sown" in text
    assert type(settings)(**orjson.loads(text)) == settings
