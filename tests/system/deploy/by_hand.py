"""The steps of deploy/Dockerfile, run without a container engine in a folder instead of an image.

Only the instructions that the file contains are supported. The base image is not tested: this machine's Python is
used instead.
"""

import json
import os
import re
import shutil
import string
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .conftest import DEPLOY
from .environment import Missing

REPOSITORY = DEPLOY.parent
DOCKERFILE = DEPLOY / "Dockerfile"
_OWN = re.compile(r"(?<![\w./])/(src|opt|data)\b")  # the folders that the file creates; here they are below `root`


def instructions() -> Iterator[tuple[str, str]]:
    """Return the instructions of the file: keyword and arguments."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line.strip() and not line.startswith("#")]
    for whole in "\n".join(lines).replace("\\\n", "").splitlines():
        word, _, rest = whole.partition(" ")
        yield word, rest.strip()


@dataclass
class Image:
    """The result of the build: `root` contains its folders, the rest describes how to run it."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: int = 0
    command: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)

    def here(self, text: str) -> str:
        """Return a text of the file with its folders replaced by those below `root`."""
        return _OWN.sub(rf"{self.root}/\1", text)


def build(root: Path) -> Image:
    """Run the steps of the first stage and read the last one."""
    python = root / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(_python_for_all())
    first = Image(root, {"PATH": f"{python.parent}:/usr/bin:/bin"})
    stages = [first, Image(root, dict(first.environment))]
    image = None
    for word, rest in instructions():
        if word == "FROM":
            image = stages.pop(0)
        elif image is not None:
            _STEPS[word](image, rest)
    assert image is not None
    assert not stages
    return image


def _env(image: Image, rest: str) -> None:
    for name, value in re.findall(r"(\w+)=(\S+)", rest):
        image.environment[name] = string.Template(image.here(value)).substitute(image.environment)


def _arg(image: Image, rest: str) -> None:
    name, _, value = rest.partition("=")
    image.environment[name] = value.strip('"')


def _workdir(image: Image, rest: str) -> None:
    image.folder = image.here(rest)
    Path(image.folder).mkdir(exist_ok=True)


def _copy(image: Image, rest: str) -> None:
    if rest.startswith("--from="):
        return  # both stages have the same root here
    *sources, target = rest.split()
    allowed = (REPOSITORY / ".dockerignore").read_text().splitlines()
    for source in sources:
        assert f"!{source}" in allowed, f".dockerignore keeps {source} out of the build"
        destination = Path(image.folder) / target
        if (REPOSITORY / source).is_dir():
            shutil.copytree(REPOSITORY / source, destination, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(REPOSITORY / source, destination / source)


def _run(image: Image, rest: str) -> None:
    if "useradd" in rest:
        return  # a test does not create users; the number works without a name
    pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_") or "proxy" in name.lower()}
    environment = {"HOME": str(image.root), **pip, **image.environment}
    command = ["/bin/sh", "-c", image.here(rest)]
    done = subprocess.run(command, cwd=image.folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"RUN {rest}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


def _user(image: Image, rest: str) -> None:
    image.user = int(rest.partition(":")[0])


def _command(image: Image, rest: str) -> None:
    image.command += json.loads(rest)  # ENTRYPOINT, then CMD, in exec form


def _health(image: Image, rest: str) -> None:
    image.health = json.loads(rest[rest.index("CMD ") + 4 :])


def _nothing(image: Image, rest: str) -> None:
    """Ignore an instruction that only informs people or the container engine."""


_STEPS = {
    "ENV": _env, "ARG": _arg, "WORKDIR": _workdir, "COPY": _copy, "RUN": _run, "USER": _user, "ENTRYPOINT": _command,
    "CMD": _command, "HEALTHCHECK": _health, "LABEL": _nothing, "VOLUME": _nothing, "EXPOSE": _nothing,
}  # fmt: skip


def _python_for_all() -> Path:
    """Return a Python that any user of this machine can run.

    Raises:
        Missing: there is none.
    """
    for name in (Path(sys.base_prefix) / "bin" / "python3", Path("/usr/local/bin/python3"), Path("/usr/bin/python3")):
        path = name.resolve()
        if path.exists() and all(folder.stat().st_mode & 0o001 for folder in (path, *path.parents)):
            version = subprocess.run([path, "-c", "import ensurepip, sys; print(sys.version_info[:2] >= (3, 11))"],
                                     capture_output=True, text=True, check=False)  # fmt: skip
            if version.stdout == "True\n":
                return path
    raise Missing(
        "the Dockerfile's steps need Python 3.11 or newer with venv, executable by every user (Debian: python3-venv)"
    )
