"""The results table of docs/clients.md. It is written by a run of all tests, once every client ran."""

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
    """One run: number of successful steps, number of exact ones, failed calls, kinds of drift."""

    version: str
    dialect: str
    steps: int
    exact: int
    failed: int
    drift: str


@dataclass(slots=True)
class Table:
    """Results of loops by name, framing and whether the model reasons; of the page's programs by heading."""

    loops: dict[tuple[str, str, bool], Seen] = field(default_factory=dict)
    page: dict[str, tuple[str, Seen]] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether every client ran."""
        runs = {(loop.name, way, thinks) for loop in LOOPS for way in loop.ways for thinks in (False, True)}
        return runs <= self.loops.keys() and {client.heading for client in ON_THE_PAGE_ONLY} <= self.page.keys()

    def write(self) -> None:
        """Write the table into the page."""
        lines = [_HEAD, "|---" * 9 + "|", *(line for loop in LOOPS for line in self._lines_of(loop))]
        for client in ON_THE_PAGE_ONLY:
            way, seen = self.page[client.heading]
            lines.append(_line(client.heading, seen, way, "not tried"))
        table = "\n".join(lines)
        DOCUMENT.write_text(_TABLE.sub(lambda _: f"\n{table}\n\n", DOCUMENT.read_text()))

    def _lines(self, loop: Loop) -> Iterator[str]:
        """Yield one line if streaming makes no difference, otherwise two."""
        pairs = [(self.loops[loop.name, way, False], self.loops[loop.name, way, True]) for way in loop.ways]
        ways = {WHOLE: "no", STREAMED: "yes"}
        lines = [(ways[way], pair) for way, pair in zip(loop.ways, pairs, strict=True)]
        if len(pairs) == 2 and pairs[0] == pairs[1]:
            lines = [("no; yes", pairs[0])]
        for way, (plain, thinking) in lines:
            yield _line(loop.client, plain, way, thinking.drift or "none")


def _line(client: str, seen: Seen, way: str, thinking: str) -> str:
    numbers = f"{seen.steps} | {seen.exact} | {seen.failed}"
    return f"| {client} | {seen.version} | {seen.dialect} | {way} | {numbers} | {seen.drift or 'none'} | {thinking} |"
