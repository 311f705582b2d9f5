"""What every test has: hypothesis without deadlines, since the machines of tests are shared."""

from hypothesis import settings

settings.register_profile("shared", deadline=None)
settings.load_profile("shared")
