"""The wish to stop, heard at any time: by the command line as people run it."""

import signal
import socket
import subprocess

import pytest
from commands import TOKENTAPE, children_of, is_alive


@pytest.mark.parametrize("workers", ["1", "2"])
def test_told_to_stop_while_it_starts_it_ends_cleanly(workers):
    """A process that waits for its store is told like any other: exit code 0, and nothing of it is left."""
    with socket.socket() as taken:  # nobody listens there
        taken.bind(("127.0.0.1", 0))
        store = f"redis://127.0.0.1:{taken.getsockname()[1]}"
        words = ["serve", "--listen", "127.0.0.1:0", "--store", store, "--workers", workers]
        process = subprocess.Popen([*TOKENTAPE, *words], stderr=subprocess.PIPE, text=True)
        with process.stderr:
            said = process.stderr.readline()
            children = children_of(process.pid)
            process.send_signal(signal.SIGTERM)
            code = process.wait(50)

    assert "Store unreachable" in said
    assert 0 == code
    assert not any(map(is_alive, children))
