"""Tests of every cassette, as one test for each set of cassettes."""

from collections.abc import Callable, Iterable

import pytest
from tests.support.recorded import Cassette


def of_each(cassettes: Iterable[Cassette]) -> Callable[[Callable[[Cassette], None]], Callable[[list[Cassette]], None]]:
    """Return a decorator that calls a test for each cassette; an error names the cassette.

    One test for each cassette would take longer than what it tests: pytest needs some milliseconds for each.
    """
    sets: dict[str, list[Cassette]] = {}
    for cassette in cassettes:
        sets.setdefault(f"{cassette.kind}-{cassette.name.rpartition('/')[0]}", []).append(cassette)
    assert sets

    def decorate(test: Callable[[Cassette], None]) -> Callable[[list[Cassette]], None]:
        @pytest.mark.parametrize("of_set", sets.values(), ids=sets.keys())
        def test_set(of_set: list[Cassette]) -> None:
            for cassette in of_set:
                try:
                    test(cassette)
                except BaseException as error:
                    error.add_note(f"cassette {cassette.kind}-{cassette}")
                    raise

        test_set.__name__, test_set.__qualname__, test_set.__doc__ = test.__name__, test.__qualname__, test.__doc__
        return test_set

    return decorate
