"""The command line as people run it: to its end, or until it is told to stop."""

import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

TOKENTAPE = [sys.executable, "-m", "proxy"]


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*TOKENTAPE, *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )


@contextmanager
def started(*words: str):
    """A command that runs until it is told to stop: its process and the URL it prints."""
    process = subprocess.Popen([*TOKENTAPE, *words], stderr=subprocess.PIPE, text=True)
    try:
        said = ""
        while not (found := re.search(r"listening (http://\S+)", said)):
            line = process.stderr.readline()
            assert line, said
            said += line
        yield process, found[1], said
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stderr.close()


def children_of(pid: int, word: str = "") -> list[int]:
    """The processes that a process started and that have not ended, of those whose command line has this word."""
    found = (int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [child for child in found if word in _command_of(child)]


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
