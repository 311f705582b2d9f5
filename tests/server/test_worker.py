"""A worker process, started and stopped through a pipe."""

import signal
import subprocess

import orjson
import pytest
from commands import TOKENTAPE

from proxy.config.settings import load


@pytest.fixture
def worker(server, tmp_path):
    """A worker that listens, with settings from a pipe."""
    process = subprocess.Popen([*TOKENTAPE, "worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    store = {"url": f"unix:{server.socket}", "prefix": "worker", "password": None}
    settings = load(listen="127.0.0.1:0", store=store, engines={"endpoints": [{"url": "http://127.0.0.1:9"}]})
    process.stdin.write(orjson.dumps({"number": 0, "folder": str(tmp_path), "settings": settings.to_json()}) + b"\n")
    process.stdin.flush()
    assert b"http://127.0.0.1:" in process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_a_stop_line_stops_it(worker):
    """The exit code is 0."""
    worker.stdin.write(b'"stop"\n')
    worker.stdin.flush()

    assert 0 == worker.wait(50)


def test_it_stops_when_its_parent_is_gone(worker):
    """The kernel closes the pipe."""
    worker.stdin.close()

    assert 0 == worker.wait(50)


def test_it_stops_at_a_signal_and_may_get_it_twice(worker):
    """A service manager signals all processes of a service, and the supervisor sends the stop line too."""
    for _ in range(2):
        worker.send_signal(signal.SIGTERM)
    worker.stdin.write(b'"stop"\n')
    worker.stdin.flush()

    assert 0 == worker.wait(50)


def test_the_settings_arrive_whole_with_their_secrets():
    """Secrets pass through the pipe only; printed settings hide them."""
    settings = load(store={"url": "redis://127.0.0.1", "password": "planted"}, agents={"api_keys": ["sown"]})
    text = orjson.dumps(settings.to_json()).decode()

    assert "planted" in text
    assert "sown" in text
    assert type(settings)(**orjson.loads(text)) == settings
