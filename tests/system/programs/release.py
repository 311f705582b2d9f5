"""Builds a release of HEAD in dist/, and checks it: `make release`.

dist/ gets the sdist, the wheel that is built from it, checksums, and an SBOM of the wheel and its pinned requirements.
Each Python of the classifiers that this machine has installs the wheel in an empty environment, from the package index with
constraints.txt; the newest one installs the sdist as well. There `tokentape` serves, records a call and exports it.
"""

import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

from tests.support.installed import exported_by

ROOT = Path(__file__).parents[3]
DIST = ROOT / "dist"
_MINOR = re.compile(r"Programming Language :: Python :: 3\.(\d+)")


def main() -> None:
    """Build and check; exit with the reason if a check fails."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    if problem := problem_of(project["version"], (ROOT / "CHANGELOG.md").read_text()):
        sys.exit(problem)
    if _run("git", "status", "--porcelain", "--untracked-files=no", cwd=ROOT):
        sys.exit("The tree has changes that are not in HEAD, which is what a release contains: commit or stash them.")
    minors = sorted({int(found[1]) for name in project["classifiers"] if (found := _MINOR.fullmatch(name))})
    pythons = {f"3.{minor}": path for minor in minors if (path := python_of(minor))}
    if not pythons:
        sys.exit(f"None of Python {', '.join(f'3.{minor}' for minor in minors)} is on this machine.")
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        sdist, wheel = build(Path(name))
        for number, (minor, path) in enumerate(pythons.items()):
            check(path, wheel, Path(name) / minor)
            print(f"Python {minor}: the wheel serves, records and exports ({path})")
            if number == len(pythons) - 1:
                check(path, sdist, Path(name) / "sdist")
                print(f"Python {minor}: the sdist as well")
                describe(Path(name) / minor / "bin" / "python", DIST / f"{wheel.name.split('-py3')[0]}.cdx.json")
    print(
        "".join(
            f"Python 3.{minor}: untested, not on this machine\n" for minor in minors if f"3.{minor}" not in pythons
        ),
        end="",
    )
    files = sorted(DIST.iterdir())
    sums = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)
    (DIST / "SHA256SUMS").write_text(sums)
    print(sums, end="")


def problem_of(version: str, changes: str) -> str | None:
    """Return why this version cannot be released, or None. A development version (`.dev0`) has no section of its own."""
    if ".dev" in version:
        return None
    if f"\n## {version} (" not in changes:
        return f"CHANGELOG.md has no section `## {version} (DATE)`."
    if "\n## Unreleased" in changes:
        return f"CHANGELOG.md has a section `## Unreleased`: its changes belong to {version}."
    return None


def python_of(minor: int) -> Path | None:
    """Return the newest Python 3.`minor` of the PATH or of pyenv."""
    versions = (Path.home() / ".pyenv" / "versions").glob(f"3.{minor}.*/bin/python3")
    newest = sorted(versions, key=lambda path: [int(part) for part in re.findall(r"\d+", path.parts[-3])], reverse=True)
    found = [Path(path)] if (path := shutil.which(f"python3.{minor}")) else []
    runs = (
        path for path in newest + found if subprocess.run([path, "-c", "import ensurepip"], check=False).returncode == 0
    )
    return next(runs, None)


def build(folder: Path) -> tuple[Path, Path]:
    """Build the sdist from HEAD's files alone, and the wheel from the unpacked sdist."""
    archive = folder / "head.tar"
    _run("git", "archive", f"--output={archive}", "HEAD", cwd=ROOT)
    sources = folder / "head"
    with tarfile.open(archive) as opened:
        opened.extractall(sources, filter="data")
    _run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(DIST), cwd=sources)
    (sdist,) = DIST.iterdir()
    with tarfile.open(sdist) as opened:
        opened.extractall(folder, filter="data")
    _run(
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "-t",
        "wheel",
        "-d",
        str(DIST),
        cwd=folder / sdist.name.removesuffix(".tar.gz"),
    )
    (wheel,) = DIST.glob("*.whl")
    return sdist, wheel


def check(python: Path, distribution: Path, environment: Path) -> None:
    """Install a distribution in an empty environment, and use it in an empty folder."""
    _run(str(python), "-m", "venv", str(environment), cwd=ROOT)
    own = str(environment / "bin" / "python")
    constraints = ROOT / "constraints.txt"
    _run(own, "-m", "pip", "install", "--quiet", "--constraint", str(constraints), str(distribution), cwd=environment)
    _run(own, "-m", "pip", "check", cwd=environment)
    with tempfile.TemporaryDirectory() as folder:
        assert exported_by([environment / "bin" / "tokentape"], Path(folder))["rollout_id"] == "r1"


def describe(python: Path, target: Path) -> None:
    """Write the SBOM of what an environment has installed, without pip."""
    _run(str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "pip", "setuptools", cwd=ROOT)
    options = ("--pyproject", str(ROOT / "pyproject.toml"), "--output-reproducible", "--output-format", "JSON")
    _run(
        sys.executable,
        "-m",
        "cyclonedx_py",
        "environment",
        *options,
        "--output-file",
        str(target),
        str(python),
        cwd=ROOT,
    )


def _run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"`{' '.join(command)}` ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
