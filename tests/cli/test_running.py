"""The addresses of the proxies that run, as commands find them."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from proxy.cli.running import DEFAULT_URL, announced, running_urls, unreachable_hint, url_of_commands

URL = "http://127.0.0.1:9000"
PROGRAM = f"""
import sys
from proxy.cli.running import announced
with announced({URL!r}):
    print(flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def other(home):
    """Another process that has announced its address."""
    words = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process


def test_commands_use_the_only_proxy_that_runs(other):
    """Its file can be read and changed by its user only. Of several proxies none is preferred to the default address."""
    assert (running_urls(), url_of_commands()) == ([URL], URL)
    assert URL in unreachable_hint()
    with announced("https://127.0.0.1:9001"):
        assert set(running_urls()) == {URL, "https://127.0.0.1:9001"}
        assert url_of_commands() == DEFAULT_URL
    assert running_urls() == [URL]
    other.communicate()
    assert (running_urls(), url_of_commands()) == ([], DEFAULT_URL)


def test_a_process_that_was_killed_leaves_no_address(home, other):
    """Its file is removed by the next command."""
    other.kill()
    other.wait()
    folder = home / ".cache/tokentape/running"

    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(list(folder.iterdir())) == 1
    assert (running_urls(), list(folder.iterdir())) == ([], [])
    assert "tokentape serve" in unreachable_hint()


def test_without_a_home_that_can_be_written_to_nothing_is_announced(home):
    (home / ".cache").write_text("a file")
    with announced(URL):
        assert url_of_commands() == DEFAULT_URL


def test_a_file_of_another_machine_or_with_another_text_is_ignored(home):
    """A home may be on several machines."""
    with announced("file:///etc/passwd"):
        assert running_urls() == []
    with announced(URL):
        (path,) = (home / ".cache/tokentape/running").iterdir()
        path.rename(path.with_name(f"1@x{os.uname().nodename}.url"))
        assert running_urls() == []


def test_a_process_with_the_same_id_in_another_container_has_a_file_of_its_own(home):
    """Containers with one home and one host name: the end of one proxy does not hide the other."""
    with announced(URL):
        with announced("http://127.0.0.1:9001"):
            assert len(running_urls()) == 2
        assert running_urls() == [URL]


def test_a_file_of_another_user_is_ignored(other, monkeypatch):
    """HOME may be a folder that others can write to; commands send their key to the address."""
    monkeypatch.setattr("os.getuid", lambda: 987654)
    assert (running_urls(), url_of_commands()) == ([], DEFAULT_URL)


def test_a_machine_whose_name_begins_with_that_of_another_has_files_of_its_own(home, monkeypatch):
    """The other one removes none, also if it does not see the lock, as with NFS without locks."""
    folder = home / ".cache/tokentape/running"
    named = SimpleNamespace(nodename="gpu-1")
    monkeypatch.setattr("os.uname", lambda: named)
    with announced(URL):
        (path,) = folder.iterdir()
        left = path.with_name(f"1{path.name}")
        left.write_text(URL)  # not locked
        named.nodename = "gpu"
        assert running_urls() == []
        assert left.exists()
