"""aider, which commits what it changes with a message that the model writes."""

import subprocess
import sys
from pathlib import Path

from weather import MODEL, TASK

BEGIN = """
git init --quiet .
git config user.email a@b.c
git config user.name A
echo one > fixed.txt
git add fixed.txt
git commit --quiet --message one
"""
SETTINGS = "- {name: openai/policy, edit_format: diff, examples_as_sys_msg: true}\n"
QUIET = ["--no-check-update", "--no-show-model-warnings", "--analytics-disable", "--no-pretty", "--no-gitignore"]

subprocess.run(["bash", "-euc", BEGIN], check=True)
Path(".aider.model.settings.yml").write_text(SETTINGS)
aider = [sys.executable, "-m", "aider", "--model", f"openai/{MODEL}", *QUIET, "--yes-always", "--map-tokens", "0"]
subprocess.run([*aider, "--message", TASK, "fixed.txt"], stdout=sys.stderr, check=True)
