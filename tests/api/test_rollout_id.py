"""Names in requests."""

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.api.rollout_id import RequestPath, id_from_path, named_rollout, parse_path
from proxy.errors import BadRequest
from proxy.rollouts.rollout import checked_id

IDS = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=256)


@given(IDS)
def test_every_id_can_be_named_in_a_path(name):
    """Percent-encoded, under either prefix; and it comes out as it was."""
    segment = quote(name, safe="")

    assert name == checked_id(name)
    assert RequestPath("/v1/models", name) == parse_path(f"/rollouts/{segment}/v1/models")
    assert RequestPath("/v1/x", name) == parse_path(f"/sessions/{segment}/v1/x")
    assert RequestPath("/inference/v1/generate", name) == parse_path(f"/rollouts/{segment}/inference/v1/generate")


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nb", "\x00", "\x7f", "\x85", "\ud800"])
def test_what_cannot_be_an_id_is_refused(name):
    """Control characters, halves of surrogate pairs, nothing, too much."""
    with pytest.raises(BadRequest, match="rollout id"):
        checked_id(name)


@pytest.mark.parametrize("segment", ["%FF", "\udcff", "%ED%A0%80"])
def test_a_path_that_is_no_utf8_is_refused(segment):
    """It would not come back as it was."""
    with pytest.raises(BadRequest, match="UTF-8"):
        id_from_path(segment)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/rollouts", "/rollouts/r1", "/other/r1/v1", "/"])
def test_a_path_without_a_prefix_names_no_rollout(path):
    """It is its own endpoint."""
    assert RequestPath(path, None) == parse_path(path)


def test_the_first_naming_counts():
    """Path, header, minted key, key, body, the body's metadata."""
    namings = {
        "path": "p", "header": "h", "minted": "m", "key": "rollout:k",
        "body": {"rollout_id": "b", "metadata": {"rollout_id": "d"}},
    }  # fmt: skip
    found = []
    for absent, without in (("path", None), ("header", None), ("minted", None), ("key", "sk-x"), ("body", {})):
        found.append(named_rollout(**namings))
        namings[absent] = without

    assert ["p", "h", "m", "k", "b"] == found
    assert "d" == named_rollout(**namings | {"body": {"metadata": {"rollout_id": "d"}}})
    assert named_rollout(**namings) is None


def test_a_rollout_id_in_a_body_is_a_string():
    """Anything else is refused rather than spelt by us; metadata that is none is the engine's business."""
    nothing = {"path": None, "header": None, "minted": None, "key": None}
    with pytest.raises(BadRequest, match="not int"):
        named_rollout(**nothing, body={"rollout_id": 7})

    assert named_rollout(**nothing, body={"metadata": "x"}) is None
    assert named_rollout(**nothing, body={"rollout_id": None, "metadata": {"rollout_id": None}}) is None
