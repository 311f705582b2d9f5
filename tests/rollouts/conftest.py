"""A proxy in front of the simulator, for tests of rollouts over HTTP."""

from tests.support.session import engine_options, proxy, sections  # noqa: F401
