"""The launcher: stops with its owner, creates private files."""

import os
import subprocess
import sys

from storage.embedded.server import LAUNCH


def launch(owner, *command):
    return subprocess.run([sys.executable, "-I", "-S", LAUNCH, str(owner), *command], capture_output=True, check=False)


def test_the_launcher_executes_the_command():
    """The command replaces the launcher, and its files are private."""
    process = launch(os.getpid(), "/bin/sh", "-c", "umask; exit 7")

    assert b"077" in process.stdout
    assert process.returncode == 7


def test_the_launcher_exits_if_its_owner_has_exited(tmp_path):
    """The command is not executed."""
    process = launch(1, "/bin/sh", "-c", f"touch {tmp_path / 'created'}")

    assert b"has already exited" in process.stderr
    assert not (tmp_path / "created").exists()
