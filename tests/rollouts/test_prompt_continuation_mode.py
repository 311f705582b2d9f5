"""The continuation mode in the header of a call."""

import pytest

from proxy.errors import BadRequest
from proxy.rollouts.prompt_continuation import mode_of


def test_the_header_is_not_case_sensitive():
    assert [mode_of(header) for header in (" APPEND ", "Off")] == ["append", "off"]


@pytest.mark.parametrize("header", ["", "on", "true", "x" * 10_000])
def test_an_unknown_mode_in_the_header_is_an_error_that_lists_the_modes(header):
    """It contains the beginning of the value."""
    with pytest.raises(BadRequest, match="X-Rollout-Continuation must be one of off, faithful, append, not") as caught:
        mode_of(header)

    assert (caught.value.status, caught.value.param) == (400, "X-Rollout-Continuation")
    assert repr(header[:100]) in caught.value.message
    assert len(caught.value.message) < 200
