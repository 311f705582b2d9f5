"""The launch: the server begins with its owner, privately, or not at all."""

import os
import subprocess
import sys

from storage.embedded.server import LAUNCH


def launched(owner, *command):
    return subprocess.run([sys.executable, "-I", "-S", LAUNCH, str(owner), *command], capture_output=True, check=False)


def test_it_becomes_the_command():
    """The command takes the process over, and what it writes is for its user alone."""
    done = launched(os.getpid(), "/bin/sh", "-c", "umask; exit 7")

    assert b"077" in done.stdout
    assert 7 == done.returncode


def test_without_its_owner_it_starts_nothing(tmp_path):
    """When the owner is gone before its server begins, no server begins."""
    done = launched(1, "/bin/sh", "-c", f"touch {tmp_path / 'made'}")

    assert b"gone already" in done.stderr
    assert not (tmp_path / "made").exists()
