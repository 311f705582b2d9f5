"""What the deploy tests need besides .venv: checkers from PyPI, and Debian programs.

The checkers have their own environment in `$XDG_CACHE_HOME/tokentape` (or `~/.cache/tokentape`), about 150 MB, created
once; it may be deleted at any time. Run as a program, it creates what is missing.
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
PROGRAMS = {
    "haproxy": "haproxy",
    "kubectl": "kubernetes-client",
    "shellcheck": "shellcheck",
    "systemd-analyze": "systemd",
}  # and their Debian packages


class Missing(Exception):
    """Something is not available; the message names it and how to install it."""


def checkers() -> Path:
    """Return the folder of the checkers' programs, creating it if it is missing.

    Raises:
        Missing: a checker cannot be installed.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokentape"
    key = hashlib.sha256(f"{REQUIREMENTS.read_text()}{sys.version}{sys.base_prefix}".encode()).hexdigest()[:12]
    folder = home / f"deploy-{key}"
    if not folder.exists():
        home.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.part-", dir=home))
        try:
            _run([sys.executable, "-m", "venv", str(part)])
            _run([str(part / "bin" / "python"), "-m", "pip", "install", "--quiet", "--requirement", str(REQUIREMENTS)])
            part.rename(folder)  # atomic; scripts name the other folder, so each is run by its Python
        except OSError:  # another process was faster
            if not folder.exists():
                raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder / "bin"


def program(name: str) -> str:
    """Return the path of a Debian program, installing it if we are root.

    Raises:
        Missing: it is not installed and cannot be.
    """
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        _run(["apt-get", "update", "--quiet"])
        _run(["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", PROGRAMS[name]])
        return program(name)
    if found is None:
        raise Missing(f"the tests of deploy/ run {name}: install it (Debian: apt-get install {PROGRAMS[name]})")
    return found


def _run(command: list[str]) -> None:
    variables = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    if done.returncode != 0:
        raise Missing(
            f"`{' '.join(command)}` ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )


if __name__ == "__main__":
    try:
        checkers()
        for program_name in PROGRAMS:
            program(program_name)
    except Missing as missing:
        sys.exit(str(missing))
