"""The format `nodes`: Atropos' SequenceNode."""

from tests.support import worked
from tests.support.forests import make_step

from proxy.export import Fill


def test_tokens_that_were_not_sampled_have_mask_minus_100_and_logprob_1():
    """Without a tokenizer, the text is null."""
    assert worked.rows("nodes") == [
        {
            "full_text": None,
            "tokens": [101, 102, 103, 201, 202, 9, 301, 302, 303, 304, 203, 9],
            "masked_tokens": [-100, -100, -100, 201, 202, 9, -100, -100, -100, -100, 203, 9],
            "logprobs": [1.0, 1.0, 1.0, -0.5, -0.25, -0.125, 1.0, 1.0, 1.0, 1.0, -1.0, -0.0625],
            "metadata": {"finish_reason": "stop"},
        }
    ]


def test_full_text_is_the_decoded_token_ids():
    fill = Fill(decode=lambda ids: "-".join(map(str, ids)))

    assert [node["full_text"] for node in worked.rows("nodes", [make_step("a", [1], [2])], fill=fill)] == ["1-2"]


def test_equal_samples_are_separate_nodes():
    nodes = worked.rows("nodes", [make_step("a", [1], [2, 9], [2, 9], [2, 9], [2, 9])])

    assert [node["tokens"] for node in nodes] == [[1, 2, 9]] * 4
