"""The environment of the agent tests: third-party clients and agents, installed once and cached.

There are several Python environments, since the packages require different versions of openai and litellm, and two for
Node: libraries, which the user's Node runs, and programs, with the Node that they require. They are in
`$XDG_CACHE_HOME/tokentape` (or `~/.cache/tokentape`), use about 5 GB, and may be deleted at any time. Run as a program,
it creates what is missing and prints the folders.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PYTHONS = {
    "main": HERE / "requirements.txt",
    "litellm": HERE / "requirements-litellm.txt",
    "crewai": HERE / "requirements-crewai.txt",
    "aider": HERE / "requirements-aider.txt",
}
PACKAGES = {"node": HERE / "package.json", "cli": HERE / "package-cli.json"}
OLDEST_NODE = 20


class AgentsUnavailable(Exception):
    """An agent could not be installed; the message names the failed step and the fix."""


@dataclass(frozen=True, slots=True)
class Environment:
    """The folders of the environments, by name."""

    folders: Mapping[str, Path]

    def python(self, name: str) -> Path:
        """Return the Python of an environment."""
        return self.folders[name] / "bin" / "python"

    def packages(self, name: str) -> Path:
        """Return the `node_modules` of `node` or `cli`."""
        return self.folders[name] / "node_modules"

    @property
    def programs(self) -> Path:
        """The folder of the programs, which contains the Node that they require."""
        return self.packages("cli") / ".bin"


def ensure() -> Environment:
    """Return the environment, creating what is missing of it. A second caller waits for the first.

    Raises:
        AgentsUnavailable: node or npm is missing, or a package cannot be installed.
    """
    check_node()
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokentape"
    home.mkdir(parents=True, exist_ok=True)
    folders = {name: home / f"agents-{name}-{_digest(described)}" for name, described in (PYTHONS | PACKAGES).items()}
    with (home / "agents.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it when the process ends
        for left_behind in home.glob("agents-*.part-*"):
            shutil.rmtree(left_behind, ignore_errors=True)
        for name, folder in folders.items():
            if not folder.exists():
                _make(folder, name)
    return Environment(folders)


def _digest(described: Path) -> str:
    made_of = [sys.version, sys.base_prefix, described.read_text()]
    return hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:12]


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


def _make(folder: Path, name: str) -> None:
    """Create it in a sibling folder and rename that when it is complete, so that a partial one is never used."""
    part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.part-", dir=folder.parent))
    try:
        if name in PYTHONS:
            _install_python(part, PYTHONS[name])
        else:
            _install_node(part, PACKAGES[name])
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _install_python(folder: Path, requirements: Path) -> None:
    _run([sys.executable, "-m", "venv", str(folder)])
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "--no-deps", "-r", str(requirements)])


def _install_node(folder: Path, described: Path) -> None:
    """Install the packages of a package.json, and before them the Node that their installation requires."""
    npm = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--loglevel=error"]
    node = json.loads(described.read_bytes())["dependencies"].get("node")
    if node is not None:
        _run([*npm, f"node@{node}"])
    shutil.copy(described, folder / "package.json")
    _run(npm, {**os.environ, "PATH": f"{folder / 'node_modules' / '.bin'}:{os.environ['PATH']}"})


def _run(command: list[str], environ: dict[str, str] | None = None) -> None:
    sys.stderr.write(f"agents' environment: {' '.join(command)}\n")
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, env=environ
    )
    if done.returncode != 0:
        tail = "\n".join(done.stdout.splitlines()[-15:])
        raise AgentsUnavailable(
            f"The agents' tests need what the command below installs; it ended with exit code {done.returncode}. Check the "
            f"network, the disk and the configuration of pip or npm, then run it again.\n$ {' '.join(command)}\n{tail}"
        )


if __name__ == "__main__":
    try:
        sys.stdout.writelines(f"{folder}\n" for folder in ensure().folders.values())
    except AgentsUnavailable as unavailable:
        sys.exit(str(unavailable))
