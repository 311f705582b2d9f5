"""Measures the layout of the sources: `python -m docs.layout` prints the numbers that CONTRIBUTING.md quotes.

A room is a folder or a module at proxy's root, or a top-level package. Its floor is one more than the highest floor of the
rooms that it imports. The second call of a rollout is traced from the socket to the end of its response: the source files that
run, the number of their functions' calls, of moves from one file to another, and of all Python calls, libraries included.
"""

import ast
import asyncio
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, Final

import orjson
import uvloop

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


def lines_of(paths: Iterable[Path]) -> Counter[str]:
    """Return the number of files, of lines, and of lines that are not blank, comment, docstring, signature or import."""
    found: Counter[str] = Counter()
    for path in paths:
        lines = path.read_text().splitlines()
        frame = {number for number, line in enumerate(lines, 1) if not line.strip() or line.lstrip().startswith("#")}
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                frame.update(range(node.lineno, (node.end_lineno or 0) + 1))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                first = node.body[0] if node.body else None
                if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                    frame.update(range(first.lineno, (first.end_lineno or 0) + 1))
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                    frame.update(range(start, max(start + 1, node.body[0].lineno)))
        found += Counter(files=1, lines=len(lines), statements=len(lines) - len(frame))
    return found


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


@dataclass(slots=True)
class Trace:
    """The Python functions that begin while the proxy handles a call. `own`: the files of TokenTape's functions, in order.

    `end`: how many of these began before the response ended. `all`: how many functions began before then, libraries included.
    """

    own: list[str] = field(default_factory=list)
    begun: int = 0
    end: int = 0
    all: int = 0
    _frames: set[FrameType] = field(default_factory=set)

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        """Count an event of `sys.setprofile`. A resumed coroutine is not a new call."""
        code = frame.f_code
        if event == "return" and code.co_name == "write_eof" and code.co_filename.endswith("web_response.py"):
            self.end, self.all = len(self.own), self.begun  # the last one of the response
        if event == "call" and frame not in self._frames:
            self._frames.add(frame)
            self.begun += 1
            if code.co_filename.startswith(TRACED):
                self.own.append(code.co_filename)

    def numbers(self) -> tuple[int, int, int, int]:
        """Return the files, the functions of TokenTape's and the moves from file to file, and all functions."""
        before = self.own[: self.end]
        return len(set(before)), len(before), sum(a != b for a, b in pairwise(before)), self.all


USER: Final = {"role": "user", "content": "hi"}
CHAT: Final = "/v1/chat/completions"
KINDS: Final = ("streamed", "unstreamed", "continued", "messages")


def _post(url: str, body: Any) -> bytes:
    request = urllib.request.Request(url, orjson.dumps(body), {"Content-Type": "application/json"})  # noqa: S310 - loopback
    with urllib.request.urlopen(request) as response:  # noqa: S310
        return bytes(response.read())


def _call(kind: str, reply: bytes) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a call; `reply` is the response to the first call of its rollout."""
    body = {
        "model": "simulated",
        "messages": [USER],
        "max_tokens": 10,
        "seed": 1,
        "stream": kind in {"streamed", "messages"},
    }
    if kind == "messages":
        return "/v1/messages", body
    if kind == "continued" and reply:
        answer = orjson.loads(reply)["choices"][0]["message"]
        return CHAT, {**body, "messages": [USER, {"role": "assistant", "content": answer["content"]}, USER]}
    return CHAT, body


async def traces() -> dict[str, Trace]:
    """Trace the second call of a rollout, for each kind of call. The client and the engine run in other threads."""
    from proxy.config.settings import Settings  # noqa: PLC0415 - with the server, only where calls are traced
    from proxy.server.listener import running  # noqa: PLC0415

    found: dict[str, Trace] = {}
    with tempfile.TemporaryDirectory() as folder, simulator() as engine:
        endpoints = {"endpoints": [{"url": engine}]}
        settings = Settings(listen="127.0.0.1:0", engines=endpoints, store={"url": f"embedded:{folder}"})
        async with running(settings) as served:
            for kind in KINDS:
                reply = b""
                for trace in (None, Trace()):
                    path, body = _call(kind, reply)
                    await asyncio.sleep(1)  # the work after the response of the call before
                    sys.setprofile(trace)
                    reply = await asyncio.to_thread(_post, f"{served.url}/rollouts/{kind}{path}", body)
                    sys.setprofile(None)
                    if trace is not None:
                        found[kind] = trace
    return found


@contextmanager
def simulator() -> Iterator[str]:
    """Run the simulator in a thread, and yield its URL."""
    from proxy.server.listener import simulating  # noqa: PLC0415
    from proxy.simulator.options import Options  # noqa: PLC0415

    loop, ready, stop = asyncio.new_event_loop(), Future[str](), asyncio.Event()

    async def serve() -> None:
        async with simulating("127.0.0.1:0", Options()) as url:
            ready.set_result(url)
            await stop.wait()

    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(loop.run_until_complete, serve())
        try:
            yield ready.result(60)
        finally:
            loop.call_soon_threadsafe(stop.set)
            serving.result()
            loop.close()


def main() -> None:
    """Print all numbers."""
    for name, number in layout().items():
        print(f"{name:40} {number:5}")
    print(f"\n{'size':26} {'files':>6} {'lines':>7} {'statements':>11}")
    rooms: dict[str, list[Path]] = {}
    for path in SOURCES:
        rooms.setdefault(room(module_name(path)), []).append(path)
    for name, paths in (*rooms.items(), ("all", SOURCES)):
        size = lines_of(paths)
        print(f"{name:26} {size['files']:6} {size['lines']:7} {size['statements']:11}")
    print(f"\n{'before the response ends':26} {'files':>6} {'own calls':>10} {'moves':>6} {'all calls':>10}")
    for kind, trace in uvloop.run(traces()).items():
        files, calls, moves, every = trace.numbers()
        print(f"{kind:26} {files:6} {calls:10} {moves:6} {every:10}")


if __name__ == "__main__":
    main()
