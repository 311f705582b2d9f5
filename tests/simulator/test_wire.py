"""What all responses share."""

from proxy.simulator.wire import Head, event, usage


def test_a_response_begins_with_its_head():
    """The first keys are id, object, created and model, in this order."""
    head = Head("cmpl-1", 5, "simulated").keys("text_completion")

    assert list(head.items()) == [
        ("id", "cmpl-1"),
        ("object", "text_completion"),
        ("created", 5),
        ("model", "simulated"),
    ]


def test_a_chunk_is_one_event():
    """A chunk is one data line, compact and unescaped, and a blank line."""
    assert event({"a": "é"}) == 'data: {"a":"é"}\n\n'.encode()


def test_usage_counts_prompt_and_completion():
    """Usage has the prompt tokens, the total and the completion tokens, then the details of some responses."""
    assert list(usage(2, 3, more=None).items()) == [
        ("prompt_tokens", 2),
        ("total_tokens", 5),
        ("completion_tokens", 3),
        ("more", None),
    ]
