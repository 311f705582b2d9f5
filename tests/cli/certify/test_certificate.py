"""The results of a run, their JSON, their table, and the line for a bug report."""

import orjson
import pytest
from tests.support.certifying import results_of

from proxy.cli.certify.certificate import FAULTS, MEANINGS, Cell, Certificate, print_certificate, sentences
from proxy.cli.certify.shapes import SHAPES


def certificate(*verdicts: str) -> Certificate:
    made = Certificate("vllm", "0.32.0", "m", "1.2.3", "2026-11-27")
    for number, verdict in enumerate(verdicts):
        made.add("chat", f"shape {number // 2}", Cell(verdict, "why"), stream=number % 2 == 1)
    return made


def test_results_of_one_shape_are_one_row():
    rows = certificate("exact", "flagged", "ok").rows

    assert [row.name for row in rows] == ["shape 0", "shape 1"]
    assert [[cell.verdict for cell in row.cells] for row in rows] == [["exact", "flagged"], ["ok"]]


@pytest.mark.parametrize("verdict", MEANINGS)
def test_training_is_safe_unless_something_is_wrong_that_is_no_known_limitation(verdict):
    """And only if something is exact."""
    assert (verdict not in FAULTS) == certificate("exact", verdict).is_safe
    assert (verdict == "exact") == certificate(verdict).is_safe


def test_an_incomplete_run_is_not_safe():
    made = certificate("exact")
    made.ended = "the engine is gone"

    assert not made.is_safe
    assert made.badge.endswith("1 exact | NOT SAFE: incomplete | 2026-11-27")


def test_the_line_for_a_bug_report_has_versions_counts_and_the_date():
    assert (
        certificate("exact", "exact", "flagged", "forks").badge
        == "tokentape 1.2.3 | vllm 0.32.0 | 2 exact, 1 flagged, 1 forks | safe | 2026-11-27"
    )
    assert "NOT SAFE: 1 differs, 1 wrong |" in certificate("exact", "wrong", "differs").badge
    assert "NOT SAFE: no token ids |" in certificate("flagged").badge


def test_compared_lines_have_results_and_problems_and_no_dates():
    made = certificate("exact", "flagged")
    made.add("stops", "a", Cell("flagged", problems=("echo", "no_usage")), stream=True)

    lines = results_of(orjson.loads(orjson.dumps(made.to_json())))
    assert lines == [
        "chat, shape 0, whole: exact",
        "chat, shape 0, streamed: flagged",
        "stops, a, streamed: flagged echo no_usage",
    ]


def test_scores_are_weighed_by_tokens():
    """Without tokens there is no mean, and the reason."""
    scores = certificate().scores
    scores.add(1, 0.4, 0.4)
    scores.add(3, 0.0, 0.0)

    assert (scores.sequences, scores.tokens, scores.mean, scores.max) == (2, 4, 0.1, 0.4)
    assert certificate().scores.mean is None


def test_a_fault_comes_with_what_to_do_and_equal_sentences_are_one():
    (row,) = certificate("wrong", "wrong").rows

    assert all(cell.fix for cell in row.cells)
    assert [("why", row.cells[0].fix)] == sentences(row.cells)


HOSTILE = "bad\x1b]52;c;aGk=\x07 reason\nsecond line [bold]x[/bold]"


def full_certificate() -> Certificate:
    """Return a certificate with each shape and each verdict."""
    made = Certificate("vllm", "0.32.0\x1b[2J", "m", "1.2.3", "2026-11-27")
    for number, shape in enumerate(SHAPES):
        verdict = list(MEANINGS)[number % len(MEANINGS)]
        why = "" if verdict in {"exact", "ok"} else HOSTILE
        made.add(shape.topic, f"{shape.name}", Cell(verdict, why), stream=False)
        made.add(shape.topic, f"{shape.name}", Cell("exact"), stream=True)
    return made


def printed(made: Certificate, console) -> str:
    print_certificate(made, console)
    return console.file.getvalue()


def test_each_shape_is_a_line_and_what_is_not_exact_has_a_sentence(make_console):
    """What is exact has none; topics are headings."""
    lines = printed(full_certificate(), make_console()).splitlines()

    for shape in SHAPES:
        assert [shape.name] == [line.strip().split("  ")[0] for line in lines if line.startswith(f"  {shape.name}  ")][
            :1
        ]
        assert shape.topic in lines
    assert sum("bad" in line for line in lines) == sum(
        list(MEANINGS)[number % len(MEANINGS)] not in {"exact", "ok"} for number in range(len(SHAPES))
    )


def test_lines_fit_into_80_columns_and_longer_sentences_are_wrapped(make_console):
    """On a terminal."""
    made = full_certificate()
    made.add("chat", "long", Cell("flagged", "reason " * 50), stream=False)
    text = printed(made, make_console(80, is_terminal=True))

    assert all(len(line) <= 120 for line in text.splitlines())  # with the codes of colors
    assert text.count("reason") >= 50


def test_texts_of_the_engine_are_escaped(make_console):
    text = printed(full_certificate(), make_console())

    assert "\x1b" not in text
    assert r"bad\x1b]52;c;aGk=\x07 reason\nsecond line [bold]x[/bold]" in text


def test_the_end_has_counts_scores_facts_and_the_line_for_a_bug_report(make_console):
    made = full_certificate()
    made.facts = {"seeds": False, "compared_by_format": 3}
    made.scores.add(10, 0.5, 0.7)
    made.ended = "the engine is gone"
    text = printed(made, make_console())

    for sentence in (
        *(MEANINGS[verdict] for verdict in made.counts),
        "10 tokens scored again: difference of logprobs 0.5 (mean), 0.7 (max)",
        "The engine ignores seeds",
        "3 responses differ from one request to the next",
        "The run ended early: the engine is gone",
        "NOT SAFE",
    ):
        assert sentence in text
    made.scores.tokens, made.scores.reason = 0, "no scorer"
    assert "no tokens were scored again: no scorer" in printed(made, make_console())
