"""A proxy in front of the simulator, for tests of the HTTP APIs."""

from control_api import proxy, sections  # noqa: F401
