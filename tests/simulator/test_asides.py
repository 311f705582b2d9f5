"""What clients ask beside sampling."""

import pytest

from proxy.simulator.asides import ids_to_detokenize, new_version, text_to_tokenize
from proxy.simulator.faults import RefusedError


def test_a_text_is_given_or_rendered():
    """The text to tokenize is the prompt itself, or the messages rendered."""
    assert text_to_tokenize({"prompt": "Hi"}) == "Hi"
    assert text_to_tokenize({"messages": [{"role": "user", "content": "Hi"}]}).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("read", "body"),
    [
        (text_to_tokenize, {}),
        (text_to_tokenize, {"prompt": [1]}),
        (ids_to_detokenize, {"tokens": "1"}),
        (ids_to_detokenize, {"tokens": ["1"]}),
        (new_version, {}),
        (new_version, {"new_version": 3}),
    ],
)
def test_what_cannot_be_read_is_refused(read, body):
    """A body without what it must have is refused."""
    with pytest.raises(RefusedError) as refusal:
        read(body)

    assert refusal.value.status == 400


def test_ids_and_labels_are_read():
    """Ids and the label of the weights are taken as they are."""
    assert ids_to_detokenize({"tokens": [1, 2]}) == [1, 2]
    assert new_version({"new_version": "step-2"}) == "step-2"
