"""The table of `tokentape certify`."""

from collections.abc import Iterator
from typing import Final

from rich.console import Console
from rich.text import Text

from proxy.cli.certify.certificate import FAULTS, MEANINGS, Cell, Certificate, Row, sentences
from proxy.cli.console import print_lines, visible

_NAME: Final = 36  # cells
_CELL: Final = 12
_COLORS: Final = {"exact": "green", "ok": "green", "flagged": "yellow", "forks": "yellow", "not run": "yellow"}


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
        yield from _row(row)
    yield Text("")
    yield from _summary(certificate)
    yield Text(visible(certificate.badge), "bold green" if certificate.is_safe else "bold red")


def _row(row: Row) -> Iterator[Text]:
    yield Text.assemble(f"  {row.name:{_NAME - 2}}", _cell(row.whole), _cell(row.streamed))
    for why, fix in sentences(row.cells):
        if why:
            yield Text(f"    {visible(why)}", "dim")
        if fix:
            yield Text(f"    -> {visible(fix)}")


def _cell(cell: Cell | None) -> tuple[str, str]:
    if cell is None:
        return f"{'':{_CELL}}", ""
    color = "bold red" if cell.verdict in FAULTS else _COLORS.get(cell.verdict, "")
    return f"{cell.verdict:{_CELL}}", color


def _summary(certificate: Certificate) -> Iterator[Text]:
    for verdict in MEANINGS:
        if count := certificate.counts[verdict]:
            yield Text(f"{count:4} {verdict:{_CELL}}{MEANINGS[verdict]}")
    scores, facts = certificate.scores, certificate.facts
    if scores.tokens:
        mean = scores.total / scores.tokens
        yield Text(
            f"{scores.tokens} tokens scored again: difference of logprobs {mean:.2g} (mean), {scores.max:.2g} (max)"
        )
    else:
        yield Text(f"no tokens were scored again: {visible(scores.reason or 'none could be compared')}")
    if not facts.get("seeds"):
        yield Text("The engine ignores seeds: most calls were greedy.")
    if by_format := facts.get("compared_by_format"):
        yield Text(f"{by_format} responses differ from one request to the next: only their format was compared.")
    if certificate.ended:
        yield Text(f"The run ended early: {visible(certificate.ended)}", "bold red")
