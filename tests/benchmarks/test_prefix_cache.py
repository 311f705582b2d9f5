"""The measurement of continued turns with a real vLLM."""

from benchmarks.prefix_cache import Conversation, table


def test_later_turns_are_compared_in_pairs():
    """The added time is the median of differences, and hits are a share of the prompt tokens after the first turn."""
    off = Conversation([0.5, 0.010, 0.030], [100, 120, 180], 150, [0, 2], 2, [], 0.004)
    append = Conversation([0.5, 0.012, 0.040], [100, 120, 180], 300, [4, 6], 1, ["close"], 0.004)

    lines = table([{"off": off, "append": append}]).splitlines()

    assert "| added to later turns, median of pairs (ms) |  | +6.0 |" in lines
    assert "| requests to `/tokenize`, per later turn | 0.0 | 2.0 |" in lines
    assert "| share | 50% | 100% |" in lines
    assert "| exported sequences per conversation | 2.0 | 1.0 |" in lines
