"""The table of docs/clients.md: what was seen of each client.

Holds its rows, and the writing of them. Rule: it is written when every client was seen, by a run of all tests.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from pages import ROOT

from .clients import LOOPS, PAGE, STREAMED, WHOLE, Loop

DOCUMENT = ROOT / "docs" / "clients.md"
_TABLE = re.compile(r"(?<=<!-- latest -->\n).*?(?=<!-- end -->)", re.DOTALL)
_HEAD = "| client | version | dialect | streamed | steps | exact | failed | drift | drift with thoughts |"
ON_THE_PAGE_ONLY = tuple(
    client for client in PAGE if not client.heading.startswith(tuple(loop.client for loop in LOOPS))
)


@dataclass(frozen=True, slots=True)
class Seen:
    """One run: how many steps its calls that were answered made, how many of them exact, failed calls, kinds of drift."""

    version: str
    dialect: str
    steps: int
    exact: int
    failed: int
    drift: str


@dataclass(slots=True)
class Table:
    """What was seen: of loops by name, way and whether the model thought; of programs of the page by heading and way."""

    loops: dict[tuple[str, str, bool], Seen] = field(default_factory=dict)
    page: dict[str, tuple[str, Seen]] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether every client was seen."""
        wanted = {(loop.name, way, thinks) for loop in LOOPS for way in loop.ways for thinks in (False, True)}
        return wanted <= self.loops.keys() and {client.heading for client in ON_THE_PAGE_ONLY} <= self.page.keys()

    def write(self) -> None:
        """Write it into the page."""
        lines = [_HEAD, "|---" * 9 + "|", *(line for loop in LOOPS for line in self._lines_of(loop))]
        for client in ON_THE_PAGE_ONLY:
            way, seen = self.page[client.heading]
            lines.append(_line(client.heading, seen, way, "not tried"))
        table = "\n".join(lines)
        DOCUMENT.write_text(_TABLE.sub(lambda _: f"\n{table}\n\n", DOCUMENT.read_text()))

    def _lines_of(self, loop: Loop) -> Iterator[str]:
        """One line where streaming makes no difference, else two."""
        pairs = [(self.loops[loop.name, way, False], self.loops[loop.name, way, True]) for way in loop.ways]
        ways = {WHOLE: "no", STREAMED: "yes"}
        told = [(ways[way], pair) for way, pair in zip(loop.ways, pairs, strict=True)]
        if len(pairs) == 2 and pairs[0] == pairs[1]:
            told = [("no; yes", pairs[0])]
        for way, (plain, thinking) in told:
            yield _line(loop.client, plain, way, thinking.drift or "none")


def _line(client: str, seen: Seen, way: str, thinking: str) -> str:
    numbers = f"{seen.steps} | {seen.exact} | {seen.failed}"
    return f"| {client} | {seen.version} | {seen.dialect} | {way} | {numbers} | {seen.drift or 'none'} | {thinking} |"
