"""The distribution: a small sdist, a wheel that is built from it, and the command of an installed wheel."""

import email
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.support.installed import exported_by
from tests.system.programs.release import problem_of, python_of

from hatch_build import moved

ROOT = Path(__file__).parents[2]
PACKAGES = {"proxy", "storage", "tokentape"}
SERVER = Path("tokentape/_server")
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
    for path in tracked(
        *PACKAGES, "*.md", "*.toml", "*.txt", "*.yaml", "LICENSE", "hatch_build.py", "tests/cassettes/*.json"
    ):
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
    (path,) = (folder / "dist").glob("*.whl" if target == "wheel" else "*.tar.gz")
    return path


def write_own_modules(folder: Path, own: str = "here") -> None:
    """Write the modules of a user that have the names of the server's packages."""
    (folder / "storage").mkdir(parents=True)
    (folder / "storage" / "__init__.py").write_text(f"OWN = {own!r}\n")
    (folder / "proxy.py").write_text(f"OWN = {own!r}\n")


@pytest.fixture(scope="module")
def installed(dist, tmp_path_factory):
    """The wheel in a new environment with the dependencies of this one, and with a user's modules."""
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
    write_own_modules(packages, "installed")
    return folder


def test_the_sdist_contains_the_packages_and_no_tests(dist):
    """It has no cassettes, which are most of the tree, and is small."""
    with tarfile.open(dist[0]) as archive:
        names = {member.name.split("/")[1] for member in archive if member.isfile()}

    assert PACKAGES | {"pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "CHANGELOG.md", "PKG-INFO"} <= names
    assert {"tests", "docs", "benchmarks", "deploy", "examples"}.isdisjoint(names)
    assert dist[0].stat().st_size < MAX_SDIST_BYTES


def test_the_wheel_contains_every_file_of_the_packages_and_a_registrys_metadata(dist):
    """`tokentape` is its only name at the top level."""
    with zipfile.ZipFile(dist[1]) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (path,) = [name for name in archive.namelist() if name.endswith("METADATA")]
        metadata = email.message_from_bytes(archive.read(path))
        text = archive.read(path).decode()
    sources = [path.relative_to(ROOT) for path in tracked(*PACKAGES)]
    expected = {str(path if path.parts[0] == "tokentape" else SERVER / path) for path in sources}

    assert expected | {str(SERVER / "__init__.py")} == names
    assert tuple(
        metadata[name] for name in ("Name", "License-Expression", "Requires-Python", "Description-Content-Type")
    ) == ("tokentape", "Apache-2.0", ">=3.11", "text/markdown")
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 15)} <= {
        *metadata.get_all("Classifier")
    }
    assert "TokenTape" in text


def test_a_wheel_built_from_the_tree_equals_the_one_from_the_sdist(dist):
    """`pip install .` in a clone, and an installation from the sdist, give the same files."""
    contents = []
    for path in (built(dist[0].parents[1], "wheel"), dist[1]):
        with zipfile.ZipFile(path) as archive:
            contents.append({name: archive.read(name) for name in archive.namelist()})

    assert contents[0] == contents[1]


@pytest.mark.parametrize("way", [["bin/tokentape"], ["bin/python", "-m", "tokentape"]], ids=["command", "module"])
def test_an_installed_wheel_serves_beside_modules_of_the_same_names(installed, tmp_path, way):
    """A user's `proxy.py` and `storage/`, beside it and in the working directory, break nothing: also not in workers."""
    write_own_modules(tmp_path)
    command = [installed / way[0], *way[1:]]

    assert exported_by(command, tmp_path, "--workers", "2")["rollout_id"] == "r1"


def test_an_installed_wheel_does_not_hide_modules_of_the_same_names(installed, tmp_path):
    """The process of a user who imports the client, and the pytest plugin, has their own `proxy` and `storage`."""
    program = "import tokentape, tokentape.testing, proxy, storage; print(tokentape.Client, proxy.OWN, storage.OWN)"
    done = subprocess.run(
        [installed / "bin" / "python", "-c", program], cwd=tmp_path, env={"PATH": os.environ["PATH"]},
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert (done.stderr, done.stdout) == ("", "<class 'tokentape.clients.Client'> installed installed\n")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from proxy.errors import A\n", "from tokentape._server.proxy.errors import A\n"),
        ("if é:\n    from storage import B\n", "if é:\n    from tokentape._server.storage import B\n"),
        ("a = 'é'; from proxy import a; from proxy.b import c\n",
         "a = 'é'; from tokentape._server.proxy import a; from tokentape._server.proxy.b import c\n"),
        ("from .proxy import a\nfrom proxylib import b\nimport storages\n",
         "from .proxy import a\nfrom proxylib import b\nimport storages\n"),
        ('"""proxy.errors"""\nkind = "proxy"\n', '"""proxy.errors"""\nkind = "proxy"\n'),
    ],
)  # fmt: skip
def test_imports_of_the_servers_packages_are_changed_in_a_wheel(source, expected):
    """In the statements only, wherever they are."""
    assert moved(source, "a.py") == expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import proxy.errors\n", "a.py:1: write `from … import …`"),
        ("import os, storage\n", "a.py:1: write `from … import …`"),
        ("import_module('proxy.cli.main')\n", "a.py:1: 'proxy.cli.main' is another name"),
        ("\nprogram = 'import sys; from proxy.cli.main import main'\n", "a.py:2: 'from proxy' is another name"),
    ],
)
def test_a_name_that_a_wheel_would_not_have_is_refused(source, message):
    """The build fails, instead of the installed server."""
    with pytest.raises(ValueError, match=re.escape(message)):
        moved(source, "a.py")


def test_every_file_names_the_version_of_the_project():
    """The image, and the image that the Kubernetes manifests use."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

    assert f"ARG VERSION={version}\n" in (ROOT / "deploy" / "Dockerfile").read_text()
    assert f"newTag: {version}\n" in (ROOT / "deploy" / "kubernetes" / "kustomization.yaml").read_text()


def test_a_release_requires_a_section_of_its_changes():
    """`make release` builds a development version at any time."""
    changes = "# Changes\n\n## Unreleased\n\n- a\n\n## 0.1.0 (2026-11-27)\n"

    assert problem_of("0.2.0.dev0", changes) is None
    assert "no section `## 0.2.0 (DATE)`" in problem_of("0.2.0", changes)
    assert "`## Unreleased`" in problem_of("0.1.0", changes)
    assert problem_of("0.1.0", changes.replace("Unreleased", "0.0.9")) is None


def test_a_release_is_checked_with_pythons_that_run():
    """pyenv has a command for each Python that it knows, also for those that do not run."""
    own = python_of(sys.version_info.minor)

    assert own is None or subprocess.run([own, "-c", "import ensurepip"], check=False).returncode == 0
    assert python_of(999) is None


def test_no_page_and_no_message_installs_tokentape_from_a_registry():
    """It is on none: the command would fail, or install something else. `pip install .` in a clone works."""
    files = [
        path for path in tracked("*.md", "*.py", "Makefile", "deploy") if "tests" not in path.relative_to(ROOT).parts
    ]
    found = {str(path): match[0] for path in files if (match := NAMES_THE_REGISTRY.search(path.read_text()))}

    assert NAMES_THE_REGISTRY.search("pip install 'tokentape[client]'")
    assert NAMES_THE_REGISTRY.search("pip install --no-deps tokentape\n")
    assert found == {}


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
    assert sorted(wrong) == []
