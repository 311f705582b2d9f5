"""deploy/tokentape.service, as systemd reads it."""

import re
import subprocess
import sys

import pytest

from proxy.config import Settings

from .conftest import DEPLOY
from .environment import program

UNIT = DEPLOY / "tokentape.service"
MOST_EXPOSED = "15"  # tenths, of systemd-analyze's 0 (none) to 100


@pytest.fixture
def analyze(tmp_path):
    """systemd-analyze on the unit, whose program is one that is there."""
    text = UNIT.read_text().replace("/opt/tokentape/bin/tokentape", sys.executable)
    assert sys.executable in text

    def run(*words, change=lambda text: text):
        copy = tmp_path / UNIT.name
        copy.write_text(change(text))
        command = [program("systemd-analyze"), *words, str(copy)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    return run


def test_the_unit_is_valid(analyze):
    """No unknown setting, no bad value, and nothing that systemd would pass over with a warning."""
    done = analyze("verify")

    assert (0, "") == (done.returncode, done.stderr)


def test_a_setting_that_is_none_is_found(analyze):
    """The check can fail."""
    assert "KilMode" in analyze("verify", change=lambda text: text.replace("KillMode=", "KilMode=")).stderr


def test_it_may_do_little(analyze):
    """What systemd-analyze counts as exposed is at most 1.5 of 10; sockets to anywhere are most of it."""
    done = analyze("security", "--offline=true", f"--threshold={MOST_EXPOSED}")

    assert 0 == done.returncode, done.stdout[-400:]


def test_without_its_walls_it_would_not_pass(analyze):
    """That check can fail, too."""
    walls = re.compile(r"^(Protect|Restrict|Private|System|Capability)\w+=.*$", re.MULTILINE)
    bare = analyze("security", "--offline=true", f"--threshold={MOST_EXPOSED}", change=lambda text: walls.sub("", text))

    assert bare.returncode != 0


def test_calls_have_time_to_end():
    """The proxy alone is told to stop, and has the default drain_timeout_s and half a minute before all of it is killed."""
    said = dict(line.split("=", 1) for line in UNIT.read_text().splitlines() if re.match(r"\w+=", line))

    assert "mixed" == said["KillMode"]
    assert int(said["TimeoutStopSec"]) >= Settings().shutdown_delay_s + Settings().drain_timeout_s + 30
