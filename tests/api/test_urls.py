"""The URLs at which agents reach the model API."""

import pytest
from yarl import URL

from proxy.api.urls import model_host, path_prefix


@pytest.mark.parametrize(
    ("listen", "seen", "reached"),
    [
        ("10.0.0.5:8400", "http://localhost:9000/rollouts", "10.0.0.5:8400"),
        ("0.0.0.0:8400", "http://trainer.example:9000/rollouts", "trainer.example:8400"),
        (":8400", "http://[::1]:9000/rollouts", "[::1]:8400"),
        ("[::]:8400", "http://trainer.example/rollouts", "trainer.example:8400"),
    ],
)
def test_an_api_bound_to_every_address_is_reached_where_the_request_was_sent(listen, seen, reached):
    """Nobody can call 0.0.0.0."""
    host = model_host(listen, URL(seen))

    assert reached == host


@pytest.mark.parametrize(("rollout_id", "prefix"), [("r 1/a", "/rollouts/r%201%2Fa"), ("..", ""), (".", "")])
def test_a_rollout_is_named_by_the_path_unless_clients_would_resolve_it_as_a_folder(rollout_id, prefix):
    """Of a rollout called `..`, the API key alone names it."""
    assert prefix == path_prefix(rollout_id)
