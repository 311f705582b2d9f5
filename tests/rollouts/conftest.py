"""A proxy before the simulator, for all tests of rollouts that go through HTTP."""

from control_api import proxy, sections  # noqa: F401
