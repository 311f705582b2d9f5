"""The results table of docs/clients.md. A run of the tests updates the row of a client if every test of the client ran."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.support.pages import ROOT

from .clients import LOOPS, PAGE, STREAMED, Loop

DOCUMENT = ROOT / "docs" / "clients.md"
_TABLE = re.compile(r"(?<=<!-- latest -->\n).*?(?=<!-- end -->)", re.DOTALL)
_HEAD = "| client | version | dialect | drift | drift with thoughts | one sequence in `append` |"
_STREAMED = ", streamed"
ON_THE_PAGE_ONLY = tuple(
    client for client in PAGE if not client.heading.startswith(tuple(loop.client for loop in LOOPS))
)


@dataclass(frozen=True, slots=True)
class Seen:
    """One run; `drift` has its kinds."""

    version: str
    dialect: str
    drift: str


@dataclass(slots=True)
class Table:
    """Results of loops by name, framing and whether the model reasons; of the page's programs by heading.

    `loops` and `page` are without continuation. `append` and `page_append`: why the rollout is more than one
    sequence in mode `append`; empty if it is one.
    """

    loops: dict[tuple[str, str, bool], Seen] = field(default_factory=dict)
    append: dict[tuple[str, str, bool], str] = field(default_factory=dict)
    page: dict[str, Seen] = field(default_factory=dict)
    page_append: dict[str, str] = field(default_factory=dict)

    def write(self) -> None:
        """Write the table into the page."""
        page = DOCUMENT.read_text()
        present: dict[tuple[str, ...], list[str]] = {}
        for line in _TABLE.findall(page)[0].splitlines():
            if line.startswith("| "):
                present.setdefault(_key(line), []).append(line)
        lines = [_HEAD, "|---" * 6 + "|"]
        for loop in LOOPS:
            lines += list(self._lines(loop)) if self._ran(loop) else present.get((loop.client, loop.dialect), [])
        for client in ON_THE_PAGE_ONLY:
            if client.heading in self.page.keys() & self.page_append.keys():
                seen = self.page[client.heading]
                lines.append(_line(client.heading, seen, seen.dialect, "not tried", self.page_append[client.heading]))
            else:
                lines += [line for key, found in present.items() if key[0] == client.heading for line in found]
        table = "\n".join(lines)
        DOCUMENT.write_text(_TABLE.sub(lambda _: f"\n{table}\n\n", page))

    def _ran(self, loop: Loop) -> bool:
        runs = {(loop.name, way, thinks) for way in loop.ways for thinks in (False, True)}
        return runs <= self.loops.keys() & self.append.keys()

    def _lines(self, loop: Loop) -> Iterator[str]:
        """Yield one line if streaming makes no difference, otherwise two."""
        results = {way: self._result(loop, way) for way in loop.ways}
        differ = len(set(results.values())) > 1
        for way, (plain, thinking, refused) in results.items() if differ else [*results.items()][:1]:
            dialect = f"{plain.dialect}{_STREAMED * (differ and way == STREAMED)}"
            yield _line(loop.client, plain, dialect, thinking.drift or "none", refused)

    def _result(self, loop: Loop, way: str) -> tuple[Seen, Seen, str]:
        plain, thinking = ((loop.name, way, thinks) for thinks in (False, True))
        refused = sorted({self.append[plain], self.append[thinking]} - {""})
        return self.loops[plain], self.loops[thinking], ", ".join(refused)


def _key(line: str) -> tuple[str, ...]:
    """Return the client and the dialect of a line."""
    cells = [cell.strip() for cell in line.split("|")]
    return cells[1], cells[3].removesuffix(_STREAMED)


def _line(client: str, seen: Seen, dialect: str, thinking: str, refused: str) -> str:
    drift = f"{seen.drift or 'none'} | {thinking} | {refused or 'yes'}"
    return f"| {client} | {seen.version} | {dialect} | {drift} |"
