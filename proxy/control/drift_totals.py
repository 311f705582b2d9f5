"""The totals of drift of finished rollouts: counted at the finish, and completed after a late step or on a look.

Holds when the drift of a rollout is looked through as a whole. Nobody waits for it: it reads all steps.
"""

from proxy.control.steps import read_steps
from proxy.drifting import count_drift, find_drift, warn_of_unexplained
from proxy.errors import ProxyError
from proxy.logs import LOG
from proxy.parts import Parts
from proxy.rollouts import Rollout, read_rollout
from proxy.trajectory.step import Step
from storage.errors import StorageError
from storage.types import Appended


def settle_drift(parts: Parts, rollout_id: str) -> None:
    """Count the drift of a rollout that was finished, or that got another step since."""
    parts.recorder.hold(parts.settling.settle(rollout_id, lambda: _settle(parts, rollout_id)))


def complete_drift(parts: Parts, rollout: Rollout) -> None:
    """Complete the drift of a rollout that somebody looks at, if it is finished and some of its drift is not known."""
    if rollout.is_finished and not rollout.is_drift_known and not parts.settling.rests(rollout.rollout_id):
        settle_drift(parts, rollout.rollout_id)


def settle_late(parts: Parts, step: Step, appended: Appended) -> None:
    """Count the drift anew after a step was stored in a finished rollout.

    While it is counted, and soon after, that is left to the next look: each count reads all steps.
    """
    if appended.is_late and not parts.settling.rests(step.rollout_id):
        settle_drift(parts, step.rollout_id)


async def _settle(parts: Parts, rollout_id: str) -> None:
    try:
        stored = await parts.store.get(rollout_id)
        rollout = None if stored is None else read_rollout(stored)
        if rollout is None or not rollout.is_finished or rollout.is_drift_known:
            return
        steps = await read_steps(parts, rollout, whole=True)
        # A process that stops does not wait for engines: a later look completes what is missing.
        drift = await find_drift(parts, rollout, steps, texts="none" if parts.stopping.is_set() else "deciding")
        if rollout.drift is None:  # later looks may be many
            warn_of_unexplained(rollout_id, drift)
        await count_drift(parts, rollout, drift, len(steps))
    except (ProxyError, StorageError) as error:
        LOG.error("drift is not counted: %s", error, extra={"fields": {"rollout_id": rollout_id}})
