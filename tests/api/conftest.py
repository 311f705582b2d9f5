"""A proxy in front of the simulator, for tests of the HTTP APIs."""

from tests.support.session import engine_options, proxy, sections  # noqa: F401
