"""The code of docs/trainers.md, for programs that run in the trainers' Python."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

# Not as `tests.support`: verl and OpenRLHF install a package `tests`.
sys.path.append(str(Path(__file__).parents[4] / "support"))

from pages import ROOT, blocks_of

TASKS = [[{"role": "user", "content": text}] for text in ("Name a city.", "Name two fruits.")]


def definitions_from(url: str, *names: str) -> dict[str, Any]:
    """Run the page's common lines and the blocks that define these names, against a proxy; return what they define."""
    blocks = [block for block in blocks_of(ROOT / "docs" / "trainers.md") if block.language == "python"]
    sys.modules["recorded_page"] = module = ModuleType("recorded_page")  # verl imports its agent loops by name
    made = vars(module)
    for block in blocks:
        if "PROXY = " in block.text or any(
            f"{kind} {name}" in block.text for name in names for kind in ("def", "class")
        ):
            exec(compile(block.text.replace("http://127.0.0.1:8400", url), block.place, "exec"), made)
    return made
