"""The environment of the agent tests: third-party clients and agents, installed once and cached.

There are two Python environments, since litellm requires openai below 3 and the others above, and one for Node. They
are in `$XDG_CACHE_HOME/tokentape` (or `~/.cache/tokentape`), use about 1.8 GB, and may be deleted at any time. Run as a
program, it creates what is missing and prints the folder.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PYTHONS = {"main": HERE / "requirements.txt", "litellm": HERE / "requirements-litellm.txt"}
PACKAGES = HERE / "package.json"
OLDEST_NODE = 20


class AgentsUnavailable(Exception):
    """An agent could not be installed; the message names the failed step and the fix."""


@dataclass(frozen=True, slots=True)
class Environment:
    """The folder that contains all environments."""

    folder: Path

    def python(self, name: str) -> Path:
        """Return the Python of `main` or `litellm`."""
        return self.folder / name / "bin" / "python"

    @property
    def node(self) -> Path:
        """The folder whose `node_modules` a program must be below."""
        return self.folder / "node"


def ensure() -> Environment:
    """Return the environment, creating it if it is missing. A second caller waits for the first.

    Raises:
        AgentsUnavailable: node or npm is missing, or a package cannot be installed.
    """
    check_node()
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokentape"
    home.mkdir(parents=True, exist_ok=True)
    made_of = [path.read_text() for path in (*PYTHONS.values(), PACKAGES)]
    folder = (
        home
        / f"agents-{hashlib.sha256(chr(0).join([sys.version, sys.base_prefix, *made_of]).encode()).hexdigest()[:12]}"
    )
    with (home / "agents.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it when the process ends
        if not folder.exists():
            _make(folder)
    return Environment(folder)


def check_node() -> None:
    """Check that Node and npm are installed and new enough.

    Raises:
        AgentsUnavailable: one is missing or too old.
    """
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            raise AgentsUnavailable(
                f"The agents' tests need {program}, which is missing: install Node.js {OLDEST_NODE} or later "
                "(Debian: apt-get install nodejs npm), then run this again."
            )
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.removeprefix("v").partition(".")[0]) < OLDEST_NODE:
        raise AgentsUnavailable(f"The agents' tests need Node.js {OLDEST_NODE} or later; {version} is installed.")


def _make(folder: Path) -> None:
    """Create it in a sibling folder and rename that when it is complete, so that a partial one is never used."""
    for left_behind in folder.parent.glob("agents-*.part-*"):
        shutil.rmtree(left_behind, ignore_errors=True)
    part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.part-", dir=folder.parent))
    try:
        for name, requirements in PYTHONS.items():
            _run([sys.executable, "-m", "venv", str(part / name)])
            pip = [
                str(part / name / "bin" / "python"),
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
            ]
            _run([*pip, "--no-deps", "-r", str(requirements)])
        (part / "node").mkdir()
        shutil.copy(PACKAGES, part / "node")
        _run(["npm", "install", "--prefix", str(part / "node"), "--no-audit", "--no-fund", "--loglevel=error"])
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _run(command: list[str]) -> None:
    sys.stderr.write(f"agents' environment: {' '.join(command)}\n")
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-15:])
        raise AgentsUnavailable(
            f"The agents' tests need what the command below installs; it ended with exit code {done.returncode}. Check the "
            f"network, the disk and the configuration of pip or npm, then run it again.\n$ {' '.join(command)}\n{tail}"
        )


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{ensure().folder}\n")
    except AgentsUnavailable as unavailable:
        sys.exit(str(unavailable))
