"""The distribution: a small sdist, a wheel that is built from it, and the command of an installed wheel."""

import email
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib.metadata import distributions
from pathlib import Path
from urllib.request import Request, urlopen

import orjson
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PACKAGES = {"proxy", "storage", "tokentape"}
MAX_SDIST_BYTES = 1_500_000
NAMES_THE_REGISTRY = re.compile(r"\binstall\b[^\n`\"]*[ '\"]tokentape(\[|['\"` ]|$)", re.MULTILINE)


def tracked(*patterns: str) -> list[Path]:
    """Return the files of the tree that a commit would contain, without links."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *patterns]
    names = subprocess.run(words, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    paths = [ROOT / name for name in names if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The sdist of a clean copy of the tree, and the wheel that is built from the unpacked sdist alone."""
    folder = tmp_path_factory.mktemp("package")
    for path in tracked(*PACKAGES, "*.md", "*.toml", "*.txt", "*.yaml", "LICENSE", "tests/cassettes/*.json"):
        copy = folder / "tree" / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    sdist = built(folder / "tree", "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return sdist, built(folder / sdist.name.removesuffix(".tar.gz"), "wheel")


def built(folder: Path, target: str) -> Path:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", target], cwd=folder, check=True, capture_output=True
    )
    (path,) = (folder / "dist").iterdir()
    return path


@pytest.fixture(scope="module")
def installed(dist, tmp_path_factory):
    """The command of the wheel in a new environment with the dependencies of this one."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        dist[1],
    ]
    subprocess.run(install, check=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    return folder / "bin" / "tokentape"


def test_the_sdist_contains_the_packages_and_no_tests(dist):
    """It has no cassettes, which are most of the tree, and is small."""
    with tarfile.open(dist[0]) as archive:
        names = {member.name.split("/")[1] for member in archive if member.isfile()}

    assert PACKAGES | {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "PKG-INFO"} <= names
    assert {"tests", "docs", "benchmarks", "deploy", "examples"}.isdisjoint(names)
    assert dist[0].stat().st_size < MAX_SDIST_BYTES


def test_the_wheel_contains_every_file_of_the_packages_and_a_registrys_metadata(dist):
    with zipfile.ZipFile(dist[1]) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (path,) = [name for name in archive.namelist() if name.endswith("METADATA")]
        metadata = email.message_from_bytes(archive.read(path))
        text = archive.read(path).decode()

    assert {str(path.relative_to(ROOT)) for path in tracked(*PACKAGES)} == names
    assert ("tokentape", "Apache-2.0", ">=3.11", "text/markdown") == tuple(
        metadata[name] for name in ("Name", "License-Expression", "Requires-Python", "Description-Content-Type")
    )
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 15)} <= {
        *metadata.get_all("Classifier")
    }
    assert "TokenTape" in text


def test_an_installed_wheel_serves_records_and_exports_without_the_repository(installed, tmp_path):
    """Python does not see the repository; the page and the vocabulary of the simulator are in the wheel."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    serve = [installed, "serve", "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(serve, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        log = ""
        while not (found := re.search(r"listening (http://\S+)", log)):
            line = process.stderr.readline()
            assert line, log
            log += line
        url = found[1]
        body = orjson.dumps({"model": "policy", "messages": [{"role": "user", "content": "hi"}]})
        call = Request(f"{url}/rollouts/r1/v1/chat/completions", body, {"Content-Type": "application/json"})
        assert 200 == urlopen(call).status
        assert b"TokenTape" in urlopen(f"{url}/ui").read()
        exported = subprocess.run(
            [installed, "export", "--url", url], cwd=tmp_path, env=environment, capture_output=True, check=True
        ).stdout
    finally:
        process.terminate()
        process.communicate(timeout=60)

    assert "r1" == orjson.loads(exported)["rollout_id"]
    assert 0 == process.returncode
    assert str(ROOT) not in log


def test_no_page_and_no_message_installs_tokentape_from_a_registry():
    """It is on none: the command would fail, or install something else. `pip install .` in a clone works."""
    files = [
        path for path in tracked("*.md", "*.py", "Makefile", "deploy") if "tests" not in path.relative_to(ROOT).parts
    ]
    found = {str(path): match[0] for path in files if (match := NAMES_THE_REGISTRY.search(path.read_text()))}

    assert NAMES_THE_REGISTRY.search("pip install 'tokentape[client]'")
    assert NAMES_THE_REGISTRY.search("pip install --no-deps tokentape\n")
    assert {} == found


def test_every_pinned_version_satisfies_the_requirements_of_the_installed_packages():
    """A pin that contradicts another package would be found by the next fresh installation only."""
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    pinned = {canonicalize_name(name): version for name, version in pins.items()}
    installed = {
        canonicalize_name(found.name): found for found in distributions(path=[sysconfig.get_paths()["purelib"]])
    }
    wrong = [
        f"{name}=={pinned[name]} requires {requirement}"
        for name in pinned.keys() & installed.keys()
        for requirement in map(Requirement, installed[name].requires or ())
        if (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
        and (version := pinned.get(canonicalize_name(requirement.name)))
        and not requirement.specifier.contains(version, prereleases=True)
    ]

    assert len(pinned.keys() & installed.keys()) > 100
    assert [] == sorted(wrong)
