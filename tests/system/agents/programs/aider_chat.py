"""aider, which edits files and runs a test in its working directory."""

import subprocess
import sys
from pathlib import Path

from weather import MODEL, TASK, report

SETTINGS = "- {name: openai/policy, edit_format: diff, examples_as_sys_msg: true}\n"
QUIET = ["--no-git", "--no-check-update", "--no-show-model-warnings", "--analytics-disable", "--no-pretty"]

Path(".aider.model.settings.yml").write_text(SETTINGS)
Path("task.txt").write_text(TASK)  # the first message contains the files
aider = [sys.executable, "-m", "aider", "--model", f"openai/{MODEL}", *QUIET, "--yes-always"]
tested = ["--auto-test", "--test-cmd", "grep twö fixed.txt"]
subprocess.run([*aider, "--read", "task.txt", *tested, "--message", TASK, "fixed.txt"], stdout=sys.stderr, check=True)
report(Path("fixed.txt").read_text())
