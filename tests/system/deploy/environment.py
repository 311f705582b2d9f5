"""What the tests of deploy/ need besides .venv: checkers from PyPI, and programs of Debian.

Holds which they are and how they are had. The checkers get an environment of their own under `$XDG_CACHE_HOME/tokentape`
(or `~/.cache/tokentape`), some 150 MB, made once, which may be deleted at will. Run as a program it makes what is missing.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
PROGRAMS = {"haproxy": "haproxy", "kubectl": "kubernetes-client", "systemd-analyze": "systemd"}  # and Debian's packages


class Missing(Exception):
    """Something could not be had; the sentence says what, and how to have it."""


def checkers() -> Path:
    """The folder of the checkers' programs, made if it is not there. Raises `Missing`."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokentape"
    key = hashlib.sha256(f"{REQUIREMENTS.read_text()}{sys.version}{sys.base_prefix}".encode()).hexdigest()[:12]
    folder = home / f"deploy-{key}"
    if not folder.exists():
        home.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.part-", dir=home))
        try:
            _run([sys.executable, "-m", "venv", str(part)])
            _run([str(part / "bin" / "python"), "-m", "pip", "install", "--quiet", "--requirement", str(REQUIREMENTS)])
            part.rename(folder)  # whole, or not at all; scripts name the other folder, so each is run by its python
        except OSError:  # another process was first
            if not folder.exists():
                raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder / "bin"


def program(name: str) -> str:
    """The path of a program of Debian, installed if we are root. Raises `Missing`."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        _run(["apt-get", "update", "--quiet"])
        _run(["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", PROGRAMS[name]])
        return program(name)
    if found is None:
        raise Missing(f"the tests of deploy/ run {name}: install it (Debian: apt-get install {PROGRAMS[name]})")
    return found


def _run(command: list[str]) -> None:
    said = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=said)
    if done.returncode != 0:
        raise Missing(
            f"`{' '.join(command)}` ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )


if __name__ == "__main__":
    try:
        checkers()
        for each in PROGRAMS:
            program(each)
    except Missing as missing:
        sys.exit(str(missing))
