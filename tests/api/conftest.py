"""A proxy before the simulator, for all tests of the HTTP APIs."""

from control_api import proxy, said  # noqa: F401
