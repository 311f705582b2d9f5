"""Where figures are kept: a file for each table under `benchmarks/results/`, and its place in a page of docs/.

Each says what it was measured on, by which command, at which commit. A place in the page is what stands between a comment
with the table's name and the next comment.
"""

import datetime as dt
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent / "results"
DOCS = FOLDER.parent.parent / "docs"
PAGES = (DOCS / "performance.md", DOCS / "operations.md")


def machine() -> str:
    """What it ran on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), "?")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    system = f"{platform.system()} {platform.release()}"
    return f"{os.cpu_count()} cores ({model}), {memory:.0f} GiB, Python {platform.python_version()}, {system}"


def commit() -> str:
    """The commit that was measured, and whether anything was changed since."""
    head = _git("rev-parse", "--short", "HEAD")
    # What a run itself writes is no change of what it measures.
    return (
        f"{head}, with changes"
        if _git("status", "--porcelain", "--", "proxy", "storage", "tokentape", "benchmarks/*.py")
        else head
    )


def _git(*words: str) -> str:
    told = subprocess.run(["git", *words], capture_output=True, text=True, check=False, cwd=FOLDER.parent)
    return told.stdout.strip() or ("" if told.returncode == 0 else "unknown")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write(name: str, title: str, command: str, *body: str) -> Path:
    """The file of this name, anew, and its place in the page. `body` is what follows the line that says how."""
    FOLDER.mkdir(exist_ok=True)
    load = os.getloadavg()[2]
    measured = f"{dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M} UTC, commit {commit()}, load {load:.1f}"
    told = "\n".join([f"`{command}` on {machine()}; {measured} (15 minutes, this run included).\n", *body])
    path = FOLDER / f"{name}.md"
    path.write_text(f"# {title}\n\n{told}")
    _place(name, told)
    return path


def _place(name: str, told: str) -> None:
    """Put a table into the pages where it has a place. Pictures are one folder away."""
    told = re.sub(r"\]\((\w[^/)]*\.svg)\)", r"](../benchmarks/results/\1)", told).replace("\n## ", "\n#### ")
    place = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(?=<!--)", re.DOTALL)
    for page in PAGES:
        page.write_text(place.sub(lambda found: f"{found[1]}\n{told}\n", page.read_text()))
