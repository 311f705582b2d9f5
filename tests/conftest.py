"""What holds for all tests."""

from hypothesis import settings

# A busy machine is slow, not wrong: pytest's own timeout is the only clock.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
