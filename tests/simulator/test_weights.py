"""Which version of the weights sampled which tokens."""

from proxy.simulator.weights import Versions


def test_a_span_ends_where_the_next_version_begins():
    """Spans cover a choice without gaps, and one version noted twice is one span."""
    versions = Versions()
    for position, version in enumerate(["a", "a", "b", "a"]):
        versions.note(position, version)

    assert versions.spans(4) == [
        {"version": "a", "start": 0, "end": 2},
        {"version": "b", "start": 2, "end": 3},
        {"version": "a", "start": 3, "end": 4},
    ]


def test_a_choice_that_ended_earlier_has_earlier_spans():
    """What came after a choice's end is not told of it, and an empty choice has no span."""
    versions = Versions()
    versions.note(0, "a")
    versions.note(3, "b")

    assert versions.spans(3) == [{"version": "a", "start": 0, "end": 3}]
    assert versions.spans(0) == []
