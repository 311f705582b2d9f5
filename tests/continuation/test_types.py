"""The values of exact continuation: reasons, and what identifies a rendering."""

from typing import get_args

import pytest
from tests.support.turns import ids

from proxy.continuation.types import REASONS, Reason, rendering_of


def test_every_reason_has_a_sentence():
    """The page on continuation, the UI and `tokentape show` print it."""
    assert set(get_args(Reason)) == set(REASONS)
    assert all(sentence.endswith((".", ".)")) for sentence in REASONS.values())


def test_a_rendering_is_identified_by_its_length_and_its_ids():
    """The last id is apart, because it may merge with what follows."""
    assert rendering_of(ids(1, 2, 3)) == rendering_of(ids(1, 2, 3))
    assert rendering_of(ids(1, 2, 3)).digest == rendering_of(ids(1, 2, 4)).digest
    others = [ids(1, 2), ids(1, 2, 4), ids(2, 1, 3), ids(1, 2, 3, 3)]
    assert all(rendering_of(other) != rendering_of(ids(1, 2, 3)) for other in others)
    with pytest.raises(ValueError, match="at least one id"):
        rendering_of(ids())
