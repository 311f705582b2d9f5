"""The cache of prompts: one per rollout, bounded in bytes."""

from array import array

import pytest

from proxy.protocols.number_lists import KnownPrompt
from proxy.rollouts.known_prompts import KnownPrompts


def prompt(count, first=1):
    """A prompt of this many ids."""
    ids = array("i", [first] * count)
    return KnownPrompt(b",".join(b"%d" % value for value in ids), ids)


def test_the_newest_prompt_of_a_rollout_is_known():
    """Not to a rollout that was deleted and created again under the same name."""
    prompts = KnownPrompts()
    prompts.put("r1", "a", prompt(300))
    prompts.put("r1", "a", prompt(400))
    prompts.put("r2", "a", prompt(500))

    assert [400, 500] == [len(prompts.get(name, "a").ids) for name in ("r1", "r2")]
    assert prompts.get("r1", "b") is None


@pytest.mark.parametrize("found", [None, prompt(255)])
def test_short_and_unknown_prompts_are_not_kept(found):
    prompts = KnownPrompts()
    prompts.put("r1", "a", found)

    assert prompts.get("r1", "a") is None


def test_the_least_recently_used_prompts_are_dropped_at_the_limit():
    """A prompt that exceeds the limit alone is dropped, too."""
    prompts = KnownPrompts(max_bytes=6 * 1000 + 3 * 500)
    for name in ("r1", "r2", "r3"):
        prompts.put(name, "a", prompt(300))
    prompts.get("r1", "a")
    prompts.put("r4", "a", prompt(300))
    kept = [name for name in ("r1", "r2", "r3", "r4") if prompts.get(name, "a")]
    prompts.put("r5", "a", prompt(30_000))

    assert ["r1", "r3", "r4"] == kept
    assert all(prompts.get(name, "a") is None for name in ("r1", "r3", "r4", "r5"))
