"""A proxy in front of the simulator, for tests of whole processes."""

from tests.support.session import engine_options, proxy, sections  # noqa: F401
