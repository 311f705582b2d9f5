"""deploy/tokentape.service, as systemd reads it."""

import re
import subprocess
import sys

import pytest

from proxy.cli.runner import Exit
from proxy.config.settings import Settings

from .conftest import DEPLOY
from .environment import program

UNIT = DEPLOY / "tokentape.service"
MAX_EXPOSURE = "15"  # tenths on systemd-analyze's scale from 0 (safe) to 100


@pytest.fixture
def analyze(tmp_path):
    """Run systemd-analyze on the unit, with a program that exists."""
    text = UNIT.read_text().replace("/opt/tokentape/bin/tokentape", sys.executable)
    assert sys.executable in text

    def run(*words, change=lambda text: text):
        copy = tmp_path / UNIT.name
        copy.write_text(change(text))
        command = [program("systemd-analyze"), *words, str(copy)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    return run


def test_the_unit_is_valid(analyze):
    """No unknown setting, no bad value, and no warning."""
    done = analyze("verify")

    assert (done.returncode, done.stderr) == (0, "")


def test_an_unknown_setting_is_found(analyze):
    """The check can fail."""
    assert "KilMode" in analyze("verify", change=lambda text: text.replace("KillMode=", "KilMode=")).stderr


def test_it_has_few_rights(analyze):
    """systemd-analyze's exposure is at most 1.5 of 10; most of it is network access."""
    done = analyze("security", "--offline=true", f"--threshold={MAX_EXPOSURE}")

    assert done.returncode == 0, done.stdout[-400:]


def test_without_sandboxing_the_check_fails(analyze):
    """That check can fail, too."""
    walls = re.compile(r"^(Protect|Restrict|Private|System|Capability)\w+=.*$", re.MULTILINE)
    bare = analyze("security", "--offline=true", f"--threshold={MAX_EXPOSURE}", change=lambda text: walls.sub("", text))

    assert bare.returncode != 0


def test_calls_have_time_to_finish():
    """Only the proxy's main process gets SIGTERM, and all are killed only after the default drain_timeout_s and 30 s."""
    unit = dict(line.split("=", 1) for line in UNIT.read_text().splitlines() if re.match(r"\w+=", line))

    assert unit["KillMode"] == "mixed"
    assert int(unit["TimeoutStopSec"]) >= Settings().shutdown_delay_s + Settings().drain_timeout_s + 30


def test_a_refused_configuration_is_not_restarted_and_a_failure_is():
    """`serve` exits with this code if settings are invalid (tests/cli/test_main.py)."""
    unit = dict(line.split("=", 1) for line in UNIT.read_text().splitlines() if re.match(r"\w+=", line))

    assert unit["Restart"] == "on-failure"
    assert str(int(Exit.REFUSED)) == unit["RestartPreventExitStatus"]
