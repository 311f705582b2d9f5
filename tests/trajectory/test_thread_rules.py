"""Rules for the kinds of threads."""

import re
import time
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.config.threads import Kind
from proxy.trajectory.thread_rules import KINDS_OF, RuleSearch, ThreadKind, ThreadRule, matches

TEXTS = st.text("ab*\n", max_size=8)


@given(pattern=st.text("ab*", max_size=6), text=st.text("ab\n", max_size=10))
def test_a_pattern_matches_as_the_regular_expression_that_has_any_characters_for_each_star(pattern, text):
    expression = ".*".join(map(re.escape, pattern.split("*")))

    assert matches(pattern, text) == bool(re.fullmatch(expression, text, re.DOTALL))


def test_the_time_of_a_match_does_not_depend_on_backtracking():
    """A regular expression with as many repetitions would not end."""
    started = time.process_time()

    assert not matches("*a" * 400 + "*b", "a" * 200_000)
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    ("rule", "is_matched"),
    [
        (ThreadRule("auxiliary", model="haiku*"), True),
        (ThreadRule("auxiliary", model="opus*"), False),
        (ThreadRule("auxiliary", model="haiku*", system="You*titles."), True),
        (ThreadRule("auxiliary", model="haiku*", system="You*code."), False),
        (ThreadRule("auxiliary", user="Summarize*"), True),
        (ThreadRule("auxiliary", tools="bash*"), True),
        (ThreadRule("auxiliary", tools="bash"), False),
        (ThreadRule("auxiliary", tools=""), False),
        (ThreadRule("auxiliary", agent="*"), True),
        (ThreadRule("auxiliary", agent="judge"), False),
    ],
)
def test_a_rule_matches_calls_that_match_all_its_patterns(rule, is_matched):
    facts = {
        "model": "haiku-4",
        "system": "You write titles.",
        "user": "Summarize this.",
        "tools": "bash read",
        "agent": None,
    }

    assert is_matched == rule.has(**facts)


def test_the_first_rule_that_matches_applies():
    """The user message is read only if a rule has a pattern of it and may match, and once for each call."""
    rules = [
        ThreadRule("main", system="S", user="a*"),
        ThreadRule("auxiliary", system="S", user="b*"),
        ThreadRule("sub-agent", tools="read write"),
    ]
    search, read = RuleSearch(rules), []

    def first(system, user, tools=()):
        return search.first(
            model="m", system=system, tools=frozenset(tools), agent=None, user=lambda: read.append(user) or user
        )

    assert [0, 1, None] == [first("S", user) for user in ("aa", "bb", "cc")]
    assert [None, 2] == [first("T", "x"), first("T", "x", ("write", "read"))]
    assert ["aa", "bb", "cc"] == read
    assert RuleSearch(()).first(model=None, system="", tools=frozenset(), agent=None, user=str) is None


def test_the_settings_have_the_same_kinds():
    assert get_args(ThreadKind) == get_args(Kind)
    assert KINDS_OF["main"] < KINDS_OF["agents"] < KINDS_OF["all"] == set(get_args(ThreadKind))
