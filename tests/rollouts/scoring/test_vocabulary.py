"""The comparison of two vocabularies by texts, or by scores."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.rollouts.scoring.vocabulary import differing_id, is_unlikely

IDS = list(range(500, 900))


def texts(changed=frozenset(), missing=frozenset()):
    async def text_of(ids):
        (token,) = ids
        return None if token in missing else f" other{token}" if token in changed else f" t{token}"

    return text_of


async def test_equal_texts_are_one_vocabulary():
    """Spaces around a text are not compared."""

    async def stripped(ids):
        return f"t{ids[0]}"

    assert None is await differing_id(IDS, texts(), stripped)


@given(st.sets(st.sampled_from(IDS), min_size=390))
async def test_a_vocabulary_that_differs_in_most_ids_is_found(changed):
    """With an id that differs, and both texts."""
    token, own, other = await differing_id(IDS, texts(), texts(changed))

    assert (f" t{token}", f" other{token}") == (own, other)
    assert token in changed


@pytest.mark.parametrize("side", [0, 1])
async def test_engines_without_texts_cannot_be_compared(side):
    none = texts(missing=frozenset(IDS))
    with pytest.raises(LookupError):
        await differing_id(IDS, *((none, texts()) if side else (texts(), none)))


async def test_parts_of_characters_are_not_compared():
    async def broken(ids):
        return "\N{REPLACEMENT CHARACTER}"

    with pytest.raises(LookupError):
        await differing_id(IDS, broken, texts())


def test_scores_next_to_no_probability_are_of_other_tokens():
    """Few tokens are no evidence; nor are scores that a poor teacher gives."""
    assert is_unlikely([-1.0] * 20, [-12.0] * 20)
    assert not is_unlikely([-1.0] * 19, [-12.0] * 19)
    assert not is_unlikely([-1.0] * 20, [-8.0] * 20)
    assert not is_unlikely([], [-12.0] * 20)
