"""The table of `tokentape certify`: what it has, and how wide it is."""

from proxy.cli.certify.certificate import MEANINGS, Cell, Certificate
from proxy.cli.certify.printing import print_certificate
from proxy.cli.certify.shapes import SHAPES

HOSTILE = "bad\x1b]52;c;aGk=\x07 reason\nsecond line [bold]x[/bold]"


def certificate() -> Certificate:
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
    lines = printed(certificate(), make_console()).splitlines()

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
    made = certificate()
    made.add("chat", "long", Cell("flagged", "reason " * 50), stream=False)
    text = printed(made, make_console(80, is_terminal=True))

    assert all(len(line) <= 120 for line in text.splitlines())  # with the codes of colors
    assert text.count("reason") >= 50


def test_texts_of_the_engine_are_escaped(make_console):
    text = printed(certificate(), make_console())

    assert "\x1b" not in text
    assert r"bad\x1b]52;c;aGk=\x07 reason\nsecond line [bold]x[/bold]" in text


def test_the_end_has_counts_scores_facts_and_the_line_for_a_bug_report(make_console):
    made = certificate()
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
