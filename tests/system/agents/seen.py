"""The results table of docs/clients.md. It is written by a run of all tests, once every client ran."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from pages import ROOT

from .clients import LOOPS, PAGE, STREAMED, WHOLE, Loop

DOCUMENT = ROOT / "docs" / "clients.md"
_TABLE = re.compile(r"(?<=<!-- latest -->\n).*?(?=<!-- end -->)", re.DOTALL)
_HEAD = (
    "| client | version | dialect | streamed | steps | exact | failed | drift | drift with thoughts "
    "| one sequence in `append` |"
)
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
    """Results of loops by name, framing and whether the model reasons; of the page's programs by heading.

    `loops` and `page` are without continuation. `append` and `page_append`: why the rollout is more than one
    sequence in mode `append`; empty if it is one.
    """

    loops: dict[tuple[str, str, bool], Seen] = field(default_factory=dict)
    append: dict[tuple[str, str, bool], str] = field(default_factory=dict)
    page: dict[str, tuple[str, Seen]] = field(default_factory=dict)
    page_append: dict[str, str] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether every client ran."""
        runs = {(loop.name, way, thinks) for loop in LOOPS for way in loop.ways for thinks in (False, True)}
        programs = {client.heading for client in ON_THE_PAGE_ONLY}
        return runs <= self.loops.keys() & self.append.keys() and programs <= self.page.keys() & self.page_append.keys()

    def write(self) -> None:
        """Write the table into the page."""
        lines = [_HEAD, "|---" * 10 + "|", *(line for loop in LOOPS for line in self._lines(loop))]
        for client in ON_THE_PAGE_ONLY:
            way, seen = self.page[client.heading]
            lines.append(_line(client.heading, seen, way, "not tried", self.page_append[client.heading]))
        table = "\n".join(lines)
        DOCUMENT.write_text(_TABLE.sub(lambda _: f"\n{table}\n\n", DOCUMENT.read_text()))

    def _lines(self, loop: Loop) -> Iterator[str]:
        """Yield one line if streaming makes no difference, otherwise two."""
        results = [self._result(loop, way) for way in loop.ways]
        ways = {WHOLE: "no", STREAMED: "yes"}
        lines = [(ways[way], result) for way, result in zip(loop.ways, results, strict=True)]
        if len(results) == 2 and results[0] == results[1]:
            lines = [("no; yes", results[0])]
        for way, (plain, thinking, refused) in lines:
            yield _line(loop.client, plain, way, thinking.drift or "none", refused)

    def _result(self, loop: Loop, way: str) -> tuple[Seen, Seen, str]:
        plain, thinking = ((loop.name, way, thinks) for thinks in (False, True))
        refused = sorted({self.append[plain], self.append[thinking]} - {""})
        return self.loops[plain], self.loops[thinking], ", ".join(refused)


def _line(client: str, seen: Seen, way: str, thinking: str, refused: str) -> str:
    numbers = f"{seen.steps} | {seen.exact} | {seen.failed}"
    drift = f"{seen.drift or 'none'} | {thinking} | {refused or 'yes'}"
    return f"| {client} | {seen.version} | {seen.dialect} | {way} | {numbers} | {drift} |"
