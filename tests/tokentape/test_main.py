"""The `tokentape` command starts only packages that are TokenTape's."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tokentape.__main__ import MARK, PACKAGES, package_problem

ROOT = Path(__file__).parent.parent.parent
COMMAND = "from tokentape.__main__ import main; main()"  # as pip's console script calls it
PROXY_PY = {
    "proxy/__init__.py": "from .proxy import Proxy, main, grout, sleep_loop, entry_point\n",
    "proxy/__main__.py": "from .proxy import entry_point\n\nif __name__ == '__main__':\n    entry_point()\n",
    "proxy/proxy.py": "raise SystemExit('proxy.py was imported')\n",
}


@pytest.fixture
def site(tmp_path):
    """A folder with our three packages, as pip installs them."""
    for package in (*PACKAGES, "tokentape"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def install_proxy_py(site):
    """Write what `pip install proxy.py` (2.4.10) writes over our files."""
    for path, text in PROXY_PY.items():
        (site / path).write_text(text)
    info = site / "proxy.py-2.4.10.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: proxy.py\nVersion: 2.4.10\n")
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in PROXY_PY))


def uninstall_proxy_py(site):
    """Delete what `pip uninstall proxy.py` deletes."""
    for path in PROXY_PY:
        (site / path).unlink()
    shutil.rmtree(site / "proxy.py-2.4.10.dist-info")


def run(site, *arguments, options=()):
    return subprocess.run(
        [sys.executable, "-P", *options, "-c", COMMAND, *arguments],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_packages_of_this_checkout_are_tokentapes():
    """Each contains the line that `package_problem` looks for, and its name."""
    assert [None, None] == [package_problem(package) for package in PACKAGES]
    assert "DISTRIBUTION = 'tokentape'" == MARK.replace('"', "'")


def test_the_command_line_starts(site):
    """Of the packages that are installed beside `tokentape`."""
    done = run(site, "--version")

    assert (0, "") == (done.returncode, done.stderr)
    assert done.stdout.startswith("tokentape ")


@pytest.mark.parametrize("command", ["serve", "check"])
def test_a_package_that_another_distribution_overwrote_is_not_imported(site, command):
    """The one sentence names the file, the other distribution and both commands that fix it."""
    install_proxy_py(site)
    done = run(site, command)

    assert (1, "") == (done.returncode, done.stdout)
    assert (
        f"tokentape: Package 'proxy' at {site}/proxy/__init__.py belongs to another distribution (proxy.py): run "
        "`pip uninstall proxy.py`, then `pip install --force-reinstall --no-deps .` in a clone of TokenTape.\n"
    ) == done.stderr


def test_a_package_without_its_init_file_is_incomplete(site):
    """As `pip uninstall proxy.py` leaves it."""
    install_proxy_py(site)
    uninstall_proxy_py(site)
    done = run(site, "serve", options=["-S"])  # without the packages of the environment that runs the tests

    assert 1 == done.returncode
    assert (
        "tokentape: Package 'proxy' is incomplete: it has no __init__.py. Run "
        "`pip install --force-reinstall --no-deps .` in a clone of TokenTape.\n"
    ) == done.stderr


def test_a_package_of_an_editable_installation_is_not_overwritten_but_hidden(tmp_path, monkeypatch):
    """The folder of the other distribution comes first on the import path; uninstalling it is enough."""
    (tmp_path / "proxy").mkdir()
    install_proxy_py(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "proxy")

    assert package_problem("proxy") == (
        f"Package 'proxy' at {tmp_path}/proxy/__init__.py belongs to another distribution (proxy.py): run "
        "`pip uninstall proxy.py`."
    )


def test_a_folder_of_the_same_name_is_not_imported(tmp_path, monkeypatch):
    """A package that no distribution installed, such as one in the working directory."""
    (tmp_path / "storage").mkdir()
    (tmp_path / "storage" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "storage")

    assert package_problem("storage") == (
        f"Package 'storage' at {tmp_path}/storage/__init__.py is not TokenTape's: remove it from the import path, or run "
        "`pip install --force-reinstall --no-deps .` in a clone of TokenTape."
    )
