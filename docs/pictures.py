"""Generates docs/images/cli-*.svg, the output of commands in a run with the simulator, and branches.svg.

Run `python -m docs.pictures`, or with the names of some pictures. IDs, times and sampled tokens differ from run to run.
"""

import asyncio
import io
import sys
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, chdir
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import aiohttp
import orjson
from rich.console import Console

from proxy.cli import audit as command
from proxy.cli.check import findings, print_findings
from proxy.cli.commands import listed, print_rollout, print_step
from proxy.cli.console import print_lines
from proxy.cli.control import Control, ControlAddress
from proxy.cli.diff import diff
from proxy.cli.export import ExportRequest, download
from proxy.cli.render import StepView, summary
from proxy.cli.runner import print_answer
from proxy.cli.tail import line
from proxy.config.settings import load
from proxy.server.listener import running, simulating
from proxy.simulator.options import Options

IMAGES = Path(__file__).parent / "images"
SYSTEM = "You add numbers with the tool `add`, and answer in one sentence."
ALL = ExportRequest("sequences", (), None, "exact", "ndjson")


def terminal(width: int = 110) -> Console:
    """Return a terminal that records its output."""
    options = {"force_terminal": True, "color_system": "truecolor", "record": True, "file": io.StringIO()}
    return Console(width=width, highlight=False, markup=False, emoji=False, **options)  # type: ignore[arg-type]


def keep(name: str, words: str, out: Console) -> None:
    """Write the recorded output as docs/images/cli-NAME.svg, with the command line as its title."""
    text = out.export_svg(title=words, unique_id=f"cli-{name}")
    (IMAGES / f"cli-{name}.svg").write_text("\n".join(part.rstrip() for part in text.splitlines()) + "\n")


async def fill(http: aiohttp.ClientSession, url: str) -> None:
    """Record a group of four rollouts with rewards, a rollout with drift, a failed call and a call with `echo`."""

    async def post(path: str, body: dict[str, Any]) -> Any:
        async with http.post(f"{url}{path}", json=body) as answer:
            return await answer.json()

    group = await post("/groups", {"group_id": "sums-17", "size": 4})
    for number, rollout in enumerate(group["rollouts"]):
        await converse(post, rollout["rollout_id"], 2 + number % 2)
        await post(
            f"/rollouts/{rollout['rollout_id']}/finish", {"status": "completed", "reward": [1.0, 0.0, 0.5, 1.0][number]}
        )
    await converse(post, "sums/edited", 3, edits=True)
    await post("/rollouts/sums%2Fedited/finish", {"status": "completed", "reward": 0.25, "metadata": {"task": "2 + 3"}})
    await post("/rollouts/base/v1/completions", {"model": "policy", "prompt": "2 + 3 =", "max_tokens": 8, "echo": True})
    await post("/rollouts/base/v1/completions", {"model": "policy", "prompt": "2 + 3 =", "temperature": -1})


