"""A proxy in front of the simulator, for tests of rollouts over HTTP."""

from tests.support.control_api import engine_options, proxy, sections  # noqa: F401
