"""The command line as separate processes: run to the end, or until terminated."""

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
def started(*words: str, **environment: str):
    """Start a command that runs until it is terminated; yield its process and the URL that it prints."""
    process = subprocess.Popen(
        [*TOKENTAPE, *words], stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    try:
        output = ""
        while not (found := re.search(r"listening (http://\S+)", output)):
            line = process.stderr.readline()
            assert line, output
            output += line
        yield process, found[1], output
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stderr.close()


def children_of(pid: int, word: str = "") -> list[int]:
    """Return the live child processes with this word in their command line."""
    found = (int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [child for child in found if word in _command_of(child)]


def is_alive(pid: int) -> bool:
    """Return whether a process runs. One that has ended does not, even if it was not waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