async def converse(post: Any, name: str, turns: int, *, edits: bool = False) -> None:
    """Run `turns` turns; with `edits` the agent shortens one reply before the next turn."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What is 2 + 3?"}]
    for turn in range(turns):
        body = {"model": "policy", "messages": messages, "max_tokens": 24, "logprobs": True}
        answer = await post(f"/rollouts/{name.replace('/', '%2F')}/v1/chat/completions", body)
        content = answer["choices"][0]["message"]["content"]
        content = content[:12] if edits and turn == 1 else content
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "Are you sure?"}]


@asynccontextmanager
async def filled() -> AsyncIterator[tuple[str, str]]:
    """Run a proxy with recorded rollouts and its engine; yield their URLs."""
    store = {"url": "embedded:./data"}
    async with simulating("127.0.0.1:0", Options(model="policy", seed=17)) as engine:
        settings = load(listen="127.0.0.1:0", engines={"endpoints": [{"url": engine, "name": "gpu-0"}]}, store=store)
        async with running(settings) as served, aiohttp.ClientSession() as http:
            await fill(http, served.url)
            yield served.url, engine


async def show(url: str) -> None:
    """Make the pictures of list, show and tail."""
    address = ControlAddress(url, None, None)
    out = terminal()
    await print_answer(address, partial(listed, noun="rollouts", limit=50), as_json=False, out=out)
    keep("list", "tokentape list", out)
    out = terminal()
    await print_rollout(address, out, "sums/edited", StepView(), as_json=False)
    keep("show", "tokentape show sums/edited", out)
    out = terminal()
    await print_step(address, out, "sums/edited", "0", StepView(logprobs=True, ids=True), as_json=False)
    keep("logprobs", "tokentape show sums/edited --step 0 --ids --logprobs", out)
    out = terminal(132)
    for name in ("sums/edited", "base"):
        async for step in Control(url).steps(name):
            print_lines(out, [line(summary(step), with_rollout=True)], indent=14)
    keep("tail", "tokentape tail", out)


async def audit(url: str, engine: str) -> None:
    """Make the picture of an audit of rows with a wrong token id in one of them."""
    file = Path("rows.ndjson")
    await download(ControlAddress(url, None, None), ALL, file)
    rows = [orjson.loads(row) for row in file.read_bytes().splitlines()]  # noqa: ASYNC240 - the loop has no other work
    changed = max(range(len(rows[0]["mask"])), key=lambda at: rows[0]["mask"][at] * at) - 12
    rows[0]["token_ids"][changed] += 1
    file.write_bytes(b"\n".join(map(orjson.dumps, rows)))  # noqa: ASYNC240
    out = terminal(132)
    address = command.ServerAddress(engine)
    request = command.Request(file, ALL, address, None, None, 0.01, None, 4, None, as_json=False)
    await command.audit(request, out, Console(quiet=True))
    keep("audit", "tokentape audit --file rows.ndjson --engine http://127.0.0.1:8000", out)


async def check(engine: str) -> None:
    """Make the picture of a check of a configuration with common mistakes."""
    settings = load(
        listen="0.0.0.0:8443",
        models={"gpt-4o": "policy", "judge": "polcy"},
        agents={"api_keys": ["changeme"]},
        control={"api_keys": ["s8Zc4rQpT1vXw9LmB2dK"], "listen": "127.0.0.1:8401"},
        engines={"endpoints": [{"url": engine, "name": "gpu-0"}, {"url": f"{engine}/api", "name": "gpu-1"}]},
        store={"url": "embedded:./other"},
    )
    out = terminal(132)
    await print_findings(findings(settings), out, as_json=False)
    keep("check", "tokentape check --config config.yaml", out)


async def compare(url: str) -> None:
    """Make the picture of a rollout and another one that branches from it after the first step."""
    async with aiohttp.ClientSession() as http:

        async def post(path: str, body: dict[str, Any]) -> Any:
            async with http.post(f"{url}{path}", json=body) as answer:
                return await answer.json()

        first = await anext(Control(url).steps("sums/edited"))
        playback = {"of": "sums/edited", "through": first["step_id"]}
        await post("/rollouts", {"rollout_id": "sums/branch", "playback": playback})
        await converse(post, "sums/branch", 3)
    out = terminal()
    await diff(ControlAddress(url, None, None), out, "sums/edited", "sums/branch", 0.01, as_json=False)
    keep("diff", "tokentape diff sums/edited sums/branch", out)


_LANES: Final = (  # a rollout: its name, where it branches (None: the source), its number of steps, what is beside it
    ("r1", None, 6, "reward 0"),
    ("r1 before step 3", 3, 5, "reward 1"),
    ("r1 before step 3", 3, 6, "reward 0"),
    ("r1 before step 3", 3, 4, "reward 1"),
)
_STEP, _LANE, _LEFT, _TOP, _RADIUS = 74, 62, 190, 66, 17
_BLUE, _ORANGE, _GREY = "#3b6ea8", "#c2702b", "#808890"


def branches() -> None:
    """Draw docs/images/branches.svg: a rollout, and three that repeat it up to a step."""
    marks: list[str] = []

    def write(x: int, y: int, text: str, color: str = _GREY, anchor: str = "middle") -> None:
        marks.append(f'<text x="{x}" y="{y}" fill="{color}" text-anchor="{anchor}">{text}</text>')

    for row, (name, branch, steps, reward) in enumerate(_LANES):
        y = _TOP + _LANE * row
        write(12, y + 5, name, anchor="start")
        for index in range(steps):
            x, is_inherited = _LEFT + _STEP * index, branch is not None and index < branch
            color = _BLUE if branch is None or is_inherited else _ORANGE
            look = f'fill="none" stroke="{color}" stroke-dasharray="4 3"' if is_inherited else f'fill="{color}"'
            if index:
                ends = f'x1="{x - _STEP + _RADIUS}" y1="{y}" x2="{x - _RADIUS}" y2="{y}"'
                marks.append(f'<line {ends} stroke="{_GREY}" stroke-width="1.5"/>')
            marks.append(f'<circle cx="{x}" cy="{y}" r="{_RADIUS}" stroke-width="2" {look}/>')
            write(x, y + 5, str(index), color if is_inherited else "#ffffff")
        write(_LEFT + _STEP * (steps - 1) + _RADIUS + 12, y + 5, reward, anchor="start")
    middle = _LEFT + _STEP * 3 - _STEP // 2
    bottom = _TOP + _LANE * len(_LANES)
    marks.append(
        f'<line x1="{middle}" y1="40" x2="{middle}" y2="{bottom - 20}" stroke="{_GREY}" stroke-dasharray="2 4"/>'
    )
    write(middle, 26, "branch step")
    for at, (look, text) in enumerate((
        (f'fill="{_BLUE}"', "recorded"),
        (f'fill="none" stroke="{_BLUE}" stroke-width="2" stroke-dasharray="4 3"', "answered from the tape"),
        (f'fill="{_ORANGE}"', "sampled now"),
    )):  # fmt: skip
        x = _LEFT + (0, 120, 320)[at]
        marks.append(f'<circle cx="{x}" cy="{bottom}" r="8" {look}/>')
        write(x + 16, bottom + 5, text, anchor="start")
    width, height = _LEFT + _STEP * 6 + 70, bottom + 26
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="14">'
    (IMAGES / "branches.svg").write_text("\n".join([head, *marks, "</svg>"]) + "\n")


async def main(names: Collection[str]) -> None:
    """Make these pictures, or all."""
    IMAGES.mkdir(exist_ok=True)
    if not names or "branches" in names:
        branches()
    with TemporaryDirectory(prefix="tt-") as folder, chdir(folder):
        async with filled() as (url, engine):
            pictures = {"show": show(url), "audit": audit(url, engine), "check": check(engine), "diff": compare(url)}
            for name, picture in pictures.items():
                if names and name not in names:
                    picture.close()
                else:
                    await picture


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
