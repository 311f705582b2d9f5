"""The results of `tokentape certify`: cells, rows, their JSON, the table, and the line for a bug report."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal

from rich.console import Console
from rich.text import Text

from proxy.cli.console import print_lines, visible

Verdict = Literal[
    "exact", "ok", "flagged", "forks", "not served", "not run", "unexpected", "differs", "wrong", "failed"
]

MEANINGS: Final[dict[str, str]] = {
    "exact": "The agent gets what the engine alone returns; ids, logprobs and prompt are recorded, and verified.",
    "ok": "As it must be; there are no tokens to verify.",
    "flagged": "Recorded, flagged for a known limitation of the engine, and not exported by default.",
    "forks": "Recorded exactly, but the conversation becomes several sequences: correct, with more tokens to train.",
    "not served": "The engine itself does not serve it.",
    "not run": "It could not be tried in this run.",
    "unexpected": "Flagged for no known limitation: new behaviour of the engine.",
    "differs": "The agent gets another response than from the engine alone.",
    "wrong": "Recorded as exact, but the engine contradicts the record. Do not train on it.",
    "failed": "The engine or TokenTape did not answer as it must.",
}
FAULTS: Final = frozenset({"unexpected", "differs", "wrong", "failed"})
FIXES: Final[dict[str, str]] = {
    "flagged": "no action: exports skip such steps by default",
    "forks": "docs/continuation.md has each reason",
    "unexpected": "do not train on such calls (exports skip them), and report it with the last line",
    "differs": "agents may fail on it; report it with the last line",
    "wrong": "do not train with this engine, and report it with the last line",
    "failed": "repeat the command, and look into the engine's log",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """The result of one shape in one mode. `why` is a sentence, `fix` what to do; both are empty where nothing is."""

    verdict: Verdict
    why: str = ""
    problems: tuple[str, ...] = ()
    fix: str = ""


class Ended(Exception):
    """Ends a test with a result."""

    def __init__(self, verdict: Verdict, why: str = "", problems: tuple[str, ...] = ()) -> None:
        self.cell = Cell(verdict, why, problems)
        super().__init__(why)


@dataclass(frozen=True, slots=True)
class Row:
    """The results of one shape, unstreamed and streamed; None: it has no such mode."""

    topic: str
    name: str
    whole: Cell | None = None
    streamed: Cell | None = None

    @property
    def cells(self) -> list[Cell]:
        """The results that exist."""
        return [cell for cell in (self.whole, self.streamed) if cell is not None]


@dataclass(slots=True)
class Scores:
    """What the engine scored again: numbers of sequences and tokens, and the differences of their logprobs."""

    sequences: int = 0
    tokens: int = 0
    mean: float | None = None
    max: float = 0.0
    reason: str = ""  # why nothing was

    def add(self, tokens: int, mean: float, most: float) -> None:
        """Add a sequence."""
        total = (self.mean or 0.0) * self.tokens + mean * tokens
        self.sequences, self.tokens = self.sequences + 1, self.tokens + tokens
        self.mean, self.max = total / self.tokens, max(self.max, most)


@dataclass(slots=True)
class Certificate:
    """Everything that a run found. `ended` is why it ended early, empty if it did not."""

    kind: str
    version: str
    model: str
    tokentape: str
    date: str
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    scores: Scores = field(default_factory=Scores)
    ended: str = ""

    def add(self, topic: str, name: str, cell: Cell, *, stream: bool) -> None:
        """Add a result to the row of its shape."""
        cell = replace(cell, fix=cell.fix or FIXES.get(cell.verdict, ""))
        if not self.rows or (self.rows[-1].topic, self.rows[-1].name) != (topic, name):
            self.rows.append(Row(topic, name))
        row = self.rows[-1]
        self.rows[-1] = replace(row, streamed=cell) if stream else replace(row, whole=cell)

    @property
    def counts(self) -> Counter[str]:
        """The number of results of each verdict."""
        return Counter(cell.verdict for row in self.rows for cell in row.cells)

    @property
    def faults(self) -> set[str]:
        """The verdicts that are no known limitation, and that a result has."""
        return set(FAULTS & self.counts.keys())

    @property
    def is_safe(self) -> bool:
        """Whether the run is complete, something is exact, and nothing is wrong that is no known limitation."""
        return self.counts["exact"] > 0 and not self.ended and not self.faults

    @property
    def badge(self) -> str:
        """One line for a bug report."""
        counts = self.counts
        known = [f"{counts[name]} {name}" for name in ("exact", "flagged", "forks", "not served") if counts[name]]
        wrong = [f"{counts[name]} {name}" for name in MEANINGS if name in self.faults]
        wrong += ["incomplete"] if self.ended else []
        state = "safe" if self.is_safe else f"NOT SAFE: {', '.join(wrong) or 'no token ids'}"
        parts = [f"tokentape {self.tokentape}", f"{self.kind} {self.version}", ", ".join(known) or "nothing", state]
        return " | ".join([*parts, self.date])

    def to_json(self) -> dict[str, Any]:
        """Return the JSON that `--json` prints and docs/certified has."""
        return {
            "engine": {"kind": self.kind, "version": self.version, "model": self.model, **self.facts},
            "tokentape": self.tokentape,
            "date": self.date,
            "safe": self.is_safe,
            "ended": self.ended,
            "counts": dict(sorted(self.counts.items())),
            "rows": [asdict(row) for row in self.rows],
            "scores": asdict(self.scores),
            "badge": self.badge,
        }


def sentences(cells: Iterable[Cell]) -> list[tuple[str, str]]:
    """Return the distinct pairs of sentence and advice of cells."""
    return list(dict.fromkeys((cell.why, cell.fix) for cell in cells if cell.why or cell.fix))


_NAME: Final = 36  # cells
_CELL: Final = 12
_COLORS: Final = {
    "exact": "green", "ok": "green", "flagged": "yellow", "forks": "yellow", "not run": "yellow",
    **dict.fromkeys(FAULTS, "bold red"),
}  # fmt: skip


def print_certificate(certificate: Certificate, out: Console) -> None:
    """Print the table, in lines of at most 80 cells apart from sentences, and the line for a bug report."""
    print_lines(out, _lines(certificate), indent=6)


def _lines(certificate: Certificate) -> Iterator[Text]:
    head = f"{certificate.kind} {certificate.version}, model {certificate.model}"
    yield Text(visible(head), "bold")
    yield Text(f"{'':{_NAME}}{'whole':{_CELL}}streamed")
    topic = ""
    for row in certificate.rows:
        if row.topic != topic:
            yield Text(row.topic, "bold")
            topic = row.topic
        pairs = [
            (cell.verdict, _COLORS.get(cell.verdict, "")) if cell else ("", "") for cell in (row.whole, row.streamed)
        ]
        cells = [(f"{verdict:{_CELL}}", color) for verdict, color in pairs]
        yield Text.assemble(f"  {row.name:{_NAME - 2}}", *cells)
        for why, fix in sentences(row.cells):
            if why:
                yield Text(f"    {visible(why)}", "dim")
            if fix:
                yield Text(f"    -> {visible(fix)}")
    yield Text("")
    yield from _summary(certificate)
    yield Text(visible(certificate.badge), "bold green" if certificate.is_safe else "bold red")


def _summary(certificate: Certificate) -> Iterator[Text]:
    for verdict in MEANINGS:
        if count := certificate.counts[verdict]:
            yield Text(f"{count:4} {verdict:{_CELL}}{MEANINGS[verdict]}")
    scores, facts = certificate.scores, certificate.facts
    if scores.tokens:
        difference = f"difference of logprobs {scores.mean:.2g} (mean), {scores.max:.2g} (max)"
        yield Text(f"{scores.tokens} tokens scored again: {difference}")
    else:
        yield Text(f"no tokens were scored again: {visible(scores.reason or 'none could be compared')}")
    if not facts.get("seeds"):
        yield Text("The engine ignores seeds: most calls were greedy.")
    if by_format := facts.get("compared_by_format"):
        yield Text(f"{by_format} responses differ from one request to the next: only their format was compared.")
    if certificate.ended:
        yield Text(f"The run ended early: {visible(certificate.ended)}", "bold red")
