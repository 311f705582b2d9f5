"""The continuation mode of a call: that of its header, else of its rollout, else of the settings."""

import pytest

from proxy.errors import BadRequest
from proxy.rollouts.prompt_continuation import continuation_mode
from proxy.rollouts.rollout import Rollout


def rollout(mode=None):
    return Rollout("r1", "i", 0, 0, continuation=mode)


@pytest.mark.parametrize(
    ("default", "of_rollout", "header", "mode"),
    [
        ("faithful", None, None, "faithful"),
        ("faithful", "off", None, "off"),
        ("off", "append", None, "append"),
        ("off", "append", "faithful", "faithful"),
        ("append", None, "off", "off"),
        ("faithful", None, " APPEND ", "append"),
    ],
)
def test_the_header_precedes_the_rollout_which_precedes_the_settings(default, of_rollout, header, mode):
    """The header is not case-sensitive."""
    assert mode == continuation_mode(default, rollout(of_rollout), header)


@pytest.mark.parametrize("header", ["", "on", "true", "x" * 10_000])
def test_an_unknown_mode_in_the_header_is_an_error_that_lists_the_modes(header):
    """It contains the beginning of the value."""
    with pytest.raises(BadRequest, match="X-Rollout-Continuation must be one of off, faithful, append, not") as caught:
        continuation_mode("faithful", rollout("append"), header)

    assert (400, "X-Rollout-Continuation") == (caught.value.status, caught.value.param)
    assert repr(header[:100]) in caught.value.message
    assert len(caught.value.message) < 200
