"""A proxy in front of the simulator, for tests of whole processes."""

from control_api import engine_options, proxy, sections  # noqa: F401
