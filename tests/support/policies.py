"""Policies as the settings define them, without a store."""

from typing import Any

from proxy.config.engines import with_default
from proxy.config.settings import load
from proxy.rollouts.policy import Heartbeats, Pause, Policies, Policy, PolicyVersion


def policies_of(policies: dict[str, Any] | None = None, *, logs_unlisted: bool = False) -> Policies:
    """Return the policies of this section of the settings."""
    heartbeats = Heartbeats(None, "process")
    made = [
        Policy(
            name,
            tuple(settings.models),
            settings.train,
            PolicyVersion(name),
            Pause(heartbeats, policy=name, max_waiting=1, timeout_s=1),
        )
        for name, settings in with_default(load(policies=policies or {}).policies).items()
    ]
    return Policies(made, heartbeats, logs_unlisted=logs_unlisted)
