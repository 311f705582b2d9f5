"""The servers that the tests run: Debian's redis-server, and the bundled Valkey."""

import shutil

import pytest

from storage.embedded.server import bundled_server


@pytest.fixture(scope="session", params=["redis", "valkey"])
def binary(request) -> str:
    """Return the path of a server."""
    found = shutil.which("redis-server") if request.param == "redis" else bundled_server()
    assert found, "redis-server is not installed (Debian: apt-get install redis-server)"
    return str(found)
