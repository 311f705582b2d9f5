"""The `tokentape` command in a clone; tests/system/test_package.py has that of a wheel."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_a_users_own_modules_do_not_hide_the_servers(tmp_path):
    """`python -m tokentape` searches the working directory first, and an editable installation follows site-packages."""
    (tmp_path / "proxy.py").write_text("raise SystemExit('proxy.py of the user was imported')\n")
    (tmp_path / "storage").mkdir()
    (tmp_path / "storage" / "__init__.py").write_text("raise SystemExit('storage of the user was imported')\n")
    done = subprocess.run(
        [sys.executable, "-m", "tokentape", "--version"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("tokentape ")
