"""A proxy before the simulator, for all tests of the HTTP APIs."""

from control_api import proxy, sections  # noqa: F401
