"""Signals during the start."""

import signal
import socket
import subprocess

import pytest
from commands import TOKENTAPE, children_of, is_alive


@pytest.mark.parametrize("workers", ["1", "2"])
def test_sigterm_while_waiting_for_the_store_exits_with_0(workers):
    """No process remains."""
    with socket.socket() as taken:  # no server listens there
        taken.bind(("127.0.0.1", 0))
        store = f"redis://127.0.0.1:{taken.getsockname()[1]}"
        words = ["serve", "--listen", "127.0.0.1:0", "--store", store, "--workers", workers]
        process = subprocess.Popen([*TOKENTAPE, *words], stderr=subprocess.PIPE, text=True)
        with process.stderr:
            output = process.stderr.readline()
            children = children_of(process.pid)
            process.send_signal(signal.SIGTERM)
            code = process.wait(50)

    assert "Store unreachable" in output
    assert 0 == code
    assert not any(map(is_alive, children))
