"""Writes results to files in `benchmarks/results/`, and to their places in docs/performance.md.

Each result names the machine, the command and the commit. Its place in a page is between a comment with its name and the
next comment.
"""

import datetime as dt
import os
import platform
import re
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent / "results"
DOCS = FOLDER.parent.parent / "docs"
PAGE = DOCS / "performance.md"


def machine() -> str:
    """Return a description of the machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), "?")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    system = f"{platform.system()} {platform.release()}"
    python = f"Python {platform.python_version()} {build()}"
    return f"{os.cpu_count()} cores ({model}), {memory:.0f} GiB, {python}, {system}"


def build() -> str:
    """Return whether the interpreter was built with optimizations."""
    arguments = sysconfig.get_config_var("CONFIG_ARGS") or ""
    used = [name for name, flag in (("PGO", "--enable-optimizations"), ("LTO", "--with-lto")) if flag in arguments]
    return f"with {' and '.join(used)}" if used else "without PGO and LTO"


def commit() -> str:
    """Return the measured commit, and whether there are uncommitted changes."""
    head = _git("rev-parse", "--short", "HEAD")
    # Results that a run writes are not changes of the measured code.
    return (
        f"{head}, with changes"
        if _git("status", "--porcelain", "--", "proxy", "storage", "tokentape", "benchmarks/*.py")
        else head
    )


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=False, cwd=FOLDER.parent)
    return done.stdout.strip() or ("" if done.returncode == 0 else "unknown")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write(name: str, title: str, command: str, *body: str) -> Path:
    """Write the file and the place of this name; `body` follows the line with machine and commit. Return the file's path."""
    FOLDER.mkdir(exist_ok=True)
    load = os.getloadavg()[2]
    measured = f"{dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M} UTC, commit {commit()}, load {load:.1f}"
    text = "\n".join([f"`{command}` on {machine()}; {measured} (15 minutes, this run included).\n", *body])
    path = FOLDER / f"{name}.md"
    path.write_text(f"# {title}\n\n{text}")
    _place(name, text)
    return path


def _place(name: str, text: str) -> None:
    """Write a result into the page if it has a place for it, with adapted links to images."""
    text = re.sub(r"\]\((\w[^/)]*\.svg)\)", r"](../benchmarks/results/\1)", text).replace("\n## ", "\n#### ")
    place = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(?=<!--)", re.DOTALL)
    PAGE.write_text(place.sub(lambda found: f"{found[1]}\n{text}\n", PAGE.read_text()))
