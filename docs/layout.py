"""Measures the layout of the sources: `python -m docs.layout` prints the numbers that CONTRIBUTING.md quotes.

A room is a folder or a module at proxy's root, or a top-level package. Its floor is one more than the highest floor of the
rooms that it imports. A streamed chat call is traced from the socket to the stored step: the source files whose functions
run, and the number of moves from one file to another.
"""

import ast
import asyncio
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGES = ("proxy", "storage", "tokentape")
TRACED = tuple(str(ROOT / package) for package in ("proxy", "storage"))
SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).glob("**/*.py"))]


def module_name(path: Path) -> str:
    """Return the dotted name of a source file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    """Return the room of a module."""
    parts = module.split(".")
    return parts[1] if parts[0] == "proxy" and len(parts) > 1 else parts[0]


def imports() -> dict[str, set[str]]:
    """Return the modules of the sources that each module imports, anywhere in the file."""
    known = {module_name(path): path for path in SOURCES}
    found: dict[str, set[str]] = {}
    for name, path in known.items():
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= (inner & known.keys()) or {node.module}
        found[name] = (names & known.keys()) - {name}
    return found


def layout() -> dict[str, int]:
    """Return the numbers of the import graph."""
    modules = imports()
    rooms: dict[str, set[str]] = {}
    for name, imported in modules.items():
        if name not in ("proxy", "proxy.__main__"):
            rooms.setdefault(room(name), set()).update(room(other) for other in imported if other != "proxy")
    rooms = {name: others - {name} for name, others in rooms.items()}
    floors, circles = floors_of(rooms), circles_of(modules)
    importers = Counter(other for imported in modules.values() for other in imported)
    return {
        "rooms": len(rooms),
        "floors": max(floors.values(), default=0),
        "arrows between rooms": sum(map(len, rooms.values())),
        "arrows upwards": sum(floors.get(other, 99) >= floors.get(name, 99) for name in rooms for other in rooms[name]),
        "modules in import circles": circles,
        "entries at proxy's root": len({module.split(".")[1] for module in modules if module.startswith("proxy.")}) + 1,
        "modules": len(modules),
        "modules with one importer": sum(count == 1 for count in importers.values()),
    }


def floors_of(rooms: dict[str, set[str]]) -> dict[str, int]:
    """Return the floor of each room; rooms in a circle have none."""
    floors: dict[str, int] = {}
    while ready := [name for name in rooms if name not in floors and rooms[name] <= floors.keys()]:
        floors |= {name: 1 + max((floors[other] for other in rooms[name]), default=0) for name in ready}
    return floors


def circles_of(modules: dict[str, set[str]]) -> int:
    """Return the number of modules in import circles; a package and its own modules count as one."""
    left = {
        name: {other for other in imported if not other.startswith(f"{name}.") and not name.startswith(f"{other}.")}
        for name, imported in modules.items()
    }
    while leaves := {name for name, imported in left.items() if not imported & left.keys()}:
        left = {name: imported for name, imported in left.items() if name not in leaves}
    return len(left)


def files_entered(events: list[str]) -> Iterator[tuple[str, int]]:
    """Yield the two numbers of a traced call, with their names."""
    yield "files entered by a streamed call", len(set(events))
    yield "moves between files of a streamed call", sum(a != b for a, b in pairwise(events))


async def trace() -> list[str]:
    """Return the files of the functions that a streamed chat call runs, in order."""
    import aiohttp  # noqa: PLC0415 - with the server, only where a call is traced

    from proxy.config.settings import Settings  # noqa: PLC0415
    from proxy.server.listener import running, simulating  # noqa: PLC0415
    from proxy.simulator.options import Options  # noqa: PLC0415

    body = {"model": "simulated", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": True}
    events: list[str] = []
    frames: set[FrameType] = set()

    def profile(frame: FrameType, event: str, _argument: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(TRACED) and "/simulator/" not in file and frame not in frames:
            frames.add(frame)  # a resumed coroutine is not a new call
            events.append(file)

    async with simulating("127.0.0.1:0", Options()) as engine:
        settings = Settings(
            listen="127.0.0.1:0",
            engines={"endpoints": [{"url": engine}]},
            store={"url": f"embedded:{ROOT / 'build' / 'layout'}"},
        )
        async with running(settings) as served, aiohttp.ClientSession() as http:
            url = f"{served.url}/rollouts/layout/v1/chat/completions"
            for traced in (False, True):  # the first call includes the detection of the engine
                if traced:
                    await asyncio.sleep(1)
                    sys.setprofile(profile)
                async with http.post(url, json=body) as response:
                    await response.read()
                sys.setprofile(None)
    return events


def main() -> None:
    """Print all numbers."""
    numbers = layout() | dict(files_entered(asyncio.run(trace())))
    for name, number in numbers.items():
        print(f"{name:40} {number:5}")


if __name__ == "__main__":
    main()
