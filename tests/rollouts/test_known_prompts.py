"""The cache of prompts: one per rollout, bounded in bytes."""

from array import array

from proxy.protocols.number_lists import KnownPrompt
from proxy.rollouts.known_prompts import KnownPrompts


def prompt(count, first=1):
    """A prompt of this many ids."""
    ids = array("i", [first] * count)
    return KnownPrompt(b",".join(b"%d" % value for value in ids), ids)


def test_the_newest_prompt_of_a_rollout_is_known():
    """Not to a rollout that was deleted and created again under the same name."""
    prompts = KnownPrompts()
    prompts.keep("r1", "a", prompt(300))
    prompts.keep("r1", "a", prompt(400))
    prompts.keep("r2", "a", prompt(500))

    assert [400, 500] == [len(prompts[name, "a"].ids) for name in ("r1", "r2")]
    assert ("r1", "b") not in prompts


def test_short_prompts_are_not_kept():
    prompts = KnownPrompts()
    prompts.keep("r1", "a", prompt(255))

    assert {} == prompts


def test_the_prompts_that_were_kept_first_are_dropped_at_the_limit():
    """A prompt that exceeds the limit alone is dropped, too."""
    prompts = KnownPrompts(max_bytes=6 * 1000 + 3 * 500)
    for name in ("r1", "r2", "r3", "r1", "r4"):
        prompts.keep(name, "a", prompt(300))
    kept = {name for name, _ in prompts}
    prompts.keep("r5", "a", prompt(30_000))

    assert {"r1", "r3", "r4"} == kept
    assert {} == prompts
