"""The URLs at which agents reach the model API."""

import pytest
from yarl import URL

from proxy.api.urls import model_host, path_prefix


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
