"""The report of `make lint` finds words to avoid outside quotations, long files and long functions."""

from docs.style import ROOT, avoided_words, sizes_in, words_in

AVOIDED = avoided_words((ROOT / "CONTRIBUTING.md").read_text())
CODE = '''
def test_the_agent_is_told():
    """It spelt `told` in backticks."""
    answer = "told"
    assert answer == f"nobody knows {answer}"  # as it stands
'''


def test_avoided_words_are_found():
    prose = ["# as it stands", "test the agent is told", "It spelt in backticks."]

    assert words_in("tests/test_a.py", CODE, AVOIDED) == prose
    assert {*words_in("proxy/a.py", CODE, AVOIDED)} == {*prose, "nobody knows"}
    assert words_in("a.md", "It is told as in “told” `told`.\n```\ntold\n```", AVOIDED) == ["It is told as in ."]


def test_long_files_and_functions_are_found():
    body = "    pass\n" * 50

    assert sizes_in(f"def short():\n{body[9:]}\n" + "\n" * 600) == []
    assert sizes_in(f"def long():\n{body}" + "\n" * 700) == ["751 lines", "long: 51 lines"]
