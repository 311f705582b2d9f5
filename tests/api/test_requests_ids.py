"""Rollout IDs in requests, and URLs of rollouts."""

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from proxy.api.model.routes import named_rollout, parse_path
from proxy.api.requests import id_from_path, model_host, path_prefix
from proxy.errors import BadRequest
from proxy.rollouts.rollout import checked_id

IDS = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=256)


@given(IDS)
def test_every_rollout_id_can_be_percent_encoded_in_a_path(name):
    """It is decoded unchanged, with either prefix."""
    segment = quote(name, safe="")

    assert name == checked_id(name)
    for prefix, endpoint in [("rollouts", "/v1/models"), ("sessions", "/v1/x"), ("rollouts", "/inference/v1/generate")]:
        assert parse_path(f"/{prefix}/{segment}{endpoint}") == (endpoint, segment)
    assert name == id_from_path(segment)


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nb", "\x00", "\x7f", "\x85", "\ud800"])
def test_an_invalid_rollout_id_is_rejected(name):
    """IDs have 1 to 256 characters, without control characters and surrogates."""
    with pytest.raises(BadRequest, match="rollout id"):
        checked_id(name)


@pytest.mark.parametrize("segment", ["%FF", "\udcff", "%ED%A0%80"])
def test_a_path_that_is_not_utf8_is_rejected(segment):
    with pytest.raises(BadRequest, match="UTF-8"):
        id_from_path(segment)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/rollouts", "/rollouts/r1", "/other/r1/v1", "/"])
def test_a_path_without_a_prefix_has_no_rollout_id(path):
    assert parse_path(path) == (path, None)


def test_the_rollout_id_is_taken_from_the_first_source_that_has_one():
    """The order is path, header, minted key, API key, body, the body's metadata."""
    sources = {
        "path": "p", "header": "h", "minted": "m", "key": "rollout:k",
        "body": {"rollout_id": "b", "metadata": {"rollout_id": "d"}},
    }  # fmt: skip
    found = []
    for absent, without in (("path", None), ("header", None), ("minted", None), ("key", "sk-x"), ("body", {})):
        found.append(named_rollout(**sources))
        sources[absent] = without

    assert found == ["p", "h", "m", "k", "b"]
    assert named_rollout(**sources | {"body": {"metadata": {"rollout_id": "d"}}}) == "d"
    assert named_rollout(**sources) is None


def test_a_rollout_id_in_a_body_has_to_be_a_string():
    """Metadata that is not an object is left to the engine."""
    nothing = {"path": None, "header": None, "minted": None, "key": None}
    with pytest.raises(BadRequest, match="not int"):
        named_rollout(**nothing, body={"rollout_id": 7})

    assert named_rollout(**nothing, body={"metadata": "x"}) is None
    assert named_rollout(**nothing, body={"rollout_id": None, "metadata": {"rollout_id": None}}) is None


@pytest.mark.parametrize(
    ("listen", "requested", "host_and_port"),
    [
        ("10.0.0.5:8400", "http://localhost:9000/rollouts", "10.0.0.5:8400"),
        ("0.0.0.0:8400", "http://trainer.example:9000/rollouts", "trainer.example:8400"),
        (":8400", "http://[::1]:9000/rollouts", "[::1]:8400"),
        ("[::]:8400", "http://trainer.example/rollouts", "trainer.example:8400"),
    ],
)
def test_with_a_wildcard_address_the_url_has_the_host_of_the_request(listen, requested, host_and_port):
    """Clients cannot connect to 0.0.0.0."""
    host = model_host(listen, URL(requested))

    assert host_and_port == host


@pytest.mark.parametrize(("rollout_id", "prefix"), [("r 1/a", "/rollouts/r%201%2Fa"), ("..", ""), (".", "")])
def test_a_url_names_the_rollout_unless_clients_would_resolve_its_id_as_a_folder(rollout_id, prefix):
    """For the rollout `..` only the API key names it."""
    assert prefix == path_prefix(rollout_id)
